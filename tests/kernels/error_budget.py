"""Judges an operation on any set of pairs: outputs and gradients within the float64 budget."""

import jax
import numpy as np

from xsake.testing import naive, oracle
from xsake.testing.budget import check_error


def cotangents(out, lse, seed=5):
    """What a loss could want of the results; nothing of queries that saw nothing."""
    rng = np.random.default_rng(seed)
    d_out = rng.normal(size=out.shape).astype(np.float32)
    d_lse = rng.normal(size=lse.shape).astype(np.float32)
    return d_out, np.where(np.isfinite(lse), d_lse, 0).astype(np.float32)


def failures(call, arrays, allowed, scale, dtype="float32"):
    """What of `call(q, k, v) -> (out, lse)` or of its gradients is outside of the budget."""
    (out, lse), pull = jax.vjp(call, *arrays)
    d_out, d_lse = cotangents(out, np.asarray(lse))
    gradients = pull((d_out.astype(out.dtype), d_lse.astype(lse.dtype)))
    names = "out", "lse", "d_q", "d_k", "d_v"
    got = dict(zip(names, (out, lse, *gradients), strict=True))
    d_out = np.asarray(d_out.astype(out.dtype), np.float64)
    x = oracle.DenseInputs(*(np.asarray(a) for a in arrays), allowed, scale=scale)
    truth = oracle.attend(x, d_out, d_lse)
    plain = naive.run_three_orders(x, d_out, d_lse, dtype)
    products = np.einsum("bqhd,bkhd->bhqk", x.q.astype(float), np.repeat(x.k, group(x), 2))
    condition = float(np.abs(scale * products * allowed).max())
    found = []
    for name in names:
        runs = np.stack([np.asarray(getattr(one, name), np.float64) for one in plain])
        kind = "float32" if name == "lse" else dtype
        right = getattr(truth, name)
        report = check_error(
            name, np.asarray(got[name]), runs, right, dtype=kind, condition=condition
        )
        found += [] if report.failure is None else [report.failure]
    return found


def group(x):
    return x.q.shape[2] // x.k.shape[2]
