"""Block-sparse attention for NVIDIA GPUs: `ampere.py` and `hopper.py` share kernels and launch."""
