"""One thing to compile: a pass over a named problem, as data that crosses processes as JSON."""

from typing import Annotated, Literal

from pydantic import Field

from xsake._schema import Frozen
from xsake.kernels.block_sparse.problem import TileSizes

Positive = Annotated[int, Field(ge=1)]
PassName = Literal["forward", "dq", "dkv", "selected_forward", "selected_backward"]


class Case(Frozen):
    """A compile that is expected to work, or a control that the compiler is expected to refuse.

    Batch is 1. At budget 1 the layout lists every causally visible block; below it heads differ in
    budget, as calibrated models have them, and the budget is their mean.
    """

    name: str = Field(description="unique; `--cases` matches it as a shell pattern")
    pass_name: PassName = Field(
        description="dq and dkv are two passes of one gradient; selected: tokens have own lists"
    )
    shape: str = Field(description="the model whose heads these are, or what a control shows")
    tokens: Positive
    q_heads: Positive
    kv_heads: Positive
    head_dim: Positive
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    budget: float = Field(gt=0, le=1, description="computed / causally visible blocks")
    block: Positive = Field(description="tokens of a block, queries and keys alike")
    traced: bool = Field(default=False, description="the block list is an argument of the call")
    seed: int = Field(default=0, description="of the heads' block lists")
    slots: Positive | None = Field(
        default=None, description="blocks that a token selects; None: rows of blocks share a list"
    )
    tiles: TileSizes | None = Field(default=None, description="None: the kernel's own choice")
    constants: dict[str, int] = Field(
        default_factory=dict,
        description="numbers of modules, by dotted name, that a control replaces",
    )
    expects: Literal["compiles", "refused"] = "compiles"
    because: str | None = Field(
        default=None,
        description="a pattern that the compiler's message must match if it is to refuse",
    )
