"""HADS measured on a real model: the ladder of rules, the whole model, and time."""
