"""Adapters for layers of other libraries, one module each, imported on demand."""
