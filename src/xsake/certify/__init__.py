"""Proof without the hardware: real compiles by the vendors' compilers, kept as certificates.

from xsake.certify import environments, family, run

plan = run.Plan("smoke", out=Path("certificates"), environments=environments.default_folder())
certificate, outcomes = run.certify(family.find_target("v5e"), plan)   # in a process of its own
assert all(outcome.as_expected for outcome in outcomes)                # controls had to be refused

A certificate says what a compiler accepted and what it told about it. It never states a speed.
"""
