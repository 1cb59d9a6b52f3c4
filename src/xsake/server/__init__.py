"""Read-only dashboard of runs, plans, benchmark rows and certificates."""
