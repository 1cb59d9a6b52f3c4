"""Execution: one folder per operation, one file per backend, one place that picks between them."""
