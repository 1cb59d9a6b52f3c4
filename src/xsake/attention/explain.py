"""`xsake.explain`: what an attention call would do, told without doing it."""

import dataclasses
import math
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from xsake.attention.arguments import AnyArray, Rules, Scores, checks_itself, complete
from xsake.attention.visibility import narrowed, narrowing
from xsake.kernels import select
from xsake.kernels.block_sparse.cost import Pass, is_known
from xsake.kernels.block_sparse.op import BACKENDS
from xsake.kernels.block_sparse.problem import Operands, Problem
from xsake.layout import BlockLayout
from xsake.masks import AbstractMask


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of a call over all its batch elements and query heads.

    Attributes:
        listed: what the layout lists, or at most lists.
        full: of these, blocks without an element mask; None if known only at run time.
        partial: blocks with one; None likewise.
        visible: blocks that touch or lie below the diagonal if the layout lists no others, else
            every block.
        is_causal: which of the two it was.
        budget: listed / visible.
    """

    listed: int
    full: int | None
    partial: int | None
    visible: int
    is_causal: bool
    budget: float


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call would run; `print` shows one screen, `to_dict` gives JSON types.

    Attributes:
        implementation: what runs.
        declined: every other implementation and why it does not run.
        platform: what the call would be compiled for.
        arrays: shape and dtype of every array argument.
        scale, softcap: the numbers in use.
        mask: the rule inside partial blocks.
        block_q, block_kv: block sizes in tokens.
        layout_origin: "given", "from the mask" or "every block".
        narrowed_by: run-time arguments that drop further blocks.
        is_static: whether the block list is compiled into the program.
        is_counted: whether blocks could be counted now; else there is only an upper limit.
        blocks: what the layout lists.
        passes: what forward and backward compute.
        compile_key: what a compiled program is good for.
        recompiles: when a new call compiles again.
    """

    implementation: str
    declined: dict[str, str]
    platform: str
    arrays: dict[str, str]
    scale: float
    softcap: float | None
    mask: str
    block_q: int
    block_kv: int
    layout_origin: str
    narrowed_by: tuple[str, ...]
    is_static: bool
    is_counted: bool
    blocks: Blocks
    passes: tuple[Pass, ...]
    compile_key: dict[str, Any]
    recompiles: str

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of the forward matrix products."""
        return self.passes[0].flops

    @property
    def backward_flops(self) -> int:
        """The same for the backward passes, recomputed logits included."""
        return sum(each.flops for each in self.passes[1:])

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON types."""
        totals = {"forward_flops": self.forward_flops, "backward_flops": self.backward_flops}
        return {**_plain(dataclasses.asdict(self)), **totals}

    def __str__(self) -> str:
        return "\n".join(f"{name:<15} {text}".rstrip() for name, text in self._lines())

    def _lines(self):
        yield "implementation", f"{self.implementation} on {self.platform}"
        for name, reason in self.declined.items():
            yield "", f"not {name}: {reason}"
        yield "arrays", ", ".join(f"{name} {what}" for name, what in self.arrays.items())
        softcap = "" if self.softcap is None else f", softcap {self.softcap:g}"
        yield "logits", f"scale {self.scale:.6g}{softcap}"
        yield "mask", textwrap.shorten(self.mask, 80, placeholder=" ...")
        narrowed_by = "".join(f", narrowed by {what}" for what in self.narrowed_by)
        yield (
            "layout",
            f"{self.layout_origin}{narrowed_by}; {self.block_q} x {self.block_kv} tokens",
        )
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


@checks_itself
def explain(
    q: Float[AnyArray, "B Tq Hq D"],
    k: Float[AnyArray, "B Tk Hk D"],
    v: Float[AnyArray, "B Tk Hk Dv"],
    *,
    mask: AbstractMask | None = None,
    layout: BlockLayout | None = None,
    bias: Float[AnyArray, "Bb Hb Tq Tk"] | None = None,
    sinks: Float[AnyArray, "Hq *S"] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    q_segment_ids=None,
    kv_segment_ids=None,
    q_positions=None,
    kv_positions=None,
    return_lse: bool = False,
    implementation: str | None = None,
    platform: str | None = None,
) -> Explanation:
    """What `xsake.attention` would do with these arguments; computes no attention.

    Arrays may be abstract (`jax.ShapeDtypeStruct`) or traced. Blocks that depend on values which
    are not there are bounded instead of counted, and the answer says so.

    Args:
        q: queries [B, Tq, Hq, D]; only shape and dtype matter, as for k, v, bias and sinks.
        k: keys [B, Tk, Hk, D].
        v: values [B, Tk, Hk, Dv].
        mask: as for `xsake.attention`, and so are all the others.
        platform: what to explain the call for: "cpu", "tpu", "cuda", "rocm", or one kind of
            NVIDIA GPU such as "sm_80", present or not; None is the default device's.

    Returns:
        An `Explanation`.

    Example:
        >>> import jax, xsake
        >>> q = jax.ShapeDtypeStruct((1, 1024, 4, 64), "float32")
        >>> told = xsake.explain(q, q, q, mask=xsake.masks.Causal())
        >>> told.implementation, told.blocks.listed, told.blocks.partial
        ('xla', 144, 32)
    """
    rules = Rules(mask, layout, q_segment_ids, kv_segment_ids, q_positions, kv_positions)
    scores = Scores(scale, softcap, bias, sinks)
    return explain_call(q, k, v, rules, scores, implementation, platform)


