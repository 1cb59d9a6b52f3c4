"""The corner of Pallas for NVIDIA GPUs that changes between releases of jax; all of it is here.

Kernels say what they mean (copy a tile, multiply, make a weight an operand) and this file knows how
jax spells it: on a GPU, and in the interpreter, which has no rule for some of it. Every line was
checked with the releases in `CHECKED`; a test stops whoever upgrades jax without doing that again.
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

# Releases of jax whose lowering, interpreter and register layouts this file was written against.
CHECKED = ("0.12.0",)
# Bytes that shared memory is swizzled over. Products take as many features at a time, so it decides
# how many operands are in registers: forward on sm_80 with heads of 64 features takes 167 registers
# with 32, 185 with 64 and 200 with 128 (ptxas 13.4).
SWIZZLE = 32
# Warp groups read shared memory themselves, and best over as many bytes.
WGMMA_SWIZZLES = (128, 64, 32)
# Keys that a product with weights contracts at a time, for the same reason.
KEYS_AT_ONCE = 32


@functools.cache
def _plgpu() -> Any:
    """Pallas for GPUs, imported when a kernel is made: it takes as long as all of XSAKE."""
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def capability() -> tuple[int, int] | None:
    """Compute capability of the device that code is lowered for; None if nobody knows it.

    The same question that jax asks when it lowers a kernel, but without its guess: a kernel that is
    lowered for the wrong capability ends the process.
    """
    device: Any = backend.get_default_device()
    name = getattr(device, "compute_capability", None)
    if not isinstance(name, str) or name.startswith("gfx"):
        return None
    major, minor = name.split(".")
    return int(major), int(minor)


@dataclasses.dataclass(frozen=True)
class Machine:
    """How a kernel does what GPUs do differently.

    Args:
        uses_tma: copies are made by the tensor memory accelerator, and barriers tell their end;
            else threads copy by themselves, and wait for it.
        interpret: parameters of the interpreter; None on a GPU.
        uses_wgmma: products are made by Hopper's warp groups, from shared memory; else by `mma`,
            from registers.
    """

    uses_tma: bool
    interpret: Any = None
    uses_wgmma: bool = False

    def barriers(self, arrivals: int, number: int = 1) -> list[Any]:
        """Scratch for the ends of copies: `number` barriers of `arrivals` copies each."""
        if not self.uses_tma:
            return []
        return [_plgpu().Barrier(num_arrivals=arrivals, num_barriers=number)]

    def copy(self, source: Any, target: Any, barriers: Sequence[Any], slot: Any = 0) -> None:
        """Begin to copy a tile into shared memory."""
        if self.uses_tma:
            _plgpu().copy_gmem_to_smem(source, target, barriers[0].at[slot])
        else:
            within = _plgpu().OOBFillMode.PROMISE_IN_BOUNDS
            _plgpu().copy_gmem_to_smem(source, target, oob_mode=within)

    def wait(self, barriers: Sequence[Any], slot: Any = 0) -> None:
        """Until the copies of a slot have arrived; without barriers, until all have."""
        if self.uses_tma:
            _plgpu().barrier_wait(barriers[0].at[slot])
        else:
            _plgpu().wait_gmem_to_smem(0)

    def done_reading(self) -> None:
        """Says that a slot may be written again; its detector of races wants to be told."""
        if self.interpret is not None:
            _plgpu().commit_smem()

    def products(self, own: Any, met: Any) -> Any:
        """[own, D] x [met, D] -> [own, met], both in shared memory."""
        shape = own.shape[0], met.shape[0]
        if self.uses_wgmma:
            run = lambda total: self._whole(total, own, met.transpose((1, 0)))
            return pl.run_scoped(run, _plgpu().ACC(shape, jnp.float32))
        found, step = filled(shape, 0.0), features_at_once(own.dtype)
        for start in range(0, own.shape[1], step):
            some = pl.ds(start, step)
            a = fragment(own.at[:, some], left(own.dtype))
            b = fragment(met.at[:, some].transpose((1, 0)), right(met.dtype))
            found = self.multiplied(found, a, b)
        return found

    def _whole(self, total: Any, a: Any, b: Any) -> Any:
        _plgpu().wgmma(total, a, b)
        return total[...]

    def added(self, total: Any, weight: Any, met: Any, clean: bool = False) -> Any:
        """`total + weight @ met`, [own, met] x [met, D]; if `clean`, zeros where met is not finite.

        The weights are in registers and are rounded to the dtype of `met`, in shared memory.
        """
        if self.uses_wgmma:
            assert not clean, "tensor cores read what is in shared memory"
            return self._added_at_once(total, weight.astype(met.dtype), met)
        for start in range(0, weight.shape[1], KEYS_AT_ONCE):
            a = self.narrowed(weight[:, start : start + KEYS_AT_ONCE], met.dtype)
            b = fragment(met.at[pl.ds(start, KEYS_AT_ONCE)], right(met.dtype))
            total = self.multiplied(total, a, cleaned(b) if clean else b)
        return total

    def _added_at_once(self, total: Any, weight: Any, met: Any) -> Any:
        if self.interpret is not None:
            return total + jnp.dot(weight, met[...], preferred_element_type=jnp.float32)
        run = lambda sums: _plgpu().wgmma(sums, weight, met)
        return pl.run_state(run)(_plgpu().ACC.init(total))

    def multiplied(self, total: Any, a: Any, b: Any) -> Any:
        """`total + a @ b` by tensor cores, summed in float32."""
        if self.interpret is None:
            return _plgpu().mma(total, a, b)
        return total + jnp.dot(a, b, preferred_element_type=jnp.float32)

    def narrowed(self, x: Any, dtype: Any) -> Any:
        """A float32 sum as the left operand of a product, in 16 bits.

        Both layouts give an element to the same place of the same thread, so that registers only
        change their name. Jax refuses such a cast, and folds it away unless the change of dtype
        happens inside.
        """
        if self.interpret is not None:
            return x.astype(dtype)
        from jax.experimental.mosaic.gpu.utils import dtype_to_ir_type

        lhs = left(dtype)

        @_plgpu().inline_mgpu(
            arg_types=(sums(),), return_type=_plgpu().ShapeDtypeStruct(x.shape, dtype, layout=lhs)
        )
        def renamed(_, x):
            x, layout = x.astype(dtype_to_ir_type(dtype)), lhs.to_mgpu()
            registers = x.registers.reshape(layout.registers_shape(x.shape))
            return type(x)(_registers=registers, _layout=layout, _is_signed=None)

        return renamed(x)


def sums() -> Any:
    """The register layout of float32 sums."""
    return _plgpu().Layout.MMA_ACC(jnp.float32)


def left(dtype: Any) -> Any:
    """The register layout of a product's left operand."""
    return _plgpu().Layout.MMA_LHS(dtype)


