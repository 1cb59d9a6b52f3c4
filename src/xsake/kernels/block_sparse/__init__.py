"""Block-sparse attention: `op` is the operation, every other module serves it or implements it."""
