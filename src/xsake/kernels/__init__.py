"""Kernels: one folder per operation, in it one module or folder per backend."""
