"""Layout serialization to JSON and for `jax.export`; sizes are validated before allocation."""

import itertools
import json
from typing import Any

import numpy as np

from xsake import masks
from xsake.errors import LayoutError, MaskError
from xsake.layout.csr import Items, counts_to_starts, used_items
from xsake.layout.grid import SIZES, BlockGrid

FORMAT = "xsake.block_layout"
VERSION = 1
KEYS = {"format", "version", *SIZES, "mask", "rows"}


def encode(items: Items, grid: BlockGrid, mask: masks.AbstractMask | None) -> str:
    """Encode a layout, one line per row: flat triples (first kv block, length, 1 if partial)."""
    row, kv_block, is_partial = used_items(items)
    begins = np.ones(row.size, bool)
    begins[1:] = (
        (row[1:] != row[:-1])
        | (kv_block[1:] != kv_block[:-1] + 1)
        | (is_partial[1:] != is_partial[:-1])
    )
    first = np.flatnonzero(begins)
    lengths = np.diff(first, append=row.size)
    runs = np.stack([kv_block[first], lengths, is_partial[first]], axis=-1).reshape(-1).tolist()
    ends = (3 * np.cumsum(np.bincount(row[first], minlength=grid.rows))).tolist()
    rows = (runs[start:end] for start, end in itertools.pairwise([0, *ends]))
    head = {"format": FORMAT, "version": VERSION}
    head |= vars(grid) | {"mask": _describe_mask(mask)}
    lines = ",\n  ".join(json.dumps(part, separators=(",", ":")) for part in rows)
    return json.dumps(head)[:-1] + f', "rows": [\n  {lines}\n]}}\n'


def decode(text: str, *, max_items: int) -> tuple[Items, BlockGrid, masks.AbstractMask | None]:
    """Decode a layout; every size is validated against the text before it is used."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _format_error(
            "json-syntax", "not JSON", str(error)[:200], "the output of to_json()"
        ) from error
    if not isinstance(document, dict):
        raise _format_error(
            "json-object", "not a JSON object", type(document).__name__, "an object"
        )
    if set(document) != KEYS or document["format"] != FORMAT:
        raise _format_error(
            "json-keys", "wrong keys or format", f"keys {sorted(document)[:12]}", sorted(KEYS)
        )
    if type(document["version"]) is not int or document["version"] != VERSION:
        raise _format_error(
            "json-version", "unknown version", repr(document["version"])[:40], VERSION
        )
    sizes = {name: document[name] for name in SIZES}
    rows, mask_dict = document["rows"], document["mask"]
    if any(type(size) is not int for size in sizes.values()):
        raise _format_error("json-sizes", "a size is not an integer", repr(sizes)[:200], "integers")
    if not (mask_dict is None or isinstance(mask_dict, dict)):
        raise _format_error("json-mask", "invalid mask", repr(mask_dict)[:40], "an object or null")
    grid = BlockGrid(**sizes)
    if not isinstance(rows, list) or len(rows) != grid.rows:
        got = len(rows) if isinstance(rows, list) else type(rows).__name__
        raise _format_error("json-rows", "wrong number of rows", got, f"a list of {grid.rows} rows")
    if not all(isinstance(row, list) and len(row) % 3 == 0 for row in rows):
        raise _format_error(
            "json-triples", "a row is not a list of triples", None, "[first, length, partial, ...]"
        )
    numbers = list(itertools.chain.from_iterable(rows))
    if not all(type(number) is int and 0 <= number <= grid.kv_blocks for number in numbers):
        raise _format_error(
            "json-range",
            "a run exceeds the kv blocks",
            None,
            f"integers from 0 to {grid.kv_blocks}",
        )
    listed = sum(numbers[1::3])
    if listed > max_items:
        raise _format_error(
            "json-blocks", "too many blocks", listed, f"at most max_items = {max_items}"
        )
    runs = np.array(numbers, np.int64).reshape(-1, 3)
    first, lengths, partial = runs.T
    if (lengths < 1).any() or (partial > 1).any() or (first + lengths > grid.kv_blocks).any():
        raise _format_error(
            "json-run", "invalid run", None, "length >= 1, inside the kv blocks, 0 or 1"
        )
    run_rows = np.repeat(np.arange(grid.rows), [len(row) // 3 for row in rows])
    counts = np.zeros(grid.rows, np.int64)
    np.add.at(counts, run_rows, lengths)
    step = np.arange(listed) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    kv_block = (np.repeat(first, lengths) + step).astype(np.int32)
    items = Items(counts_to_starts(np, counts), kv_block, np.repeat(partial, lengths).astype(bool))
    return items, grid, None if mask_dict is None else masks.from_dict(mask_dict)


def _describe_mask(mask: masks.AbstractMask | None) -> dict[str, Any] | None:
    """Serialize a mask to JSON types; raise LayoutError if it has no JSON form."""
    try:
        return None if mask is None else masks.to_dict(mask)
    except MaskError as error:
        raise LayoutError(
            "mask-not-serializable",
            "the layout's mask cannot be serialized",
            got=repr(mask),
            expected="masks of xsake.masks other than FromFunction",
            fix="save the arguments of the mask and rebuild the layout, or resize back",
        ) from error


def encode_static(static: tuple[Any, ...]) -> bytes:
    """Encode the sizes and the mask of a layout for `jax.export`; its arrays are inputs."""
    *sizes, mask = static
    return json.dumps({"sizes": sizes, "mask": _describe_mask(mask)}).encode()


def decode_static(data: bytes) -> tuple[Any, ...]:
    """Decode the sizes and the mask of an exported layout."""
    try:
        document = json.loads(bytes(data))
        sizes, mask_dict = document["sizes"], document["mask"]
        grid = BlockGrid(**dict(zip(SIZES, sizes, strict=True)))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LayoutError(
            "exported",
            "invalid BlockLayout in an exported function",
            got=str(error)[:200],
            expected="data that jax.export wrote for xsake.BlockLayout",
        ) from error
    mask = None if mask_dict is None else masks.from_dict(mask_dict)
    return *vars(grid).values(), mask


def _format_error(slug: str, what: str, got: object, expected: object) -> LayoutError:
    return LayoutError(slug, f"invalid layout JSON: {what}", got=got, expected=expected)
