"""`xsake.explain`: describe which kernel a call would run and its cost, without executing it."""

import dataclasses
import math
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from xsake.attention.runtime_pruning import prune_blocks, pruning_sources
from xsake.attention.types import AnyArray, AttentionArgs, Implementation, Mask
from xsake.attention.validation import canonicalize_args
from xsake.kernels import dispatch
from xsake.kernels.block_sparse.api import OP
from xsake.kernels.block_sparse.cost import KernelCost, is_known
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.kernels.validation import no_runtime_typecheck
from xsake.layout import BlockLayout


@dataclasses.dataclass(frozen=True)
class BlockSummary:
    """Block counts of a call over all batch elements and query heads.

    Attributes:
        listed: blocks of the layout, or their upper bound.
        full: blocks without an element mask; None if known only at run time.
        partial: blocks with an element mask; None if known only at run time.
        visible: blocks on or below the diagonal if the layout is causal, else all blocks.
        is_causal: whether the layout lists no block above the diagonal.
        budget: density, listed / visible.
    """

    listed: int
    full: int | None
    partial: int | None
    visible: int
    is_causal: bool
    budget: float


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Kernel, blocks and cost of a call; `print` shows a summary, `to_dict` gives JSON types.

    Attributes:
        implementation: selected implementation.
        library: name, version and instruction set of its native library; None if it has none.
        declined: other implementations and why they are not used.
        platform: target platform.
        arrays: shape and dtype of every array argument.
        scale, softcap: resolved values; a traced scale is None.
        mask: element mask of partial blocks.
        block_q, block_kv: block sizes in tokens.
        layout_origin: "given", "from the mask" or "every block".
        pruned_by: run-time arguments that drop blocks.
        is_static: whether the block list is compiled into the program.
        is_counted: whether block counts are exact; otherwise they are upper bounds.
        blocks: block counts of the layout.
        passes: cost of the forward and backward passes.
        compile_key: static arguments of the compiled program.
        recompiles: changes that cause a recompilation.
    """

    implementation: str
    library: str | None
    declined: dict[str, str]
    platform: str
    arrays: dict[str, str]
    scale: float | None
    softcap: float | None
    mask: str
    block_q: int
    block_kv: int
    layout_origin: str
    pruned_by: tuple[str, ...]
    is_static: bool
    is_counted: bool
    blocks: BlockSummary
    passes: tuple[KernelCost, ...]
    compile_key: dict[str, Any]
    recompiles: str

    @property
    def forward_flops(self) -> int:
        """FLOPs of the forward matrix products."""
        return self.passes[0].flops

    @property
    def backward_flops(self) -> int:
        """FLOPs of the backward passes, including recomputed logits."""
        return sum(each.flops for each in self.passes[1:])

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON types."""
        totals = {"forward_flops": self.forward_flops, "backward_flops": self.backward_flops}
        return {**_to_json_types(dataclasses.asdict(self)), **totals}

    def __str__(self) -> str:
        return "\n".join(f"{name:<15} {text}".rstrip() for name, text in self._lines())

    def _lines(self):
        library = "" if self.library is None else f" ({self.library})"
        yield "implementation", f"{self.implementation}{library} on {self.platform}"
        for name, reason in self.declined.items():
            yield "", f"not {name}: {reason}"
        yield "arrays", ", ".join(f"{name} {what}" for name, what in self.arrays.items())
        softcap = "" if self.softcap is None else f", softcap {self.softcap:g}"
        scale = "traced" if self.scale is None else f"{self.scale:.6g}"
        yield "logits", f"scale {scale}{softcap}"
        yield "mask", textwrap.shorten(self.mask, 80, placeholder=" ...")
        pruned_by = "".join(f", pruned by {source}" for source in self.pruned_by)
        tokens = f"{self.block_q} x {self.block_kv} tokens"
        yield "layout", f"{self.layout_origin}{pruned_by}; {tokens}"
        yield "blocks", self._blocks_text()
        for each in self.passes:
            yield each.name, _pass_text(each)
        yield "compiles again", self.recompiles

    def _blocks_text(self) -> str:
        blocks = self.blocks
        scope = "causally visible" if blocks.is_causal else "existing"
        share = f"{blocks.budget:.1%} of {blocks.visible:,} {scope}"
        if not self.is_counted:
            return f"known at run time, at most {blocks.listed:,} = {share}"
        return f"{blocks.listed:,} ({blocks.full:,} full, {blocks.partial:,} partial) = {share}"


