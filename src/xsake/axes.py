"""Axis letters of all array signatures.

Public arrays are `[B, T, H, D]`, as in `jax.nn.dot_product_attention` and Flax; kernels may use
other layouts internally.
"""

AXES: dict[str, str] = {
    "B": "batch",
    "Tq": "query tokens",
    "Tk": "key/value tokens",
    "Hq": "query heads",
    "Hk": "key/value heads",
    "G": "query heads per kv head, Hq / Hk",
    "D": "head dimension of queries and keys",
    "Dv": "head dimension of values",
    "Nq": "query blocks, ceil(Tq / block_q)",
    "Nk": "kv blocks, ceil(Tk / block_kv)",
    "Nc": "summaries of kv blocks",
    "Ns": "slots for selected blocks",
    "W": "work items: (row, kv block) pairs of a layout",
    "R": "rows: (batch, head, query block) triples",
    "S": "sink logits per head",
    "L": "layers of a model",
}
