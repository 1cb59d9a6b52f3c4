"""Experiments of speed, memory and numerics, each a command that appends rows to `results`."""