def right(dtype: Any) -> Any:
    """The register layout of a product's right operand."""
    return _plgpu().Layout.MMA_RHS(dtype)


def shared(shape: Sequence[int], dtype: Any, machine: Machine) -> Any:
    """Scratch in shared memory for tiles [..., tokens, D], laid out as tensor cores read them."""
    size = jnp.dtype(dtype).itemsize
    choices = WGMMA_SWIZZLES if machine.uses_wgmma else (SWIZZLE,)
    swizzle = next(number for number in choices if shape[-1] * size % number == 0)
    transforms = (
        _plgpu().TilingTransform((8, swizzle // size)),
        _plgpu().SwizzleTransform(swizzle),
    )
    return _plgpu().SMEM(tuple(shape), dtype, transforms=transforms)


def features_at_once(dtype: Any) -> int:
    """Features that lie together in shared memory: slices of a tile begin at multiples of it."""
    return SWIZZLE // jnp.dtype(dtype).itemsize


def cleaned(x: Any) -> Any:
    """Zeros for what is not finite, in registers, which cannot be asked for that."""
    return jnp.where(jnp.abs(x.astype(jnp.float32)) < jnp.inf, x, jnp.zeros_like(x))


def fragment(ref: Any, layout: Any) -> Any:
    """What a ref holds, spread over registers."""
    return _plgpu().load(ref, layout=layout, optimized=False)


def store(ref: Any, x: Any) -> None:
    """Write registers to global memory."""
    _plgpu().store(ref, x, optimized=False)


def filled(shape: tuple[int, ...], value: Any, dtype: Any = jnp.float32) -> Any:
    """A tile of one number in the layout of sums; a vector is one number per row of such a tile."""
    layout = sums() if len(shape) == 2 else sums().reduce(1)
    return _plgpu().layout_cast(jnp.full(shape, value, dtype), layout)


def along(x: Any, shape: tuple[int, int], axis: int) -> Any:
    """A vector as a tile that varies along `axis` only."""
    return lax.broadcast_in_dim(x, shape, (axis,))


def vector(ref: Any, axis: int) -> Any:
    """Numbers of global memory that belong along `axis` of tiles of sums."""
    return fragment(ref, sums().reduce(1 - axis))


def indices(shape: tuple[int, int], axis: int) -> Any:
    """0, 1, 2, ... along an axis of a tile."""
    return _plgpu().broadcasted_iota(jnp.int32, shape, axis, layout=sums())


@dataclasses.dataclass(frozen=True)
class Team:
    """How the warp groups of a thread block share its work.

    Args:
        workers: warp groups that compute; one more copies for them. 0: one does both.
    """

    workers: int = 0

    @property
    def threads(self) -> dict[str, Any]:
        """What a launch has to be told."""
        return {"num_threads": self.workers + 1, "thread_name": "group"} if self.workers else {}

    def number(self) -> Any:
        """Of the warp group that asks; the last one copies."""
        return lax.axis_index("group")

    def give_registers(self) -> None:
        """The one that copies hands over what it does not need."""
        if self.workers > 1:
            _plgpu().set_max_registers(40, action="decrease")

    def take_registers(self) -> None:
        """Those that compute take it."""
        if self.workers > 1:
            _plgpu().set_max_registers(232, action="increase")

    def barriers(self, number: int) -> list[Any]:
        """Barriers by which workers say that they have read a slot."""
        return [_plgpu().Barrier(num_arrivals=self.workers, num_barriers=number)]

    def arrive(self, barriers: Sequence[Any], slot: Any) -> None:
        """Say so."""
        _plgpu().barrier_arrive(barriers[0].at[slot])


def launch(
    body: Any,
    results: Sequence[Any],
    scratch: Sequence[Any],
    programs: int,
    *,
    name: str,
    interpret: Any,
    team: Team,
):
    """A kernel of `programs` thread blocks that call `body`.

    Args:
        body: `(program, *refs)`: refs of inputs, results and scratch, in this order.
        results: their shapes and dtypes.
        scratch: what `shared` and `Machine.barriers` give.
        programs: number of thread blocks.
        name: of the kernel.
        interpret: parameters of the interpreter; None on a GPU.
        team: warp groups of a thread block.
    """
    return _plgpu().kernel(
        lambda *refs: body(lax.axis_index("program"), *refs),
        out_type=list(results),
        scratch_types=list(scratch),
        grid=(programs,),
        grid_names=("program",),
        interpret=interpret,
        compiler_params=_plgpu().CompilerParams(approx_math=True),
        kernel_name=name,
        **team.threads,
    )


def is_checked(version: str = jax.__version__) -> bool:
    """Whether this file was written against that release."""
    return any(version == name or version.startswith(f"{name}.") for name in CHECKED)
