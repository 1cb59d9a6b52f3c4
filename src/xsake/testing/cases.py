"""Conformance cases: shapes, dtype, masking and random inputs."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from xsake.layout import BlockLayout
from xsake.masks import AbstractMask, Full
from xsake.testing import expand, oracle


@dataclasses.dataclass(frozen=True)
class ConformanceCase:
    """One row of the conformance table."""

    name: str  # test id
    mask: AbstractMask | None = None
    # (block_q, block_kv) of the layout built from `mask`; None passes the mask itself
    block: tuple[int, int] | None = None
    layout: Callable[["ConformanceCase"], BlockLayout] | None = None  # builds the layout instead
    batch: int = 1
    q_tokens: int = 96
    kv_tokens: int = 96
    q_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 32
    value_dim: int = 32
    dtype: str = "float32"  # of q, k, v and bias
    softcap: float | None = None
    scale: float | None = None
    sinks: int | None = None  # 0 for shape [Hq], S for shape [Hq, S]
    bias: tuple[bool, bool] | None = None  # (per batch, per head): shape [B|1, Hq|1, Tq, Tk]
    # Per batch entry, (q lengths, kv lengths) of consecutive segments; the rest is padding.
    segments: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] | None = None
    q_positions: tuple | None = None  # [T] or [B, T]; None: 0..T-1
    kv_positions: tuple | None = None
    logits: float = 1.0  # factor on q

    @property
    def rule(self) -> AbstractMask:
        """Mask, `Full()` if there is none."""
        return Full() if self.mask is None else self.mask

    @functools.cached_property
    def schedule(self) -> BlockLayout | None:
        """Layout argument of the call, or None if the mask is passed."""
        if self.layout is not None:
            return self.layout(self)
        if self.block is None:
            return None
        return BlockLayout.from_mask(
            self.rule, q_tokens=self.q_tokens, kv_tokens=self.kv_tokens, block_q=self.block[0],
            block_kv=self.block[1],
        )  # fmt: skip

    @property
    def static(self) -> dict[str, Any]:
        """Static arguments of `xsake.attention`."""
        schedule = self.schedule
        masking: dict[str, Any] = {"mask": self.mask} if schedule is None else {"layout": schedule}
        if self._has_separate_mask:
            masking["mask"] = self.mask
        return {**masking, "softcap": self.softcap, "scale": self.scale}

    @property
    def _has_separate_mask(self) -> bool:
        """Whether mask and layout are separate arguments."""
        return self.schedule is not None and self.schedule.mask is None and self.mask is not None

    @property
    def coordinates(self) -> expand.Coordinates:
        """Positions and segment ids as [B, T] arrays, with defaults."""
        return expand.Coordinates(
            _positions(self.q_positions, self.batch, self.q_tokens),
            _positions(self.kv_positions, self.batch, self.kv_tokens),
            self._ids(0, self.q_tokens),
            self._ids(1, self.kv_tokens),
        )

    def _ids(self, side: int, tokens: int) -> np.ndarray | None:
        if self.segments is None:
            return None
        ids = np.full((self.batch, tokens), -1, np.int32)
        for b, lengths in enumerate(self.segments):
            stops = np.cumsum((0, *lengths[side]))
            for name, (start, stop) in enumerate(zip(stops, stops[1:], strict=False)):
                ids[b, start:stop] = name
        return ids

    @functools.cached_property
    def allowed(self) -> np.ndarray:
        """Allowed pairs [B, Hq, Tq, Tk] by `expand`."""
        at, schedule = self.coordinates, self.schedule
        if schedule is None:
            tokens = expand.mask_tokens(self.mask, at, self.q_heads)
        else:
            tokens = expand.layout_tokens(schedule, at, self.q_heads)
            if self._has_separate_mask:
                tokens = tokens & expand.mask_tokens(self.mask, at, self.q_heads)
        return tokens & expand.same_segment(at, self.q_heads, self.batch)

    def inputs(self, seed: int = 0) -> "CaseInputs":
        """Draw unit-variance operands and cotangents in the dtype of the case."""
        rng = np.random.default_rng(seed)
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        wide_dtype = np.dtype(np.float64 if self.dtype == "float64" else np.float32)
        b, tq, tk = self.batch, self.q_tokens, self.kv_tokens
        draw = lambda *shape: rng.standard_normal(shape)
        operands = {
            "q": (self.logits * draw(b, tq, self.q_heads, self.head_dim)).astype(dtype),
            "k": draw(b, tk, self.kv_heads, self.head_dim).astype(dtype),
            "v": draw(b, tk, self.kv_heads, self.value_dim).astype(dtype),
        }
        if self.bias is not None:
            shape = (b if self.bias[0] else 1, self.q_heads if self.bias[1] else 1, tq, tk)
            operands["bias"] = draw(*shape).astype(dtype)
        if self.sinks is not None:
            shape = (self.q_heads, self.sinks) if self.sinks else (self.q_heads,)
            operands["sinks"] = draw(*shape).astype(wide_dtype)
        d_out = draw(b, tq, self.q_heads, self.value_dim).astype(dtype)
        d_lse = draw(b, tq, self.q_heads).astype(wide_dtype)
        return CaseInputs(operands, d_out, d_lse, self._integers())

    def _integers(self) -> dict[str, np.ndarray]:
        at = self.coordinates
        arrays: dict[str, np.ndarray] = {}
        if self.q_positions is not None:
            arrays["q_positions"] = np.asarray(self.q_positions, np.int32)
        if self.kv_positions is not None:
            arrays["kv_positions"] = np.asarray(self.kv_positions, np.int32)
        if at.q_segment_ids is not None and at.kv_segment_ids is not None:
            arrays["q_segment_ids"] = at.q_segment_ids
            arrays["kv_segment_ids"] = at.kv_segment_ids
        return arrays

    def operands(self, inputs: "CaseInputs") -> oracle.DenseInputs:
        """Return the inputs of the oracle and of naive attention."""
        x = inputs.operands
        return oracle.DenseInputs(
            x["q"], x["k"], x["v"], self.allowed, x.get("bias"), x.get("sinks"), self.softcap,
            self.scale,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CaseInputs:
    """Inputs of one call: differentiable operands, cotangents, integer arrays."""

    operands: dict[str, np.ndarray]
    d_out: np.ndarray
    d_lse: np.ndarray
    integers: dict[str, np.ndarray]

    def replace(self, **operands: np.ndarray) -> "CaseInputs":
        """Return the inputs with some operands replaced."""
        return dataclasses.replace(self, operands={**self.operands, **operands})


def _positions(positions: tuple | None, batch: int, tokens: int) -> np.ndarray:
    values = np.arange(tokens) if positions is None else np.asarray(positions)
    return np.broadcast_to(values, (batch, tokens))
