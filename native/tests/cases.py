"""Layouts, masks and features that every handler has to support."""

import ml_dtypes
import numpy as np
import xsake_cpu

Q, K = ("position", 0, "int32"), ("position", 1, "int32")
STEP = lambda i, dtype="bool": ("step", i, dtype)
CONSTANT = lambda x: ("constant", x, "int32")


def causal():
    """Mask and program: a query sees keys up to its own position."""
    program = xsake_cpu.encode_program([("ge", (Q, K))], STEP(0))
    return {"allows": lambda q, k, h: q >= k, "program": program}


def window(left):
    """Causal window."""
    steps = [
        ("ge", (Q, K)),
        ("sub", (Q, CONSTANT(left))),
        ("le", (STEP(1, "int32"), K)),
        ("and", (STEP(0), STEP(2))),
    ]
    program = xsake_cpu.encode_program(steps, STEP(3))
    return {"allows": lambda q, k, h: (q >= k) & (q - left <= k), "program": program}


def window_by_head(widths):
    """Causal window whose width is an integer of the head."""
    steps = [
        ("ge", (Q, K)),
        ("sub", (Q, ("table", 0, "int32"))),
        ("le", (STEP(1, "int32"), K)),
        ("and", (STEP(0), STEP(2))),
    ]
    table = np.array(widths, np.int32)
    return {
        "allows": lambda q, k, h: (q >= k) & (q - table[h] <= k),
        "program": xsake_cpu.encode_program(steps, STEP(3)),
        "tables": table,
        "program_heads": len(widths),
    }


BFLOAT16 = {"dtype": ml_dtypes.bfloat16, "dim": 96, "v_dim": 36}

CASES = {
    "full": {},
    "causal": causal(),
    "causal_128": dict(q_tokens=512, dim=64, block_q=128, block_kv=128, **causal()),
    "window": dict(q_tokens=300, **window(70)),
    "window_by_head": dict(
        q_heads=4, kv_heads=2, layout_heads=4, **window_by_head([5, 40, 90, 300])
    ),
    "window_by_kv_head": dict(q_heads=4, kv_heads=2, layout_heads=2, **window_by_head([9, 90])),
    "ragged": dict(q_tokens=640, density=0.3, layout_heads=2, **causal()),
    "ragged_by_batch": dict(batch=3, layout_batch=3, layout_heads=2, density=0.4, **causal()),
    "batch_shared_list": dict(batch=3, density=0.5, **causal()),
    "empty_rows": dict(q_tokens=512, density=0.08, layout_heads=2, **causal()),
    "nothing_listed": {"density": 0.0},
    "odd_lengths": {"q_tokens": 201, "kv_tokens": 333, "dim": 24, "v_dim": 40},
    "one_query": {"q_tokens": 1, "kv_tokens": 777, "q_heads": 8, "kv_heads": 2, "dim": 32},
    "small_blocks": dict(q_tokens=100, block_q=8, block_kv=8, density=0.5, **causal()),
    "odd_blocks": dict(q_tokens=130, block_q=24, block_kv=40, density=0.6, **causal()),
    "large_blocks": dict(q_tokens=1100, block_q=512, block_kv=512, q_heads=1, **causal()),
    "wide_dims": dict(q_tokens=150, dim=192, v_dim=128, **causal()),
    "tiny_dims": dict(q_tokens=150, dim=3, v_dim=5, **causal()),
    "lists_across_kv_heads": dict(
        q_heads=12, kv_heads=4, layout_heads=6, density=0.3, dim=8, **causal()
    ),
    "lists_by_kv_head_groups": dict(
        q_heads=8, kv_heads=4, layout_heads=2, density=0.3, dim=8, **causal()
    ),
    "gqa": dict(batch=2, q_heads=6, kv_heads=2, dim=48, **causal()),
    "segments": dict(batch=2, segments=True, **causal()),
    "positions": dict(batch=2, positions=True, **causal()),
    "positions_and_segments": dict(batch=2, positions=True, segments=True, **window(60)),
    "mask_blocks": {"mask_blocks": True, "layout_heads": 2},
    "softcap": dict(softcap=3.0, amplitude=3.0, **causal()),
    "bias": dict(batch=2, bias=(2, 2), **causal()),
    "bias_shared": dict(batch=2, q_heads=4, kv_heads=2, bias=(1, 1), **causal()),
    "bias_by_kv_head": {
        "batch": 2,
        "q_heads": 4,
        "kv_heads": 2,
        "bias": (2, 2),
        "bias_dtype": ml_dtypes.bfloat16,
    },
    "bias_and_softcap": dict(bias=(1, 2), softcap=5.0, bias_dtype=np.float16, **causal()),
    "forced_partial": {"force_partial": True},
    "unused_capacity": dict(capacity=17, density=0.5, **causal()),
    "large_logits": dict(amplitude=6.0, **causal()),
    "bfloat16": dict(dtype=ml_dtypes.bfloat16, dim=64, **causal()),
    "float16": dict(dtype=np.float16, dim=64, **causal()),
    # Head sizes that register tiles serve, with what each step of the softmax may meet.
    "bfloat16_ragged": dict(BFLOAT16, q_tokens=640, density=0.3, layout_heads=2, **causal()),
    "bfloat16_small_blocks": dict(BFLOAT16, block_q=8, block_kv=8, density=0.5, **causal()),
    "bfloat16_odd_blocks": dict(BFLOAT16, block_q=24, block_kv=40, density=0.6, **window(70)),
    "bfloat16_large_blocks": dict(BFLOAT16, q_tokens=1100, block_q=512, block_kv=512, **causal()),
    "bfloat16_bias_and_softcap": dict(BFLOAT16, bias=(1, 2), softcap=5.0, **causal()),
    "bfloat16_mask_blocks": dict(BFLOAT16, mask_blocks=True, layout_heads=2),
    "bfloat16_segments": dict(BFLOAT16, batch=2, positions=True, segments=True, **causal()),
    "bfloat16_large_logits": dict(BFLOAT16, amplitude=6.0, **causal()),
    "bfloat16_odd": {"dtype": ml_dtypes.bfloat16, "dim": 20, "v_dim": 36, "q_tokens": 77},
}
