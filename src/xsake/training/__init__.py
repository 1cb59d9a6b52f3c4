"""Training: data, checkpoints, state and processes; each part is imported by who uses it."""
