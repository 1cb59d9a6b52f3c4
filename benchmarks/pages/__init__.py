"""Tables of README.md and docs, made of committed rows."""
