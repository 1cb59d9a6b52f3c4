"""The train step at scale, on paper: what a compiler says about 256 chips that nobody here has."""
