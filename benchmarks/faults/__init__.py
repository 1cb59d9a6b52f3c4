"""Faults put into real training runs, and what the runs make of them."""
