"""Mosaic GPU operations of the kernels: copies, barriers, products, register layouts, launch.

This module holds all code that depends on the release of JAX. Operations that the interpreter does
not implement have a second form for it. The code was checked with the releases in `CHECKED`; a test
fails for any other release.
"""

import dataclasses
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.extend import backend

from xsake.kernels.dispatch import is_release

type Ref = Any  # memory that a kernel reads
type Scalar = Any  # int32 in a register, or an int
# Releases of JAX whose lowering, interpreter and register layouts this module was checked with.
CHECKED = ("0.12.0",)
# Bytes per swizzle of shared memory. Products contract as many features at a time, so it decides
# how many operands are in registers: forward on sm_80 with heads of 64 features takes 167 registers
# with 32 bytes, 185 with 64 and 200 with 128 (ptxas 13.4).
SWIZZLE = 32
# `wgmma` reads shared memory itself, fastest with the widest swizzle.
WGMMA_SWIZZLES = (128, 64, 32)
# Keys that a product with p contracts at a time, for the same reason.
KEYS_AT_ONCE = 32


@functools.cache
def _plgpu() -> Any:
    """Import Pallas for GPUs when a kernel is built: that takes as long as importing XSAKE."""
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def capability() -> tuple[int, int] | None:
    """Compute capability of the device that code is lowered for; None if it is not known.

    The value that JAX uses when it lowers a kernel, but without a default: a kernel that is lowered
    for the wrong capability ends the process.
    """
    device: Any = backend.get_default_device()
    name = getattr(device, "compute_capability", None)
    if not isinstance(name, str) or name.startswith("gfx"):
        return None
    major, minor = name.split(".")
    return int(major), int(minor)


