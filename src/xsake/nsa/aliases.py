"""Names that `xsake` exports for the contents of `xsake.nsa`."""

from typing import Any

from xsake.errors import ArgumentError
from xsake.nsa.api import attention
from xsake.nsa.api import selected_attention as apply_native_sparse_attention
from xsake.nsa.config import KV as Branches
from xsake.nsa.config import Config as Blocks
from xsake.nsa.config import Gates

__all__ = [
    "Blocks",
    "Branches",
    "Gates",
    "apply_native_sparse_attention",
    "native_sparse_attention",
]


def native_sparse_attention(
    *args: Any, config: Blocks | None = None, blocks: Blocks | None = None, **kwargs: Any
) -> Any:
    """Call `xsake.nsa.attention`; `blocks` is the earlier name of `config`."""
    if config is not None and blocks is not None:
        raise ArgumentError(
            "blocks-and-config",
            "`blocks` and `config` are the same argument",
            got=f"config={config}, blocks={blocks}",
            expected="one of them",
            fix="use `config`",
        )
    return attention(*args, config=config or blocks or Blocks(), **kwargs)
