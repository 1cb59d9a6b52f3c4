"""The manifest: what it holds, what it notices, and what its parser refuses."""

import json
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xsake.errors import ArgumentError, CheckpointError
from xsake.training import verify
from xsake.training.verify import DamagedError


def record(step: int = 7, **changes) -> verify.CheckpointRecord:
    fields = {
        "step": step,
        "utc": "2026-01-01T00:00:00+00:00",
        "leaves": (verify.LeafRecord(name="a/b", dtype="float32", shape=(2, 3), fingerprint=5),),
        "placement": verify.DevicePlacement(platform="cpu", devices=1, processes=1, axes={}),
        "versions": {"jax": "1"},
        "extra": {"data": [1, 2.5, None, "ä"]},
    }
    return verify.CheckpointRecord(**fields | changes)


def write(folder, files=None):
    files = verify.hash_share(folder, 0, 1) if files is None else files
    return verify.write_manifest(folder, record(), files)


@pytest.fixture
def step(tmp_path):
    folder = tmp_path / "7"
    (folder / "state" / "d").mkdir(parents=True)
    (folder / "state" / "d" / "data").write_bytes(bytes(range(256)))
    (folder / "state" / "empty").write_bytes(b"")
    (folder / "top").write_text("top")
    write(folder)
    return folder


# As 0.1.0 wrote it for the step above.
FIRST_FORMAT = """{
 "format": 1,
 "step": 7,
 "utc": "2026-01-01T00:00:00+00:00",
 "leaves": [
  {"name":"a/b","dtype":"float32","shape":[2,3],"fingerprint":5}
 ],
 "placement": {"platform":"cpu","devices":1,"processes":1,"axes":{}},
 "versions": {"jax":"1"},
 "extra": {"data":[1,2.5,null,"ä"]},
 "files": [
  {"path":"state/d/data","size":256,"blake2b":"39a7eb9fedc19aabc83425c6755dd90e6f9d0c804964a1f4aaeea3b9fb599835"},
  {"path":"state/empty","size":0,"blake2b":"0e5751c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8"},
  {"path":"top","size":3,"blake2b":"636742916ad825e540127004a549e959336dc986c8391bcf08cf85fa04104fe6"}
 ],
 "digest": "c07aaa4c71d68a7e28e175c1302ab02dcf80b27e540adec92650caf0ff2743e4"
}
"""


def test_a_manifest_of_0_1_0_is_read_and_still_written_in_the_same_way(step):
    assert (step / verify.MANIFEST).read_text() == FIRST_FORMAT
    (step / verify.MANIFEST).write_text(FIRST_FORMAT)
    manifest = verify.read_manifest(step)
    assert manifest.extra == record().extra and len(manifest.files) == 3
    verify.verify_files(step, manifest, "full")


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_of_processes_are_all_files_and_each_once(step, count):
    (step / verify.MANIFEST).unlink()
    for writer in range(5):
        (step / "state" / f"ocdbt.process_{writer}" / "d").mkdir(parents=True)
        (step / "state" / f"ocdbt.process_{writer}" / "d" / "data").write_text(str(writer))
    (step / "state" / "array_metadatas").mkdir()
    (step / "state" / "array_metadatas" / "process_4").write_text("4")
    (step / "state" / "ocdbt.process_x").write_text("x")
    shares = [verify.hash_share(step, process, count) for process in range(count)]
    files = [file for share in shares for file in share]
    assert sorted(file.path for file in files) == sorted(verify.list_files(step))
    assert {file.path for file in shares[-1]} >= (
        {f"state/ocdbt.process_{count - 1}/d/data"} if count <= 5 else set()
    )
    assert write(step, files).files == write(step).files


def test_shares_that_are_not_the_step_make_no_manifest(step):
    files = verify.hash_share(step, 0, 1)
    (step / verify.MANIFEST).unlink()
    with pytest.raises(DamagedError, match="extra"):
        write(step, files[1:])
    (step / "top").write_text("other")
    with pytest.raises(DamagedError, match="size"):
        write(step, files)
    (step / "top").unlink()
    with pytest.raises(DamagedError, match="missing"):
        write(step, files)
    assert not (step / verify.MANIFEST).exists()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_processes_that_verify_together_notice_what_one_would_notice(step, count):
    manifest = verify.read_manifest(step)
    (step / "top").write_text("toq")
    noticed = 0
    for process in range(count):
        try:
            verify.verify_files(step, manifest, "full", process, count)
        except DamagedError as error:
            assert (error.reason, error.file) == ("digest", "top")
            noticed += 1
    assert noticed == 1


def damage_of(folder, mode="full") -> DamagedError:
    with pytest.raises(DamagedError) as raised:
        manifest = verify.read_manifest(folder)
        assert manifest is not None
        verify.verify_files(folder, manifest, mode)
    return raised.value


def test_a_manifest_names_every_file_and_nothing_is_left_beside_it(step):
    manifest = verify.read_manifest(step)
    assert manifest is not None
    assert [file.path for file in manifest.files] == ["state/d/data", "state/empty", "top"]
    assert [file.size for file in manifest.files] == [256, 0, 3]
    assert verify.CheckpointRecord(**manifest.model_dump(exclude={"files"})) == record()
    verify.verify_files(step, manifest, "full")
    assert [path.name for path in step.parent.iterdir()] == ["7"]


def test_a_step_without_a_manifest_has_none(step):
    (step / verify.MANIFEST).unlink()
    assert verify.read_manifest(step) is None


