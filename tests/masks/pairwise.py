"""Every mask as a sentence about one pair of Python ints; slow, obvious, and apart from xsake."""

import numpy as np

from xsake import masks


def allowed(mask, q: int, kv: int, head: int = 0) -> bool:
    """Whether `mask` allows one pair, by its definition."""
    match mask:
        case masks.Full():
            return True
        case masks.Causal():
            return kv <= q
        case masks.Window():
            before_ok = mask.left is None or q - kv <= mask.left
            after_ok = mask.right is None or kv - q <= mask.right
            return before_ok and after_ok
        case masks.Chunked():
            return q // mask.size == kv // mask.size
        case masks.Segments():
            q_ids, kv_ids = mask.q_ids.tolist(), mask.kv_ids.tolist()
            inside = q < len(q_ids) and kv < len(kv_ids)
            return inside and q_ids[q] >= 0 and q_ids[q] == kv_ids[kv]
        case masks.Sinks():
            return kv < mask.count
        case masks.Strided():
            return kv % mask.stride < mask.width
        case masks.Longformer():
            is_global = q < mask.global_tokens or kv < mask.global_tokens
            return is_global or abs(q - kv) <= mask.window
        case masks.Random():
            return _is_kept(mask, q // mask.cell, kv // mask.cell)
        case masks.BigBird():
            parts = (
                masks.Longformer(mask.window, mask.global_tokens),
                masks.Random(mask.keep, mask.seed, mask.cell),
            )
            return any(allowed(part, q, kv) for part in parts)
        case masks.Explicit():
            table = mask.array if mask.array.ndim == 2 else mask.array[head]
            return q < table.shape[0] and kv < table.shape[1] and bool(table[q, kv])
        case masks.FromFunction():
            arguments = (q, kv) if mask.heads is None else (q, kv, head)
            return bool(mask.function(*arguments))
        case masks.PerHead():
            return allowed(mask.members[head], q, kv)
        case masks.And():
            return all(allowed(part, q, kv, head) for part in mask.parts)
        case masks.Or():
            return any(allowed(part, q, kv, head) for part in mask.parts)
        case masks.Not():
            return not allowed(mask.part, q, kv, head)
    raise AssertionError(f"no definition for {mask!r}")


def _is_kept(mask, q_cell: int, kv_cell: int) -> bool:
    word = 2**32 - 1

    def scrambled(x):
        x = (x ^ x >> 16) * 0x85EBCA6B & word
        x = (x ^ x >> 13) * 0xC2B2AE35 & word
        return x ^ x >> 16

    golden = 0x9E3779B9
    state = scrambled(mask.seed + golden & word)
    state = scrambled(state + q_cell * golden & word)
    state = scrambled((state ^ golden) + kv_cell * golden & word)
    return state >> 2 < round(mask.keep * 2**30)


def table(mask, q_tokens: int, kv_tokens: int, head: int = 0) -> np.ndarray:
    """[q_tokens, kv_tokens] booleans, pair by pair."""
    return np.array(
        [[allowed(mask, q, kv, head) for kv in range(kv_tokens)] for q in range(q_tokens)]
    )
