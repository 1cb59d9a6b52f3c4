"""Reference implementations and conformance cases for tests, benchmarks and `xsake doctor`.

    inputs = case.inputs()                        # one row of the conformance table
    truth  = oracle.attend(..., allowed)          # float64 NumPy, dense, slow
    plain  = naive.attend(...)                    # the same in the caller's dtype
    report = budget.check_error("out", got, plain, truth)  # error budget of the dtype

Nothing here imports `xsake.kernels` or `xsake.attention`, so that the oracle shares no bugs with
the tested code; `conformance` receives the tested function as an argument.
"""
