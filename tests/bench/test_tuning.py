import warnings

import pytest

from xsake.benchmarking import model_shape
from xsake.benchmarking.tuning import TunedCall, TunedFile, candidates, load_tuned_tiles, search
from xsake.errors import ArgumentError
from xsake.kernels.block_sparse.types import TileSizes
from xsake.kernels.tuning import TileTable

CALL = TunedCall(
    platform="cpu", dtype="float32", head_dim=64, block_q=128, block_kv=128, rows=256, blocks=16,
    tile_rows=8, tile_blocks=4, speedup=1.2,
)  # fmt: skip


def test_a_file_comes_back_and_newer_findings_replace_older_ones(tmp_path):
    file = TunedFile.of((CALL,))
    assert TunedFile.loads(file.model_dump_json()) == file
    faster = CALL.model_copy(update={"tile_rows": 12, "speedup": 1.3})
    assert file.merge((faster,)).table.find(CALL.bucket) == TileSizes(12, 4)
    file.save(tmp_path / "tuned.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_tuned_tiles(tmp_path / "tuned.json") == file.table


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text[: len(text) // 2], "invalid file of tile sizes"),
        (lambda text: text.replace('"tile_rows":8', '"tile_rows":0'), "greater than"),
        (lambda text: text.replace('"processor":"', '"processor":"9'), "another processor"),
        (lambda text: text.replace('"jax":"', '"jax":"9'), "another version of jax"),
        (lambda text: "[" * 100_000, "invalid file of tile sizes"),
    ],
)
def test_a_damaged_or_foreign_file_is_left_aside_with_a_warning(tmp_path, change, told):
    path = tmp_path / "tuned.json"
    path.write_text(change(TunedFile.of((CALL,)).model_dump_json()))
    with pytest.warns(UserWarning, match=told):
        assert load_tuned_tiles(path) == TileTable()


def test_a_missing_file_is_left_aside_and_an_empty_record_is_an_error(tmp_path):
    with pytest.warns(UserWarning, match="nowhere"):
        assert load_tuned_tiles(tmp_path / "nowhere.json") == TileTable()
    with pytest.raises(ArgumentError):
        TunedFile.loads("{}")


def test_the_field_has_no_sizes_beyond_the_call_or_the_caches():
    found = candidates(128, 128, rows=12)
    assert TileSizes(12, 4) in found and max(x.rows for x in found) == 12
    assert all(x.rows * x.blocks * 128**2 <= 2**23 for x in candidates(128, 128, 10**6))


@pytest.mark.slow  # quicker: tables of tile sizes are read, pinned and written
def test_a_search_confirms_its_winner_or_has_none(monkeypatch):
    from xsake.benchmarking import tuning

    monkeypatch.setattr(tuning, "ROWS", (2,))
    monkeypatch.setattr(tuning, "BLOCKS", (1, 2))
    seen = []
    found = search(
        model_shape("gemma-3-1b", 64), None, block=16, dtype="float32", is_backward=False, rounds=2,
        on_progress=lambda event: seen.append((event.done, event.total)),
    )  # fmt: skip
    assert found.tried == 2 and seen[:3] == [(1, 3), (2, 3), (3, 3)]
    assert (found.best is None) == (found.call is None)
    assert found.best is None or found.speedup.q25 > 1