def explain_call(
    q, k, v, rules: Rules, scores: Scores, implementation: str | None, platform: str | None = None
) -> Explanation:
    """`explain` for a call whose arguments are grouped."""
    platform = select.platform_named(platform)
    # Inside somebody's jit, what is known is still computed here and now.
    with jax.ensure_compile_time_eval():
        q, k, v, bias, sinks = (_abstract(x) for x in (q, k, v, scores.bias, scores.sinks))
        scores = dataclasses.replace(scores, bias=bias, sinks=sinks)
        operands, problem, sinks = complete(q, k, v, rules, scores)
        chosen = select.choose(operands, problem, platform, implementation)
        reasons = narrowing(operands)
        final = _narrowed(operands)
        is_static = final.layout.is_static
        counted = is_known(*jax.tree.leaves(final.layout))
        if counted:  # in NumPy, whatever the layout is made of
            final = final._replace(layout=jax.tree.map(np.asarray, final.layout))
        passes = BACKENDS[chosen].passes(final, problem, platform)
        blocks = _blocks(final, passes[0].listed, counted)
    return Explanation(
        implementation=chosen,
        declined=select.declined(operands, problem, platform, chosen),
        platform=platform,
        arrays=_arrays(operands, sinks),
        scale=problem.scale,
        softcap=problem.softcap,
        mask="none" if final.layout.mask is None else repr(final.layout.mask),
        block_q=final.layout.block_q,
        block_kv=final.layout.block_kv,
        layout_origin=_origin(rules),
        narrowed_by=reasons,
        is_static=is_static,
        is_counted=counted,
        blocks=blocks,
        passes=passes,
        compile_key=_compile_key(final, problem, chosen, sinks, is_static),
        recompiles=_recompiles(final.layout, is_static),
    )


def _abstract(x):
    """Shape and dtype of an array; attention looks at nothing else before it computes."""
    if x is None:
        return None
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))


def _narrowed(operands: Operands) -> Operands:
    """The call with its final layout: the real one, or its shapes if values are not known."""
    if not narrowing(operands):
        return operands
    context = operands[3:4] + operands[5:]  # layout, positions, segment ids
    if is_known(*jax.tree.leaves(context)):
        return narrowed(operands)

    def layout_of(context):
        return narrowed(Operands(*operands[:3], context[0], None, *context[1:])).layout

    return operands._replace(layout=jax.eval_shape(layout_of, context))


def _blocks(operands: Operands, listed: int, counted: bool) -> Blocks:
    layout = operands.layout
    planes = operands.q.shape[0] * operands.q.shape[2]
    every = planes * layout.q_blocks * layout.kv_blocks
    if not counted:
        return Blocks(listed, None, None, every, False, listed / every)
    stats = layout.stats()
    copies = planes // (layout.batch * layout.heads)
    visible = stats.visible_blocks * copies
    return Blocks(
        listed,
        stats.full * copies,
        stats.partial * copies,
        visible,
        stats.is_causal,
        listed / visible,
    )


def _arrays(operands: Operands, sinks) -> dict[str, str]:
    named = {**operands._asdict(), "sinks": sinks}
    del named["layout"]
    return {name: _spec(x) for name, x in named.items() if x is not None}


def _spec(x) -> str:
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]"


def _origin(rules: Rules) -> str:
    if rules.layout is None:
        return "every block" if rules.mask is None else "from the mask"
    return "given" if rules.mask is None else "given, intersected with the mask"


def _compile_key(
    operands: Operands, problem: Problem, chosen: str, sinks, is_static: bool
) -> dict[str, Any]:
    layout = operands.layout
    if is_static:
        listing: Any = f"this very list of {layout.items} blocks"
    else:
        names = ("capacity", "batch", "heads", "block_q", "block_kv")
        listing = {name: getattr(layout, name) for name in names} | {"mask": repr(layout.mask)}
    return {
        "implementation": chosen,
        "arrays": _arrays(operands, sinks),
        "scale": problem.scale,
        "softcap": problem.softcap,
        "layout": listing,
    }


def _recompiles(layout: BlockLayout, is_static: bool) -> str:
    if is_static:
        return (
            "for other shapes, dtypes, scale or softcap, and for every other layout: "
            "the block list is part of the program"
        )
    return (
        "for other shapes, dtypes, scale, softcap, block sizes or mask, and for another capacity "
        f"than {layout.capacity:,}; another list of blocks is just other data"
    )


def _pass_text(each: Pass) -> str:
    if each.computed is None:
        blocks = f"at most {each.listed:,} blocks, plus what short rows wait for long ones;"
    else:
        waste = each.computed / each.listed - 1 if each.listed else 0.0
        blocks = f"{each.computed:,} blocks computed (+{waste:.1%} over the list),"
    tiles = ""
    if each.tiles is not None:
        tiles = f"; tiles of {each.tiles.rows} rows x {each.tiles.blocks} blocks"
    launches = (
        "" if each.launches is None else f"; {each.launches} launch" + "es" * (each.launches > 1)
    )
    if each.balance is not None:
        launches += f"; busiest of {each.cores} cores {each.balance:.2f} x their mean"
    if each.padded is not None:
        launches += f"; padded to the widest head {each.padded:.2f} x the blocks"
    return (
        f"{blocks} {_count(each.flops)}FLOP, reads {_count(each.bytes_read)}B, "
        f"writes {_count(each.bytes_written)}B{tiles}{launches}"
    )


def _count(number: int) -> str:
    """1_500_000 -> "1.5 M"."""
    power = min(5, int(math.log10(number) // 3)) if number else 0
    return f"{number / 1000**power:.3g} {'kMGTP'[power - 1] if power else ''}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
