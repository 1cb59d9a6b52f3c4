"""Measured comparisons: peers in their own environments, our experiments, committed result rows.

Imports nothing here on purpose: workers of older Pythons load this package too.
"""
