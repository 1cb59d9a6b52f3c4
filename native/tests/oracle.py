"""Attention in float64 NumPy with the rules of the kernels, and layouts to call them with."""

import dataclasses

import numpy as np

EMPTY_I32 = np.zeros(0, np.int32)


@dataclasses.dataclass
class Case:
    """One call: arrays, lists and the mask as a boolean array of pairs."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    row_starts: np.ndarray
    kv_block: np.ndarray
    is_partial: np.ndarray
    pairs: np.ndarray  # bool [B, Hq, Tq, Tk]: pairs that count
    block_q: int
    block_kv: int
    layout_batch: int = 1
    layout_heads: int = 1
    scale: float = 1.0
    softcap: float = 0.0
    program: tuple = ()
    program_heads: int = 1
    tables: np.ndarray = dataclasses.field(default_factory=lambda: EMPTY_I32)
    mask_blocks: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros((0, 1, 1), np.uint8)
    )
    mask_index: np.ndarray = dataclasses.field(default_factory=lambda: EMPTY_I32)
    bias: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0, 0, 0), np.float32))
    q_positions: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0), np.int32))
    kv_positions: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0), np.int32))
    q_segment_ids: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros((0, 0), np.int32)
    )
    kv_segment_ids: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros((0, 0), np.int32)
    )


def build_case(
    rng,
    *,
    batch=1,
    q_tokens=200,
    kv_tokens=None,
    q_heads=2,
    kv_heads=None,
    dim=16,
    v_dim=None,
    block_q=64,
    block_kv=64,
    layout_batch=1,
    layout_heads=1,
    density=1.0,
    dtype=np.float32,
    allows=None,
    program=(),
    positions=False,
    segments=False,
    mask_blocks=False,
    bias=None,
    bias_dtype=np.float32,
    softcap=0.0,
    amplitude=1.0,
    force_partial=False,
    tables=None,
    program_heads=1,
    capacity=0,
):
    """Draw arrays and a layout; `allows(q_pos, kv_pos, head)` is the mask of `program`."""
    kv_tokens = q_tokens if kv_tokens is None else kv_tokens
    kv_heads = q_heads if kv_heads is None else kv_heads
    v_dim = dim if v_dim is None else v_dim
    q_blocks, kv_blocks = -(-q_tokens // block_q), -(-kv_tokens // block_kv)
    draw = lambda *shape: (rng.standard_normal(shape) * amplitude).astype(dtype)
    q, k = draw(batch, q_tokens, q_heads, dim), draw(batch, kv_tokens, kv_heads, dim)
    v = rng.standard_normal((batch, kv_tokens, kv_heads, v_dim)).astype(dtype)
    extra = {}
    q_pos = np.broadcast_to(np.arange(q_tokens, dtype=np.int32), (batch, q_tokens))
    kv_pos = np.broadcast_to(np.arange(kv_tokens, dtype=np.int32), (batch, kv_tokens))
    if positions:
        q_pos = np.sort(rng.integers(0, kv_tokens, (batch, q_tokens)), -1).astype(np.int32)
        kv_pos = np.sort(rng.integers(0, kv_tokens, (batch, kv_tokens)), -1).astype(np.int32)
        extra.update(q_positions=q_pos, kv_positions=kv_pos)
    mask = np.ones((batch, q_heads, q_tokens, kv_tokens), bool)
    if allows is not None:
        heads = np.arange(q_heads)[None, :, None, None] * program_heads // q_heads
        mask &= allows(q_pos[:, None, :, None], kv_pos[:, None, None, :], heads)
    if segments:
        q_seg = np.sort(rng.integers(-1, 3, (batch, q_tokens)), -1).astype(np.int32)
        kv_seg = np.sort(rng.integers(-1, 3, (batch, kv_tokens)), -1).astype(np.int32)
        mask &= (q_seg[:, None, :, None] == kv_seg[:, None, None, :]) & (q_seg >= 0)[
            :, None, :, None
        ]
        extra.update(q_segment_ids=q_seg, kv_segment_ids=kv_seg)
    grid = rng.random((layout_batch, layout_heads, q_blocks, kv_blocks)) < density
    blocks = None
    if mask_blocks:
        blocks = rng.random((layout_batch, layout_heads, q_tokens, kv_tokens)) < 0.7
        mask &= np.repeat(blocks, q_heads // layout_heads, 1)
    pairs = np.zeros_like(mask)
    row_starts, items, partial, stored = [0], [], [], []
    for b in range(layout_batch):
        bs = slice(None) if layout_batch == 1 else slice(b, b + 1)
        for h in range(layout_heads):
            n = q_heads // layout_heads
            hs = slice(h * n, (h + 1) * n)
            for i in range(q_blocks):
                for j in range(kv_blocks):
                    rows = slice(i * block_q, (i + 1) * block_q)
                    keys = slice(j * block_kv, (j + 1) * block_kv)
                    part = mask[bs, hs, rows, keys]
                    if not grid[b, h, i, j] or not part.any():
                        continue
                    pairs[bs, hs, rows, keys] = part
                    items.append(j)
                    overhang = (j + 1) * block_kv > kv_tokens
                    partial.append(force_partial or overhang or not part.all())
                    if blocks is not None:
                        block = np.zeros((block_q, block_kv), np.uint8)
                        piece = blocks[b, h, rows, keys]
                        block[: piece.shape[0], : piece.shape[1]] = piece
                        stored.append(block)
                row_starts.append(len(items))
    if blocks is not None:
        extra["mask_blocks"] = (
            np.stack(stored) if stored else np.zeros((1, block_q, block_kv), np.uint8)
        )
        extra["mask_index"] = np.arange(len(items) + capacity, dtype=np.int32)
    if bias is not None:
        drawn = rng.standard_normal((*bias, q_tokens, kv_tokens))
        extra["bias"] = drawn.astype(bias_dtype)
    unused = rng.integers(-(2**31), 2**31 - 1, capacity)
    return Case(
        q,
        k,
        v,
        np.array(row_starts, np.int32),
        np.array([*items, *unused], np.int64).astype(np.int32),
        np.array([*partial, *[True] * capacity], bool),
        pairs,
        block_q,
        block_kv,
        layout_batch,
        layout_heads,
        scale=dim**-0.5,
        softcap=softcap,
        program=tuple(program),
        program_heads=program_heads,
        tables=EMPTY_I32 if tables is None else np.asarray(tables, np.int32).reshape(-1),
        **extra,
    )


def scores(case):
    """(scores in nats before the cap, after it) [B, Hq, Tq, Tk], float64."""
    group = case.q.shape[2] // case.k.shape[2]
    f = lambda x: np.moveaxis(np.asarray(x, np.float64), 2, 1)
    q, k = f(case.q), np.repeat(f(case.k), group, 1)
    s = q @ k.swapaxes(-1, -2) * case.scale
    if case.bias.size:
        b, h = (
            np.arange(q.shape[0]) % case.bias.shape[0],
            np.arange(q.shape[1]) % case.bias.shape[1],
        )
        s = s + np.asarray(case.bias, np.float64)[b[:, None], h[None]]
    return s, case.softcap * np.tanh(s / case.softcap) if case.softcap else s


def forward(case):
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    group = case.q.shape[2] // case.k.shape[2]
    s = np.where(case.pairs, scores(case)[1], -np.inf)
    m = s.max(-1, keepdims=True, initial=-np.inf)
    m = np.where(m == -np.inf, 0, m)
    p = np.exp(s - m)
    total = p.sum(-1, keepdims=True)
    v = np.repeat(np.moveaxis(np.asarray(case.v, np.float64), 2, 1), group, 1)
    o = p @ v / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = np.where(total == 0, -np.inf, m + np.log(total))[..., 0]
    return np.moveaxis(o, 1, 2), np.moveaxis(lse, 1, 2)


def backward(case, do, dlse):
    """`(dq, dk, dv, dbias)` of sum(o * do) + sum(lse * dlse)."""
    batch, q_tokens, q_heads, dim = case.q.shape
    kv_heads = case.k.shape[2]
    group = q_heads // kv_heads
    f = lambda x: np.moveaxis(np.asarray(x, np.float64), 2, 1)
    raw, s = scores(case)
    o, lse = forward(case)
    lse, delta = np.moveaxis(lse, 2, 1), np.moveaxis((o * do).sum(-1) - dlse, 2, 1)
    lse = np.where(np.isinf(lse), 0, lse)
    p = np.where(case.pairs, np.exp(np.where(case.pairs, s - lse[..., None], 0)), 0)
    v, k = (np.repeat(f(x), group, 1) for x in (case.v, case.k))
    ds = p * (f(do) @ v.swapaxes(-1, -2) - delta[..., None])
    if case.softcap:
        ds = ds * (1 - np.tanh(raw / case.softcap) ** 2)
    by_kv = lambda x: x.reshape(batch, kv_heads, group, *x.shape[2:]).sum(2)
    dq = ds @ k * case.scale
    dk = by_kv(ds.swapaxes(-1, -2) @ f(case.q)) * case.scale
    dv = by_kv(p.swapaxes(-1, -2) @ f(do))
    dbias = None
    if case.bias.size:
        bb, hb = case.bias.shape[:2]
        dbias = np.zeros((bb, hb, *ds.shape[2:]))
        for b in range(batch):
            for h in range(q_heads):
                dbias[b % bb, h % hb] += ds[b, h]
    t = lambda x: np.moveaxis(x, 1, 2)
    return t(dq), t(dk), t(dv), dbias


def ulp_bound(dtype):
    """Relative rounding step of a dtype."""
    return {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[np.dtype(dtype).name]
