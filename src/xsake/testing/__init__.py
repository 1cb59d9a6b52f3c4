"""The truth XSAKE is tested against; for tests, benchmarks and `xsake doctor --kernels` only.

    inputs = case.inputs()                        # cases: one row of the conformance table
    truth  = oracle.attend(..., allowed)          # oracle + expand: float64 NumPy, dense, slow
    plain  = naive.attend(...)                    # naive: the same maths in the caller's dtype
    report = budget.judge("out", got, plain, truth)   # budget: is the error what the dtype allows?

Nothing here imports `xsake.kernels` or `xsake.attention`: an oracle that shares code with what
it judges shares its mistakes. `run` is the one exception in spirit: it is handed the function.
"""