def test_each_kind_of_damage_has_its_reason_and_names_the_file(step):
    data = step / "state" / "d" / "data"
    content = data.read_bytes()

    data.write_bytes(content[:-1] + b"?")
    found = damage_of(step)
    assert (found.reason, found.file) == ("digest", "state/d/data")
    manifest = verify.read_manifest(step)
    assert manifest is not None
    verify.verify_files(step, manifest, "size")

    data.write_bytes(content[:-1])
    assert damage_of(step, "size").reason == "size"
    assert "state/d/data" in str(damage_of(step)) and "255 bytes" in str(damage_of(step))
    verify.verify_files(step, manifest, "off")

    data.unlink()
    assert (damage_of(step).reason, damage_of(step).file) == ("missing", "state/d/data")
    data.write_bytes(content)
    (step / "state" / "new").write_text("new")
    assert (damage_of(step).reason, damage_of(step).file) == ("extra", "state/new")


@pytest.mark.parametrize("mode", ["full", "size", "off"])
def test_links_and_special_files_are_refused_in_every_mode(step, mode):
    data = step / "state" / "d" / "data"
    outside = step.parent / "outside"
    outside.write_bytes(data.read_bytes())
    data.unlink()
    data.symlink_to(outside)
    assert (damage_of(step, mode).reason, damage_of(step, mode).file) == ("symlink", "state/d/data")
    data.unlink()
    os.mkfifo(data)
    assert damage_of(step, mode).reason == "special"


def test_a_link_in_the_place_of_a_folder_or_of_the_manifest_is_refused(step):
    (step / "state").rename(step.parent / "moved")
    (step / "state").symlink_to(step.parent / "moved")
    assert (damage_of(step).reason, damage_of(step).file) == ("symlink", "state")
    (step / verify.MANIFEST).rename(step.parent / "elsewhere")
    (step / verify.MANIFEST).symlink_to(step.parent / "elsewhere")
    assert damage_of(step).reason == "symlink"


def test_a_manifest_of_another_step_is_refused(step):
    moved = step.rename(step.parent / "8")
    assert (damage_of(moved).reason, damage_of(moved).file) == ("manifest", verify.MANIFEST)


def test_files_that_this_process_may_not_read_are_not_called_damaged(step, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(verify, "_open_regular", refuse)
    with pytest.raises(CheckpointError, match="cannot be validated") as raised:
        verify.read_manifest(step)
    assert not isinstance(raised.value, DamagedError)


def test_a_file_that_the_disk_does_not_give_back_is_damaged(step, monkeypatch):
    manifest = verify.read_manifest(step)

    def fail(file):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(verify, "_hash_stream", fail)
    with pytest.raises(DamagedError, match="unreadable"):
        verify.verify_files(step, manifest, "full")


@given(seed=st.integers(0, 2**32))
def test_no_bit_of_a_manifest_can_change_unnoticed(seed):
    files = (verify.ManifestFile(path="a", size=3, blake2b="0" * 64),)
    whole = verify.Manifest(**record().model_dump(), files=files)
    text = bytearray(verify.seal(whole).encode())
    assert verify.unseal(verify.Manifest, bytes(text)) == whole
    drawn = random.Random(seed)
    text[drawn.randrange(len(text))] ^= 1 << drawn.randrange(8)
    with pytest.raises(ArgumentError, match="not a manifest as it was written"):
        verify.unseal(verify.Manifest, bytes(text))


@given(data=st.binary(max_size=200))
def test_the_parser_answers_anything_with_a_clean_refusal(data):
    with pytest.raises(ArgumentError):
        verify.unseal(verify.Manifest, data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{" * 100_000,
        b'{"a":' * 17 + b"1" + b"}" * 17,
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"digest": 5}',
        b" " * (verify.MAX_BYTES + 1),
    ],
    ids=["empty", "list", "open", "deep", "twice", "nan", "huge", "digest", "large"],
)
def test_hostile_manifests_are_refused(data):
    with pytest.raises(ArgumentError, match="not a manifest as it was written"):
        verify.unseal(verify.Manifest, data)


def test_a_digest_that_fits_does_not_excuse_fields_that_do_not():
    document = json.loads(verify.seal(record()))
    del document["digest"]
    for change in ({"step": "7"}, {"step": -1}, {"unknown": 1}, {"leaves": {}}):
        changed = document | change
        changed["digest"] = verify._hash_text(verify._canonical(changed))
        with pytest.raises(ArgumentError, match="not a manifest as it was written"):
            verify.unseal(verify.CheckpointRecord, json.dumps(changed).encode())


def test_a_format_of_another_version_is_no_damage():
    document = json.loads(verify.seal(record()))
    del document["digest"]
    document["format"] = 2
    document["digest"] = verify._hash_text(verify._canonical(document))
    with pytest.raises(CheckpointError, match="format 2, written by") as raised:
        verify.unseal(verify.CheckpointRecord, json.dumps(document).encode())
    assert not isinstance(raised.value, DamagedError)


@pytest.mark.parametrize(
    "extra",
    [{"a": (1, 2)}, {"a": {1: 2}}, {"a": float("nan")}, {"a": {2}}, {"a": "\ud800"}],
    ids=["tuple", "number as key", "nan", "set", "surrogate"],
)
def test_extra_that_json_would_change_is_refused(extra):
    with pytest.raises(ArgumentError, match="`extra` is not plain JSON"):
        verify.check_extra(extra)