@no_runtime_typecheck
def explain(
    q: Float[AnyArray, "*B Tq Hq D"],
    k: Float[AnyArray, "*B Tk Hk D"],
    v: Float[AnyArray, "*B Tk Hk Dv"],
    *,
    mask: Mask | jax.ShapeDtypeStruct = None,
    is_causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    layout: BlockLayout | None = None,
    block_size: int | tuple[int, int] | None = None,
    bias: Float[AnyArray, "..."] | None = None,
    sinks: Float[AnyArray, "Hq *S"] | None = None,
    softcap: float | None = None,
    scale: Any = None,
    q_segment_ids=None,
    kv_segment_ids=None,
    q_positions=None,
    kv_positions=None,
    return_lse: bool = False,
    implementation: Implementation = None,
    platform: str | None = None,
) -> Explanation:
    """Describe the `xsake.attention` call with these arguments without executing it.

    Arrays may be abstract (`jax.ShapeDtypeStruct`) or traced. If block
    counts depend on values that are not available, upper bounds are reported (`is_counted`).

    Args:
        q: queries [B, Tq, Hq, D]; only shape and dtype matter, as for k, v, bias and sinks.
        k: keys [B, Tk, Hk, D].
        v: values [B, Tk, Hk, Dv].
        mask: as for `xsake.attention`, like all other arguments.
        platform: "cpu", "tpu", "cuda", "rocm", or an NVIDIA architecture such as "sm_80"; it need
            not be present. None is the platform of the default device.

    Returns:
        An `Explanation`.

    Example:
        >>> import jax, xsake
        >>> q = jax.ShapeDtypeStruct((1, 1024, 4, 64), "float32")
        >>> report = xsake.explain(q, q, q, mask=xsake.masks.Causal())
        >>> report.blocks.listed, report.blocks.partial
        (144, 32)
    """
    platform = dispatch.find_platform(platform)
    # Evaluate concrete values eagerly, even inside jit.
    with jax.ensure_compile_time_eval():
        q, k, v, bias, sinks = (_abstract(x) for x in (q, k, v, bias, sinks))
        mask = _abstract(mask) if isinstance(mask, jax.core.Tracer) else mask
        args = AttentionArgs(
            mask, is_causal, window, layout, block_size, bias, sinks, softcap, scale,
            q_segment_ids, kv_segment_ids, q_positions, kv_positions,
        )  # fmt: skip
        operands, problem, sinks = canonicalize_args(q, k, v, args)
        chosen = OP.choose(operands, problem, platform, OP.names(implementation))
        sources = pruning_sources(operands)
        final = _prune_if_known(operands)
        is_static = final.layout.is_static
        is_counted = is_known(*jax.tree.leaves(final.layout))
        if is_counted:  # count in NumPy
            final = final._replace(layout=jax.tree.map(np.asarray, final.layout))
        passes = chosen.load().count_passes(final, problem, platform)
    return Explanation(
        implementation=chosen.name,
        library=chosen.describe_library(),
        declined=OP.reasons(operands, problem, platform, chosen.name),
        platform=platform,
        arrays=_arrays(operands, sinks),
        scale=None if isinstance(scale, jax.core.Tracer) else problem.scale,
        softcap=problem.softcap,
        mask="none" if final.layout.mask is None else repr(final.layout.mask),
        block_q=final.layout.block_q,
        block_kv=final.layout.block_kv,
        layout_origin=_origin(args),
        pruned_by=sources,
        is_static=is_static,
        is_counted=is_counted,
        blocks=_blocks(final, passes[0].listed, is_counted),
        passes=passes,
        compile_key=_compile_key(final, problem, chosen.name, sinks, is_static),
        recompiles=_recompiles(final.layout, is_static),
    )


def _abstract(x: Any) -> Any:
    """Return shape and dtype of an array."""
    if x is None:
        return None
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))


