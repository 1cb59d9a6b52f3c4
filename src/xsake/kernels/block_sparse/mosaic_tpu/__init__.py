"""Block-sparse attention on TPUs: Pallas kernels for Mosaic."""
