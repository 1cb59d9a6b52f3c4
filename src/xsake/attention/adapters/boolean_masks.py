"""Convert boolean mask arrays of other libraries to arguments of `xsake.attention`."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from xsake.errors import ShapeError, UnsupportedError
from xsake.layout.csr import is_concrete
from xsake.masks import Explicit


def attention_kwargs(
    allowed, shape: tuple[int, int, int, int], softcap: float | None
) -> dict[str, Any]:
    """Return keyword arguments equivalent to the boolean mask `allowed`.

    A mask on keys becomes segment ids, a concrete mask shared by the batch becomes `Explicit`; both
    skip blocks. Any other becomes a bias of 0 and -inf, which skips none.

    Args:
        allowed: True (or nonzero) where a query may attend to a key; broadcasts to `shape`.
        shape: [B, Hq, Tq, Tk] of the call.
        softcap: the call's softcap.
    """
    xp = np if is_concrete(allowed) else jnp
    allowed = xp.asarray(allowed).astype(bool)
    allowed = allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)
    if allowed.ndim != 4 or any(n not in (1, m) for n, m in zip(allowed.shape, shape, strict=True)):
        raise ShapeError(
            "the boolean mask does not broadcast to the logits",
            got=allowed.shape,
            expected=f"[B, Hq, Tq, Tk] = {shape}, any of them may be 1",
        )
    batch, _, q_tokens, kv_tokens = shape
    if allowed.shape[1:3] == (1, 1):
        is_valid = xp.broadcast_to(allowed[:, 0, 0], (batch, kv_tokens))
        return {
            "q_segment_ids": jnp.zeros((batch, q_tokens), jnp.int32),
            "kv_segment_ids": jnp.where(is_valid, 0, -1),
        }
    allowed = xp.broadcast_to(allowed, (*allowed.shape[:2], q_tokens, kv_tokens))
    if isinstance(allowed, np.ndarray) and (allowed == allowed[:1]).all():
        return {"mask": Explicit(allowed[0] if allowed.shape[1] > 1 else allowed[0, 0])}
    if softcap is not None:
        raise UnsupportedError(
            "softcap is not supported with a traced or batched boolean mask",
            got=f"boolean mask {allowed.shape}, {softcap=}",
            expected="a mask on keys only, or a concrete mask",
            fix="pass a mask of xsake.masks to the adapter instead",
        )
    return {"bias": jnp.where(allowed, jnp.float32(0), -jnp.inf)}
