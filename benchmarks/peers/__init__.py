"""Peers as worker processes: how their environments are built, spoken to and asked to compute."""
