"""Tasks with long prompts: retrieval, tracking and counting, for dense and candidate attention."""