def _prune_if_known(operands: BlockSparseInputs) -> BlockSparseInputs:
    """Prune the layout; return only its shapes if values are not available."""
    if not pruning_sources(operands):
        return operands
    context = operands[3:4] + operands[5:]  # layout, positions, segment ids
    if is_known(*jax.tree.leaves(context)):
        return prune_blocks(operands)

    def layout_of(context):
        return prune_blocks(BlockSparseInputs(*operands[:3], context[0], None, *context[1:])).layout

    return operands._replace(layout=jax.eval_shape(layout_of, context))


def _blocks(operands: BlockSparseInputs, listed: int, is_counted: bool) -> BlockSummary:
    layout = operands.layout
    planes = operands.q.shape[0] * operands.q.shape[2]
    num_blocks = planes * layout.q_blocks * layout.kv_blocks
    if not is_counted:
        return BlockSummary(listed, None, None, num_blocks, False, listed / num_blocks)
    stats = layout.stats()
    copies = planes // (layout.batch * layout.heads)
    full, partial, visible = (
        copies * number for number in (stats.full, stats.partial, stats.visible_blocks)
    )
    return BlockSummary(listed, full, partial, visible, stats.is_causal, listed / visible)


def _arrays(operands: BlockSparseInputs, sinks) -> dict[str, str]:
    named = {**operands._asdict(), "sinks": sinks}
    del named["layout"]
    return {name: _spec(x) for name, x in named.items() if x is not None}


def _spec(x) -> str:
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]"


def _origin(args: AttentionArgs) -> str:
    has_mask = args.mask is not None or args.is_causal or args.window is not None
    if args.layout is None:
        return "from the mask" if has_mask else "every block"
    return "given, intersected with the mask" if has_mask else "given"


def _compile_key(
    operands: BlockSparseInputs, problem: BlockSparseConfig, chosen: str, sinks, is_static: bool
) -> dict[str, Any]:
    layout = operands.layout
    if is_static:
        layout_key: Any = f"static list of {layout.items} blocks"
    else:
        names = ("capacity", "batch", "heads", "block_q", "block_kv")
        layout_key = {name: getattr(layout, name) for name in names} | {"mask": repr(layout.mask)}
    return {
        "implementation": chosen,
        "arrays": _arrays(operands, sinks),
        "scale": problem.scale,
        "softcap": problem.softcap,
        "layout": layout_key,
    }


def _recompiles(layout: BlockLayout, is_static: bool) -> str:
    if is_static:
        return (
            "for other shapes, dtypes, scale or softcap, and for every other layout: "
            "the block list is part of the program"
        )
    return (
        "for other shapes, dtypes, scale, softcap, block sizes or mask, and for another capacity "
        f"than {layout.capacity:,}; the block list is data"
    )


def _pass_text(each: KernelCost) -> str:
    if each.computed is None:
        blocks = f"at most {each.listed:,} blocks plus row padding;"
    else:
        waste = each.computed / each.listed - 1 if each.listed else 0.0
        blocks = f"{each.computed:,} blocks computed (+{waste:.1%} over the list),"
    tiles = ""
    if each.tiles is not None:
        tiles = f"; tiles of {each.tiles.rows} rows x {each.tiles.blocks} blocks"
    launches = ""
    if each.launches is not None:
        launches = f"; {each.launches} launch" + "es" * (each.launches > 1)
    if each.balance is not None:
        launches += f"; max / mean of {each.cores} cores {each.balance:.2f}"
    if each.padded is not None:
        launches += f"; padding to the widest head {each.padded:.2f} x the blocks"
    return (
        f"{blocks} {_format_count(each.flops)}FLOP, reads {_format_count(each.bytes_read)}B, "
        f"writes {_format_count(each.bytes_written)}B{tiles}{launches}"
    )


def _format_count(number: int) -> str:
    """1_500_000 -> "1.5 M"."""
    power = min(5, int(math.log10(number) // 3)) if number else 0
    return f"{number / 1000**power:.3g} {'kMGTP'[power - 1] if power else ''}"


def _to_json_types(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_json_types(item) for name, item in value.items()}
    return [_to_json_types(item) for item in value] if isinstance(value, tuple | list) else value
