"""Selector interface: estimates of block masses from queries and keys, their cost and JSON form."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from pydantic import Field

from xsake._schema import Fraction, Frozen, Number, Text
from xsake.errors import ArgumentError
from xsake.masks import AbstractMask, Causal

SpecSettings = dict[Text, Annotated[int, Field(strict=True)] | Number | Text]


class Chunk(NamedTuple):
    """Part of a prompt: queries from the first token of a block on, and the keys up to them."""

    first_row: Int[Array, " B"]  # query block of the first query
    num_tokens: Int[Array, " B"]  # of the sequence so far; later keys and queries are padding


class ScoringContext(NamedTuple):
    """Block size, scale and mask of a self-attention call; query i is at position i."""

    block: int
    scale: float
    mask: AbstractMask = Causal()
    softcap: float | None = None
    segment_ids: Any = None  # [B, T]
    chunk: Chunk | None = None  # of the queries; None: all of them

    def rows(self, count: int) -> Any:
        """Return the numbers of `count` query blocks, [B or 1, count]."""
        rows = np.arange(count, dtype=np.int32)[None]
        return rows if self.chunk is None else self.chunk.first_row[:, None] + rows

    def visible(self, rows: int, columns: int) -> Any:
        """Return which kv blocks precede or contain each query block, [B or 1, rows, columns]."""
        return np.arange(columns)[None, None] <= self.rows(rows)[..., None]

    def split_keys(self, k: Float[Array, "B T H D"]) -> Float[Array, "B N b H D"]:
        """Split keys into blocks; padding repeats the last token."""
        if self.chunk is not None:
            last = self.chunk.num_tokens[:, None] - 1
            index = jnp.minimum(jnp.arange(k.shape[1])[None], last)
            k = jnp.take_along_axis(k, index[..., None, None], axis=1)
        return split_blocks(k, self.block)


class SelectorSpec(Frozen):
    """Name, settings and cost of the selector that scores blocks at run time."""

    name: Text
    settings: SpecSettings = Field(default_factory=dict)
    cost: Fraction = Field(description="of scoring all heads / dense causal attention, in flops")


class Selector(abc.ABC):
    """Block scorer at run time; a frozen dataclass of its settings.

    Attributes:
        name: key in `SELECTORS` and in plan files.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def masses(
        self,
        q: Float[Array, "B Tq Hq D"],
        k: Float[Array, "B Tk Hk D"],
        context: ScoringContext,
        components: Int[Array | np.ndarray, "Hk R"] | None = None,
    ) -> Float[Array, "B Hq Nq Nk"]:
        """Estimate the attention mass of each block, mean over the queries of a row.

        With `context.chunk` the rows are those of the chunk.

        Args:
            q: queries after rotary embedding.
            k: keys after rotary embedding.
            context: block size, scale and mask.
            components: of queries and keys by descending contribution to scores, for selectors
                that use a part of them; None: all.
        """

    @abc.abstractmethod
    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """Return flops of scoring / flops of dense causal attention."""

    def spec(self, tokens: int, block: int, head_dim: int) -> SelectorSpec:
        """Return the JSON form, with the cost at this length."""
        cost = round(self.cost(tokens, block, head_dim), 9)
        return SelectorSpec(name=self.name, settings=vars(self), cost=cost)


def make_by_name(
    what: str, registry: Mapping[str, type], name: str, settings: Mapping[str, Any]
) -> Any:
    """Build a dataclass of a registry; errors name what exists."""
    if name not in registry:
        raise ArgumentError(
            "unknown-name", f"unknown {what}", got=name, expected=", ".join(registry)
        )
    try:
        return registry[name](**settings)
    except TypeError as error:
        fields = [field.name for field in dataclasses.fields(registry[name])]
        raise ArgumentError(
            "unknown-settings",
            f"unknown settings of the {what} {name!r}",
            got=", ".join(settings) or "none",
            expected=", ".join(fields) or "none",
        ) from error


def split_blocks(x: Float[Array, "B T H D"], block: int) -> Float[Array, "B N b H D"]:
    """Split tokens into blocks; the last one is padded with its last token."""
    missing = -x.shape[1] % block
    padded = jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0)), mode="edge")
    return padded.reshape(x.shape[0], -1, block, *x.shape[2:])


def group_heads(q: Float[Array, "*rest Hq D"], kv_heads: int) -> Float[Array, "*rest Hk G D"]:
    """Split query heads into groups that share a kv head."""
    return q.reshape(*q.shape[:-2], kv_heads, -1, q.shape[-1])


def correct_masses(
    masses: Float[Array, "B Hq Nq Nk"], weights: Float[Array | np.ndarray, "Hq 3"]
) -> Float[Array, "B Hq Nq Nk"]:
    """Correct estimates with the calibrated weights of each head.

    The mass of row i is predicted as `w0 * estimate[i] + w1 * estimate[i - 1] + w2 / visible[i]`.
    `w1` is large for heads whose attention changes slowly, `w2` where the estimate is poor.
    """
    before = jnp.pad(masses, ((0, 0), (0, 0), (1, 0), (0, 0)))
    return correct_later_rows(before, weights, np.arange(masses.shape[-2])[None])


def correct_later_rows(
    masses: Float[Array, "B Hq rows Nk"],
    weights: Float[Array | np.ndarray, "Hq 3"],
    rows: Int[Array | np.ndarray, "#B Nq"],
) -> Float[Array, "B Hq Nq Nk"]:
    """Correct all rows but the first, which serves as the row before them; `rows` numbers them."""
    w0, w1, w2 = (jnp.asarray(weights)[None, :, i, None, None] for i in range(3))
    row = rows[..., None]
    is_visible = np.arange(masses.shape[-1])[None, None] <= row
    uniform = is_visible / jnp.asarray(row + 1, jnp.float32)
    return w0 * masses[..., 1:, :] + w1 * masses[..., :-1, :] + w2 * uniform[:, None]
