"""Training measured: three kinds of attention on a real corpus, meshes, and the loop's own cost."""