@dataclasses.dataclass(frozen=True)
class GpuOps:
    """Instructions that differ between GPUs."""

    # The tensor memory accelerator copies and signals barriers; else threads copy by `cp.async` and
    # wait
    uses_tma: bool
    interpret: Any = None  # parameters of the interpreter; None on a GPU
    # Products by `wgmma`, from shared memory; else by `mma`, from registers
    uses_wgmma: bool = False

    def barriers(self, arrivals: int, number: int = 1) -> list[Any]:
        """Barriers of copies: `number` of them, each for `arrivals` copies."""
        if not self.uses_tma:
            return []
        return [_plgpu().Barrier(num_arrivals=arrivals, num_barriers=number)]

    def copy(self, source: Any, target: Any, barriers: Sequence[Any], slot: Any = 0) -> None:
        """Start the copy of a tile into shared memory."""
        if self.uses_tma:
            _plgpu().copy_gmem_to_smem(source, target, barriers[0].at[slot])
        else:
            within = _plgpu().OOBFillMode.PROMISE_IN_BOUNDS
            _plgpu().copy_gmem_to_smem(source, target, oob_mode=within)

    def wait(self, barriers: Sequence[Any], slot: Any = 0) -> None:
        """Wait for the copies of a slot; without barriers, for all copies."""
        if self.uses_tma:
            _plgpu().barrier_wait(barriers[0].at[slot])
        else:
            _plgpu().wait_gmem_to_smem(0)

    def convert(self, sources: Sequence[Ref], targets: Sequence[Ref]) -> None:
        """Copy tiles [64 n, D] of shared memory to others of another dtype.

        JAX adds barriers around a store into shared memory: all warps have read what was there, and
        see what is there now.
        """
        for source, target in zip(sources, targets, strict=True):
            # JAX converts int8 to bfloat16 by an instruction that older capabilities than 9.0 lack,
            # also by way of float32, unless there is an operation in between.
            x = fragment(source, accumulator()).astype(jnp.float32) + 0.0
            store(target, x.astype(target.dtype))
        self.release()

    def release(self) -> None:
        """Commit reads of shared memory; required by the interpreter's race detector."""
        if self.interpret is not None:
            _plgpu().commit_smem()

    def dot_products(self, outer: Any, inner: Any) -> Any:
        """[outer, D] x [inner, D] -> [outer, inner], both in shared memory."""
        shape = outer.shape[0], inner.shape[0]
        if self.uses_wgmma:

            def run(acc: Ref) -> Any:
                _plgpu().wgmma(acc, outer, inner.transpose((1, 0)))
                return acc[...]

            return pl.run_scoped(run, _plgpu().ACC(shape, jnp.float32))
        # Slices of a tile begin at multiples of the features of one swizzle.
        acc, step = full(shape, 0.0), SWIZZLE // outer.dtype.itemsize
        for start in range(0, outer.shape[1], step):
            some = pl.ds(start, step)
            a = fragment(outer.at[:, some], left(outer.dtype))
            b = fragment(inner.at[:, some].transpose((1, 0)), right(inner.dtype))
            acc = self.mma(acc, a, b)
        return acc

    def mark_nonfinite(self, s: Any, inner: Any) -> Any:
        """`s` [outer, inner] with NaN in the columns whose row of `inner` [inner, D] is not finite.

        Adds the product of zeros and `inner`, by `mma`: other columns keep their bits.
        """
        step = SWIZZLE // inner.dtype.itemsize
        zeros = jnp.zeros((s.shape[0], step), inner.dtype)
        zeros = _plgpu().layout_cast(zeros, left(inner.dtype))
        for start in range(0, inner.shape[1], step):
            some = inner.at[:, pl.ds(start, step)].transpose((1, 0))
            s = self.mma(s, zeros, fragment(some, right(inner.dtype)))
        return s

    def add_product(self, acc: Any, p: Any, inner: Any, zero_nonfinite: bool = False) -> Any:
        """`acc + p @ inner`, [outer, inner] x [inner, D], `inner` in shared memory.

        `p` is rounded to the dtype of `inner`, whose non-finite values may be replaced by zero.
        """
        if self.uses_wgmma:
            assert not zero_nonfinite, "wgmma reads shared memory itself"
            p = p.astype(inner.dtype)
            if self.interpret is not None:
                return acc + jnp.dot(p, inner[...], preferred_element_type=jnp.float32)
            run = lambda acc: _plgpu().wgmma(acc, p, inner)
            return pl.run_state(run)(_plgpu().ACC.init(acc))
        for start in range(0, p.shape[1], KEYS_AT_ONCE):
            a = self.to_operand(p[:, start : start + KEYS_AT_ONCE], inner.dtype)
            b = fragment(inner.at[pl.ds(start, KEYS_AT_ONCE)], right(inner.dtype))
            acc = self.mma(acc, a, _zero_nonfinite(b) if zero_nonfinite else b)
        return acc

    def mma(self, acc: Any, a: Any, b: Any) -> Any:
        """`acc + a @ b` by tensor cores, summed in float32."""
        if self.interpret is None:
            return _plgpu().mma(acc, a, b)
        return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)

    def to_operand(self, x: Any, dtype: Any) -> Any:
        """Cast float32 sums to the left operand of a product, in 16 bits.

        Both register layouts hold an element in the same register of the same thread, so nothing
        moves. JAX refuses such a layout cast, and folds it away unless the dtype changes inside.
        """
        if self.interpret is not None:
            return x.astype(dtype)
        from jax.experimental.mosaic.gpu.utils import dtype_to_ir_type

        lhs = left(dtype)

        @_plgpu().inline_mgpu(
            arg_types=(accumulator(),),
            return_type=_plgpu().ShapeDtypeStruct(x.shape, dtype, layout=lhs),
        )
        def cast(_, x: Any):
            x, layout = x.astype(dtype_to_ir_type(dtype)), lhs.to_mgpu()
            registers = x.registers.reshape(layout.registers_shape(x.shape))
            return type(x)(_registers=registers, _layout=layout, _is_signed=None)

        return cast(x)


def accumulator() -> Any:
    """The register layout of float32 sums."""
    return _plgpu().Layout.MMA_ACC(jnp.float32)


def left(dtype: Any) -> Any:
    """The register layout of a product's left operand."""
    return _plgpu().Layout.MMA_LHS(dtype)


def right(dtype: Any) -> Any:
    """The register layout of a product's right operand."""
    return _plgpu().Layout.MMA_RHS(dtype)


