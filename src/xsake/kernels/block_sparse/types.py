"""Inputs, numbers and gradients of a block-sparse call."""

import dataclasses
from typing import NamedTuple

from jax import Array
from jaxtyping import Float, Int

from xsake.layout import BlockLayout


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Tile sizes of a backend; they never change a result beyond rounding."""

    rows: int  # (batch, head, query block) computed together
    blocks: int  # listed blocks of a row in one step


@dataclasses.dataclass(frozen=True)
class BlockSparseConfig:
    """Numbers of a call: hashable, part of the key of a compiled program."""

    scale: float  # factor on q.k
    softcap: float | None = None  # scores become `softcap * tanh(scores / softcap)`; None: no cap
    tiles: TileSizes | None = None  # instead of the backend's own


class BlockSparseInputs(NamedTuple):
    """Arrays of a call. Positions default to the token index, segments to one for all tokens."""

    q: Float[Array, "B Tq Hq D"]
    k: Float[Array, "B Tk Hk D"]
    v: Float[Array, "B Tk Hk Dv"]
    layout: BlockLayout
    bias: Float[Array, "Bb Hb Tq Tk"] | None = None
    q_positions: Int[Array, "Bp Tq"] | None = None
    kv_positions: Int[Array, "Bp Tk"] | None = None
    q_segment_ids: Int[Array, "B Tq"] | None = None
    kv_segment_ids: Int[Array, "B Tk"] | None = None


class Gradients(NamedTuple):
    """Gradients of a call; `dbias` is None without a bias."""

    dq: Float[Array, "B Tq Hq D"]
    dk: Float[Array, "B Tk Hk D"]
    dv: Float[Array, "B Tk Hk Dv"]
    dbias: Float[Array, "Bb Hb Tq Tk"] | None = None
