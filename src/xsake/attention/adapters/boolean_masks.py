"""Turns a boolean array, as other libraries pass masks, into arguments of `xsake.attention`."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from xsake.errors import ShapeError, UnsupportedError
from xsake.layout.ragged import is_concrete
from xsake.masks import Explicit


def arguments_of(
    allowed, shape: tuple[int, int, int, int], softcap: float | None
) -> dict[str, Any]:
    """Keyword arguments that exclude the pairs where `allowed` is False, and no others.

    A mask on keys alone becomes segment ids, one that is known now and the same for the whole
    batch an `Explicit` mask; both skip blocks. Any other becomes a bias of 0 and -inf, which skips
    nothing.

    Args:
        allowed: True (or not zero) where a query may see a key; broadcasts to `shape`.
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
        kept = xp.broadcast_to(allowed[:, 0, 0], (batch, kv_tokens))
        return {
            "q_segment_ids": jnp.zeros((batch, q_tokens), jnp.int32),
            "kv_segment_ids": jnp.where(kept, 0, -1),
        }
    allowed = xp.broadcast_to(allowed, (*allowed.shape[:2], q_tokens, kv_tokens))
    if isinstance(allowed, np.ndarray) and (allowed == allowed[:1]).all():
        return {"mask": Explicit(allowed[0] if allowed.shape[1] > 1 else allowed[0, 0])}
    if softcap is not None:
        raise UnsupportedError(
            "a softcap would bring back pairs that a traced or batched boolean mask excludes",
            got=f"boolean mask {allowed.shape}, {softcap=}",
            expected="a mask on keys alone, or one that is known before tracing",
            fix="pass a mask of xsake.masks to the adapter instead",
        )
    return {"bias": jnp.where(allowed, jnp.float32(0), -jnp.inf)}