def shared(shape: Sequence[int], dtype: Any, ops: GpuOps) -> Any:
    """Shared memory for tiles [..., tokens, D], swizzled as tensor cores read them."""
    size = jnp.dtype(dtype).itemsize
    choices = WGMMA_SWIZZLES if ops.uses_wgmma else (SWIZZLE,)
    swizzle = next(number for number in choices if shape[-1] * size % number == 0)
    transforms = (
        _plgpu().TilingTransform((8, swizzle // size)),
        _plgpu().SwizzleTransform(swizzle),
    )
    return _plgpu().SMEM(tuple(shape), dtype, transforms=transforms)


def _zero_nonfinite(x: Any) -> Any:
    """Replace non-finite values by zero; isfinite is not supported on registers."""
    return jnp.where(jnp.abs(x.astype(jnp.float32)) < jnp.inf, x, jnp.zeros_like(x))


def fragment(ref: Any, layout: Any) -> Any:
    """Load a ref into registers."""
    return _plgpu().load(ref, layout=layout, optimized=False)


def store(ref: Any, x: Any) -> None:
    """Write registers to global or shared memory."""
    _plgpu().store(ref, x, optimized=False)


def full(shape: tuple[int, ...], value: Any, dtype: Any = jnp.float32) -> Any:
    """A tile of one value in the layout of sums; a vector has one value per row of such a tile."""
    layout = accumulator() if len(shape) == 2 else accumulator().reduce(1)
    return _plgpu().layout_cast(jnp.full(shape, value, dtype), layout)


def along(x: Any, shape: tuple[int, ...], axis: int) -> Any:
    """A vector as a tile that varies along `axis` only."""
    return lax.broadcast_in_dim(x, shape, (axis,))


def vector(ref: Any, axis: int) -> Any:
    """Load a vector from global memory, along `axis` of tiles of sums."""
    return fragment(ref, accumulator().reduce(1 - axis))


def indices(shape: tuple[int, int], axis: int) -> Any:
    """0, 1, 2, ... along an axis of a tile."""
    return _plgpu().broadcasted_iota(jnp.int32, shape, axis, layout=accumulator())


@dataclasses.dataclass(frozen=True)
class WarpGroups:
    """How the warp groups of a thread block share its work."""

    workers: int = 0  # warp groups that compute; one more copies for them. 0: one group does both

    def index(self) -> Any:
        """Index of the current warp group; the last one copies."""
        return lax.axis_index("group")

    def give_registers(self) -> None:
        """Release registers of the group that copies."""
        if self.workers > 1:
            _plgpu().set_max_registers(40, action="decrease")

    def take_registers(self) -> None:
        """Take registers for a group that computes."""
        if self.workers > 1:
            _plgpu().set_max_registers(232, action="increase")

    def barriers(self, number: int) -> list[Any]:
        """Barriers that signal that all compute groups have read a slot."""
        return [_plgpu().Barrier(num_arrivals=self.workers, num_barriers=number)]

    def arrive(self, barriers: Sequence[Any], slot: Any) -> None:
        """Signal that this group has read a slot."""
        _plgpu().barrier_arrive(barriers[0].at[slot])


def launch(
    body: Any,
    results: Sequence[Any],
    scratch: Sequence[Any],
    programs: int,
    *,
    name: str,
    interpret: Any,
    groups: WarpGroups,
) -> Any:
    """A kernel of `programs` thread blocks that call `body(program, *refs)`.

    Refs are those of inputs, `results` and `scratch`, in this order.
    """
    threads = {"num_threads": groups.workers + 1, "thread_name": "group"} if groups.workers else {}
    return _plgpu().kernel(
        lambda *refs: body(lax.axis_index("program"), *refs),
        out_type=list(results),
        scratch_types=list(scratch),
        grid=(programs,),
        grid_names=("program",),
        interpret=interpret,
        compiler_params=_plgpu().CompilerParams(approx_math=True),
        kernel_name=name,
        **threads,
    )


def is_checked(version: str = jax.__version__) -> bool:
    """Whether this module was checked with that release."""
    return is_release(CHECKED, version)
