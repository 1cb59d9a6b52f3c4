"""Block-sparse attention in plain XLA loops."""
