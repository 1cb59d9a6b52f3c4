"""The axis letters used in every signature, in one table.

| letter  | axis                                                        |
|---------|-------------------------------------------------------------|
| `B`     | batch                                                       |
| `Tq`    | query tokens                                                |
| `Tk`    | key/value tokens                                            |
| `Hq`    | query heads                                                 |
| `Hk`    | key/value heads                                             |
| `G`     | query heads per kv head, `Hq / Hk`                          |
| `D`     | head dimension of queries and keys                          |
| `Dv`    | head dimension of values                                    |
| `Nq`    | query blocks, `ceil(Tq / block_q)`                          |
| `Nk`    | kv blocks, `ceil(Tk / block_kv)`                            |
| `Nc`    | summaries of kv blocks, which may overlap                   |
| `Ns`    | slots: blocks that a query may select                       |
| `W`     | work items: (row, kv block) pairs that a layout lists       |
| `R`     | rows: (batch, head, query block) triples that own items     |
| `S`     | sink logits per head                                        |
| `L`     | layers of a model                                           |

Query and key axes never share a letter. Public arrays are `[B, T, H, D]`, as in
`jax.nn.dot_product_attention` and Flax; what kernels use inside is their own affair.
"""

AXES: dict[str, str] = {
    "B": "batch",
    "Tq": "query tokens",
    "Tk": "key/value tokens",
    "Hq": "query heads",
    "Hk": "key/value heads",
    "G": "query heads per kv head",
    "D": "head dimension of queries and keys",
    "Dv": "head dimension of values",
    "Nq": "query blocks",
    "Nk": "kv blocks",
    "Nc": "summaries of kv blocks",
    "Ns": "slots for selected blocks",
    "W": "work items",
    "R": "rows",
    "S": "sink logits per head",
    "L": "layers of a model",
}
