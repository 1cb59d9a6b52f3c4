"""Eyes measured: what watching costs a run, slow clients in numbers, and a million steps."""
