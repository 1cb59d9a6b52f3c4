"""Block-sparse attention: `api.py` is the operation, `types.py` its inputs, the rest backends."""
