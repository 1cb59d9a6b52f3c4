"""Attention over pages for TPUs: a grid step computes a split of the list of one kv head.

The pages of a step are copied by DMA, each only if it is listed; the next step is prefetched while
one is computed. Scores are [rows, keys]: decoding has few rows, and keys fill the lanes.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xsake.kernels import online_softmax
from xsake.kernels.mask_program import MaskProgram, trace_mask
from xsake.kernels.online_softmax import BASE_E
from xsake.kernels.paged_decode import splits
from xsake.kernels.paged_decode.splits import SplitCall, SplitSizes
from xsake.kernels.paged_decode.types import PagedConfig, PagedInputs
from xsake.kernels.sharding import axes_of, result_shape, vary
from xsake.layout.numbering import quotient

type Ref = Any  # memory that a kernel reads by `ref[...]`

STEP_KEYS, SPLIT_KEYS = 512, 8192
MAX_TILE = 256  # rows
SUBLANES = 8  # of 32 bits: a page fills whole registers
MAX_BUFFER_BYTES = 8 * 2**20  # two steps of keys and values


def unsupported_reason(inputs: PagedInputs, config: PagedConfig, platform: str) -> str | None:
    """Why this backend cannot serve the call on a TPU; None if it can."""
    dtype, size = inputs.q.dtype, inputs.page_size
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"TPUs compute in float32 and bfloat16, not in {dtype}"
    multiple = SUBLANES * 4 // inputs.k.dtype.itemsize
    if size % multiple:
        return f"pages of {inputs.k.dtype} hold a multiple of {multiple} tokens, not {size}"
    features = sum(-(-x.shape[-1] // 128) * 128 for x in (inputs.k, inputs.v))
    needed = 2 * max(size, STEP_KEYS) * features * inputs.k.dtype.itemsize
    if needed > MAX_BUFFER_BYTES:
        return f"a step takes {needed >> 20} MiB of vector memory, more than 8; use smaller pages"
    program = trace_mask(config.mask)
    return program if isinstance(program, str) else None


def make_sizes(inputs: PagedInputs) -> SplitSizes:
    """Sizes of a call."""
    multiple = SUBLANES * 4 // inputs.q.dtype.itemsize
    return splits.make_sizes(inputs, STEP_KEYS, SPLIT_KEYS, MAX_TILE, multiple)


def _launch(
    inputs: PagedInputs, config: PagedConfig, program: MaskProgram, interpret: Any
) -> tuple[Array, Array]:
    """o [heads, splits, rows, Dv] and lse [heads, splits, rows] of all splits."""
    sizes = make_sizes(inputs)
    call = splits.cut_call(inputs, sizes, program)
    columns = call._replace(row_integers=call.row_integers.swapaxes(1, 2))
    (heads, _, dim), (_, kv_heads, size, v_dim) = call.q.shape, inputs.v.shape
    of_list = lambda head: quotient(head, heads // call.page.shape[0])
    keys = sizes.slots * size

    by_tile = lambda width: pl.BlockSpec((None, sizes.tile, width), lambda h, s, t: (h, t, 0))
    by_list = lambda *block, **more: pl.BlockSpec(
        (None, None, *block), lambda h, s, t: (of_list(h), s, *(0 for _ in block)), **more
    )
    by_split = lambda *block: pl.BlockSpec(
        (None, None, *block), lambda h, s, t: (h, s, *(0 for _ in block))
    )
    by_result = lambda width: pl.BlockSpec(
        (None, None, sizes.tile, width), lambda h, s, t: (h, s, t, 0)
    )
    scalars = lambda n: by_list(1, n, memory_space=pltpu.SMEM)
    of_scale = None if call.k_scale is None else by_split(sizes.steps, keys)
    specs = SplitCall(
        q=by_tile(dim),
        row_integers=by_tile(columns.row_integers.shape[2]),
        bounds=scalars(2),
        page=scalars(sizes.steps * sizes.slots),
        position=by_list(sizes.steps, keys),
        k_scale=of_scale,
        v_scale=of_scale,
    )
    columns = columns._replace(bounds=call.bounds[:, :, None], page=call.page[:, :, None])
    shapes = ((sizes.tile, v_dim), (sizes.tile, 1))
    grid = heads, sizes.splits, sizes.tiles
    pairs = heads * sizes.splits * sizes.steps * keys
    o, lse = pl.pallas_call(
        functools.partial(_kernel, config=config, sizes=sizes, program=program, kv_heads=kv_heads),
        out_shape=[
            result_shape((heads, sizes.splits, sizes.rows, x[1]), jnp.float32, inputs.q)
            for x in shapes
        ],
        grid=grid,
        in_specs=[specs, *[pl.BlockSpec(memory_space=pltpu.HBM)] * 2],
        out_specs=[by_result(v_dim), by_result(1)],
        scratch_shapes=[
            pltpu.VMEM((2, sizes.slots, size, dim), inputs.k.dtype),
            pltpu.VMEM((2, sizes.slots, size, v_dim), inputs.v.dtype),
            pltpu.SemaphoreType.DMA((2, 2)),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * len(grid)),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * sizes.rows * (dim + v_dim),
            bytes_accessed=pairs * (dim + v_dim) * inputs.k.dtype.itemsize,
            transcendentals=pairs * sizes.rows,
        ),
        interpret=interpret,
        name="paged_decode",
    )(*vary((columns, inputs.k, inputs.v), axes_of(inputs.q)))
    return o, lse[..., 0]


forward = splits.define_forward(_launch)


def _kernel(
    call: SplitCall, k_pool: Ref, v_pool: Ref, o_ref: Ref, lse_ref: Ref,
    k_buffer: Ref, v_buffer: Ref, semaphores: Ref,
    *, config: PagedConfig, sizes: SplitSizes, program: MaskProgram, kv_heads: int,
) -> None:  # fmt: skip
    """A tile of rows over one split.

    Grid    (kv head of a sequence, split, tile of rows), all independent.
    Reads   the listed pages of the split, step by step, by DMA.
    Writes  o [tile, Dv] and lse [tile, 1] over the keys of the split.
    """
    head = lax.rem(pl.program_id(0), kv_heads)
    first, stop = call.bounds[0, 0], call.bounds[0, 1]

    def copy_pages(step: Array, action: str) -> None:
        half = lax.rem(step, 2)

        def copy_page(slot: Array, _: Any) -> int:
            page = call.page[0, step * sizes.slots + slot]

            @pl.when(page >= 0)
            def _():
                for which, (pool, buffer) in enumerate(((k_pool, k_buffer), (v_pool, v_buffer))):
                    semaphore, target = semaphores.at[which, half], buffer.at[half, slot]
                    copy = pltpu.make_async_copy(pool.at[page, head], target, semaphore)
                    getattr(copy, action)()

            return 0

        lax.fori_loop(0, sizes.slots, copy_page, 0)

    pl.when(first < stop)(lambda: copy_pages(first, "start"))
    q, rows = call.q[...], call.row_integers[...]

    def body(step: Array, state: tuple[Array, Array, Array]):
        pl.when(step + 1 < stop)(lambda: copy_pages(step + 1, "start"))
        copy_pages(step, "wait")
        k, v = (x[lax.rem(step, 2)].reshape(-1, x.shape[-1]) for x in (k_buffer, v_buffer))
        of_step = lambda ref: ref[pl.ds(step, 1), :]
        s = _dot(q, k, 1) * config.scale
        if call.k_scale is not None:
            s, v_scale = s * of_step(call.k_scale), of_step(call.v_scale)
            is_finite = jnp.abs(v_scale) < jnp.inf
            s, v_scale = jnp.where(is_finite, s, jnp.nan), jnp.where(is_finite, v_scale, 0.0)
        else:
            v_scale, v, s = 1.0, *_isolate_nonfinite(v, s)
        s = online_softmax.to_scores(s, None, config.softcap, BASE_E)
        along = lambda x: jnp.broadcast_to(x, s.shape)
        integers = [along(rows[:, i : i + 1]) for i in range(rows.shape[1])]
        mask = splits.visible_pairs(program, integers, along(of_step(call.position)))
        s = jnp.where(mask, s, -jnp.inf)
        acc, m, l = state
        m, m_safe, alpha = online_softmax.rescale(m, jnp.max(s, 1, keepdims=True), BASE_E)
        p = online_softmax.probabilities(s, m_safe, base=BASE_E)
        l = l * alpha + jnp.sum(p, 1, keepdims=True)
        return acc * alpha + _dot((p * v_scale).astype(q.dtype), v, 0), m, l

    column = lambda value: jnp.full(lse_ref.shape, value, jnp.float32)
    state = jnp.zeros(o_ref.shape, jnp.float32), column(-jnp.inf), column(0)
    acc, m, l = lax.fori_loop(first, stop, body, state)
    o_ref[...] = online_softmax.normalize(acc, l)
    lse_ref[...] = online_softmax.log_sum_exp(m, l, BASE_E)


def _isolate_nonfinite(v: Array, s: Array) -> tuple[Array, Array]:
    """Values without non-finite ones, and NaN scores for their keys, hidden or not."""
    # TPUs have isfinite in float32 only.
    is_finite = jnp.isfinite(v.astype(jnp.float32))
    number = _dot(jnp.ones((s.shape[0], v.shape[1]), v.dtype), (~is_finite).astype(v.dtype), 1)
    v = jnp.where(is_finite, v.astype(jnp.float32), 0.0).astype(v.dtype)
    return v, jnp.where(number > 0, jnp.nan, s)


def _dot(a: Array, b: Array, axis: int) -> Array:
    """[m, n] by [n, d] (axis 0) or [d, n] (axis 1), summed in float32."""
    if b.dtype != a.dtype:
        b = b.astype(jnp.float32).astype(a.dtype)
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    contract = ((1,), (axis,)), ((), ())
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)
