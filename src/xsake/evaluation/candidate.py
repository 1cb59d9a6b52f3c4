"""A candidate: the attention that is compared with dense attention, and what to call it."""

import dataclasses
import hashlib
import json

from xsake import masks
from xsake.attention import BlockSparseAttention
from xsake.hads import Planned, SparsityPlan
from xsake.hads.budget import visible_blocks
from xsake.layout import BlockLayout
from xsake.layout.grid import blocks_of
from xsake.masks import AbstractMask, Causal
from xsake.model import Attend, Listed, Masked


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An attention with a name.

    Args:
        description: for people.
        attend: what the model runs with.
        digest: equal digests promise equal results, so that interrupted runs can go on.
        tokens: the only length it serves; None: any.

    Example:
        >>> from xsake.masks import Sinks, Window
        >>> candidate = Candidate.of_mask(Window(left=255, right=0) | Sinks(4))
        >>> candidate.description, round(candidate.budget(4096), 3)
        ('Window(left=255, right=0) | Sinks(count=4)', 0.231)
    """

    description: str
    attend: Attend
    digest: str
    tokens: int | None = None

    @classmethod
    def of_mask(cls, mask: AbstractMask, block: int | None = None) -> "Candidate":
        """A mask on top of the model's own rule; one that cannot be written down raises.

        Args:
            mask: the mask.
            block: tokens of a block; None: as attention does by itself.
        """
        text = json.dumps(masks.to_dict(mask))
        if block is None:
            return cls(repr(mask), Masked(mask), _digest(text))
        attend = Masked(mask, BlockSparseAttention(block_q=block, block_kv=block))
        return cls(f"{mask!r} in blocks of {block}", attend, _digest(f"{block} {text}"))

    @classmethod
    def of_layout(cls, layout: BlockLayout) -> "Candidate":
        """The listed blocks of a layout in every layer, under the model's own rule."""
        return cls(repr(layout), Listed(layout), _digest(layout.to_json()), layout.q_tokens)

    @classmethod
    def of_plan(cls, plan: SparsityPlan) -> "Candidate":
        """The blocks that a plan chooses for each input, at any length."""
        return cls(plan.summary, Planned(plan), _digest(plan.to_json()))

    def budget(self, tokens: int) -> float | None:
        """Computed / causally visible blocks at a length; None if nobody can tell beforehand."""
        match self.attend:
            case Masked(mask=mask, operator=operator):
                sizes = {"block_q": operator.block_q, "block_kv": operator.block_kv}
                layout = BlockLayout.from_mask(Causal() & mask, q_tokens=tokens, **sizes)
            case Listed(layouts=BlockLayout() as listed):
                layout = listed.with_mask(Causal())
            case Planned(plan=plan):
                n = blocks_of(tokens, plan.block)
                return float(plan.totals(n).sum() / (plan.model.heads * visible_blocks(n)))
            case _:
                return None
        return layout.stats().budget


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
