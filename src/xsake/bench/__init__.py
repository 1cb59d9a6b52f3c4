"""Name of `xsake.benchmarking` in 0.1.0; its public names are imported on first use."""


def __getattr__(name: str) -> object:
    from xsake import benchmarking

    if name in benchmarking.__all__:
        return getattr(benchmarking, name)
    raise AttributeError(f"module 'xsake.bench' has no attribute {name!r}")
