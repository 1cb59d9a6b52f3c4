"""Candidate attention that is compared with dense attention."""

import dataclasses
import hashlib
import json

from xsake import masks
from xsake.attention import BlockSparseAttention
from xsake.evaluation.record import CandidateIdentity
from xsake.hads import PlanAttention, SparsityPlan
from xsake.hads.budget import visible_blocks
from xsake.layout import BlockLayout
from xsake.layout.grid import count_blocks
from xsake.masks import AbstractMask, Causal
from xsake.model import AttentionFn, LayoutAttention, MaskedAttention


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Attention function with a description.

    Args:
        description: readable name.
        attend: attention function of the model.
        digest: part of the cache key; equal digests mean equal results.
        tokens: the only supported length; None: any.

    Example:
        >>> from xsake.masks import Sinks, Window
        >>> candidate = Candidate.of_mask(Window(left=255, right=0) | Sinks(4))
        >>> candidate.description, round(candidate.budget(4096), 3)
        ('Window(left=255, right=0) | Sinks(count=4)', 0.231)
    """

    description: str
    attend: AttentionFn
    digest: str
    tokens: int | None = None

    @classmethod
    def of_mask(cls, mask: AbstractMask, block: int | None = None) -> "Candidate":
        """Build a candidate from a serializable mask, in addition to the model's mask.

        Args:
            mask: the mask.
            block: tokens of a block; None: the default.
        """
        text = json.dumps(masks.to_dict(mask))
        if block is None:
            return cls(repr(mask), MaskedAttention(mask), _digest(text))
        attend = MaskedAttention(mask, BlockSparseAttention(block_q=block, block_kv=block))
        return cls(f"{mask!r} in blocks of {block}", attend, _digest(f"{block} {text}"))

    @classmethod
    def of_layout(cls, layout: BlockLayout) -> "Candidate":
        """Build a candidate from a block layout for all layers, in addition to the model's mask."""
        digest = _digest(layout.to_json())
        return cls(repr(layout), LayoutAttention(layout), digest, layout.q_tokens)

    @classmethod
    def of_plan(cls, plan: SparsityPlan) -> "Candidate":
        """Build a candidate from a plan, for any length."""
        return cls(plan.summary, PlanAttention(plan), _digest(plan.to_json()))

    @property
    def identity(self) -> CandidateIdentity:
        """Fields of reports."""
        return CandidateIdentity(
            description=self.description, digest=self.digest, tokens=self.tokens
        )

    def budget(self, tokens: int) -> float | None:
        """Return computed / causally visible blocks at a length; None if unknown."""
        match self.attend:
            case MaskedAttention(mask=mask, operator=operator):
                sizes = {"block_q": operator.block_q, "block_kv": operator.block_kv}
                layout = BlockLayout.from_mask(Causal() & mask, q_tokens=tokens, **sizes)
                return layout.stats().budget
            case LayoutAttention(layouts=BlockLayout() as layout):
                return layout.with_mask(Causal()).stats().budget
            case PlanAttention(plan=plan):
                n = count_blocks(tokens, plan.block)
                return float(plan.totals(n).sum() / (plan.model.heads * visible_blocks(n)))
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
