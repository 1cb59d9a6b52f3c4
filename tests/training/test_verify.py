"""Manifests: content, damage they reveal, and what their parser refuses."""

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
    manifest = verify.read_manifest(step)
    assert verify.CheckpointRecord(**manifest.model_dump(exclude={"files"})) == record()
    assert [file.size for file in manifest.files] == [256, 0, 3]
    verify.verify_files(step, manifest, "full")
    assert [path.name for path in step.parent.iterdir()] == ["7"]
    (step / verify.MANIFEST).unlink()
    assert verify.read_manifest(step) is None


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
    own = {f"state/ocdbt.process_{count - 1}/d/data"} if count <= 5 else set()
    assert {file.path for file in shares[-1]} >= own
    manifest = write(step, files)
    assert manifest.files == write(step).files
    # Processes that verify together notice damage once.
    (step / "top").write_text("toq")
    damages = []
    for process in range(count):
        try:
            verify.verify_files(step, manifest, "full", process, count)
        except DamagedError as error:
            damages.append((error.reason, error.file))
    assert damages == [("digest", "top")]


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


def link(path, target):
    path.rename(target)
    path.symlink_to(target)


DATA = "state/d/data"
DAMAGES = {  # what happens to a step: modes that notice it, reason, file
    "changed": (("full",), "digest", DATA),
    "shorter": (("full", "size"), "size", DATA),
    "deleted": (("full", "size"), "missing", DATA),
    "added": (("full", "size"), "extra", "state/new"),
    "link": (("full", "size", "off"), "symlink", DATA),
    "linked folder": (("full", "size", "off"), "symlink", "state"),
    "linked manifest": (("full", "size", "off"), "symlink", verify.MANIFEST),
    "pipe": (("full", "size", "off"), "special", DATA),
}


@pytest.mark.parametrize("harm", DAMAGES)
@pytest.mark.parametrize("mode", ["full", "size", "off"])
def test_each_kind_of_damage_has_its_reason_and_names_the_file(step, harm, mode):
    data, content = step / DATA, (step / DATA).read_bytes()
    manifest = verify.read_manifest(step)
    {
        "changed": lambda: data.write_bytes(content[:-1] + b"?"),
        "shorter": lambda: data.write_bytes(content[:-1]),
        "deleted": data.unlink,
        "added": lambda: (step / "state" / "new").write_text("new"),
        "link": lambda: link(data, step.parent / "outside"),
        "linked folder": lambda: link(step / "state", step.parent / "outside"),
        "linked manifest": lambda: link(step / verify.MANIFEST, step.parent / "outside"),
        "pipe": lambda: (data.unlink(), os.mkfifo(data)),
    }[harm]()
    modes, reason, file = DAMAGES[harm]
    if mode not in modes:
        verify.verify_files(step, manifest, mode)
        return
    with pytest.raises(DamagedError) as raised:
        verify.verify_files(step, verify.read_manifest(step), mode)
    assert (raised.value.reason, raised.value.file) == (reason, file)


def test_a_manifest_of_another_step_is_damage(step):
    with pytest.raises(DamagedError) as raised:
        verify.read_manifest(step.rename(step.parent / "8"))
    assert (raised.value.reason, raised.value.file) == ("manifest", verify.MANIFEST)


@pytest.mark.parametrize(("code", "is_damage"), [(13, False), (5, True)])
def test_only_errors_of_the_disk_are_damage(step, monkeypatch, code, is_damage):
    def fail(path):
        raise OSError(code, os.strerror(code), str(path))

    manifest = verify.read_manifest(step)
    monkeypatch.setattr(verify, "_open_regular", fail)
    with pytest.raises(
        CheckpointError, match="unreadable" if is_damage else "cannot be validated"
    ) as raised:
        verify.verify_files(step, manifest, "full")
    assert isinstance(raised.value, DamagedError) == is_damage


@given(seed=st.integers(0, 2**32), noise=st.binary(max_size=200))
def test_no_bit_of_a_manifest_can_change_unnoticed(seed, noise):
    files = (verify.ManifestFile(path="a", size=3, blake2b="0" * 64),)
    whole = verify.Manifest(**record().model_dump(), files=files)
    text = bytearray(verify.seal(whole).encode())
    assert verify.unseal(verify.Manifest, bytes(text)) == whole
    drawn = random.Random(seed)
    text[drawn.randrange(len(text))] ^= 1 << drawn.randrange(8)
    for data in (bytes(text), noise):
        with pytest.raises(ArgumentError, match="not a manifest as it was written"):
            verify.unseal(verify.Manifest, data)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{" * 100_000, b'{"a":' * 17 + b"1" + b"}" * 17, b'{"a": 1, "a": 2}',
        b'{"a": NaN}', b'{"a": 1e999}', b'{"digest": 5}', b" " * (verify.MAX_BYTES + 1),
    ],
    ids=["empty", "list", "open", "deep", "twice", "nan", "huge", "digest", "large"],
)  # fmt: skip
def test_hostile_manifests_are_refused(data):
    with pytest.raises(ArgumentError, match="not a manifest as it was written"):
        verify.unseal(verify.Manifest, data)


def reseal(**changes) -> bytes:
    document = json.loads(verify.seal(record()))
    del document["digest"]
    document |= changes
    document["digest"] = verify._hash_text(verify._canonical(document))
    return json.dumps(document).encode()


def test_a_digest_that_fits_does_not_excuse_fields_that_do_not():
    for change in ({"step": "7"}, {"step": -1}, {"unknown": 1}, {"leaves": {}}):
        with pytest.raises(ArgumentError, match="not a manifest as it was written"):
            verify.unseal(verify.CheckpointRecord, reseal(**change))
    # A format of another version is not damage.
    with pytest.raises(CheckpointError, match="format 2, written by") as raised:
        verify.unseal(verify.CheckpointRecord, reseal(format=2))
    assert not isinstance(raised.value, DamagedError)


@pytest.mark.parametrize(
    "extra",
    [{"a": (1, 2)}, {"a": {1: 2}}, {"a": float("nan")}, {"a": {2}}, {"a": "\ud800"}],
    ids=["tuple", "number as key", "nan", "set", "surrogate"],
)
def test_extra_that_json_would_change_is_refused(extra):
    with pytest.raises(ArgumentError, match="XSK-102.extra-json"):
        verify.check_extra(extra)
