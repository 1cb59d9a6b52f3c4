"""The training step at scale: compiler analysis for 256 chips, without hardware."""
