"""A case: one kernel pass to compile, serialized as JSON between processes."""

from typing import Annotated, Literal

from pydantic import Field

from xsake._schema import Frozen
from xsake.kernels.block_sparse.types import TileSizes

Positive = Annotated[int, Field(ge=1)]
PassName = Literal["forward", "dq", "dkv", "selected_forward", "selected_backward"]


class CompileCase(Frozen):
    """A compile that must succeed, or a negative control that the compiler must reject.

    Batch is 1. At budget 1 the layout lists every causally visible block; below it budgets differ
    between heads, as in calibrated plans, and the budget is their mean.
    """

    name: str = Field(description="unique; `--cases` matches it as a shell pattern")
    pass_name: PassName = Field(
        description="dq and dkv are two passes of one gradient; selected: one block list per token"
    )
    shape: str = Field(description="model that the heads come from, or the purpose of a control")
    tokens: Positive
    q_heads: Positive
    kv_heads: Positive
    head_dim: Positive
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    budget: float = Field(gt=0, le=1, description="computed / causally visible blocks")
    block: Positive = Field(description="tokens per block, for queries and keys")
    traced: bool = Field(default=False, description="the block list is an argument of the call")
    seed: int = Field(default=0, description="seed of the block lists")
    slots: Positive | None = Field(
        default=None, description="selected blocks per token; None: one list per row of blocks"
    )
    tiles: TileSizes | None = Field(default=None, description="None: chosen by the kernel")
    constants: dict[str, int] = Field(
        default_factory=dict,
        description="module constants, by dotted name, that a control overrides",
    )
    expects: Literal["compiles", "refused"] = "compiles"
    because: str | None = Field(
        default=None,
        description="pattern that the compiler's message must match for a control",
    )
