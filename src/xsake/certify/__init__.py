"""Compile kernels with the vendors' compilers, without the hardware; results are certificates.

from xsake._io import cache_folder
from xsake.certify import family, run

folder = cache_folder("environments")
options = run.CertifyOptions("smoke", out=Path("certificates"), environments=folder)
certificate, outcomes = run.certify(family.find_target("v5e"), options)   # in a subprocess
assert all(outcome.as_expected for outcome in outcomes)   # negative controls were rejected

A certificate records what a compiler accepted and reported. It never states a speed.
"""
