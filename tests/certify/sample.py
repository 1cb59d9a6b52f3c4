"""A certificate to test with."""

from pathlib import Path

from tests.certify.fake_family import case
from xsake.certify.record import Certificate, CompileFacts, Outcome, PassCost, TimeBound

ROOT = Path(__file__).parents[2]
COST = PassCost(
    listed=9, computed=9, launches=2, steps=12, balance=1.0, flops=10, bytes_read=5,
    bytes_written=1, least_bytes=4,
)  # fmt: skip


def outcome(name: str, verdict: str, **fields) -> Outcome:
    keys = {key: fields.pop(key) for key in ("expects", "because") if key in fields}
    unset = dict.fromkeys(("message", "facts", "cost", "bound"))
    origin = {"commit": "0123456789abcdef", "dirty": False, "source": "feed"}
    return Outcome(
        case=case(name, **keys), verdict=verdict, as_expected=True,
        made_at="2026-11-15T10:00:00+00:00", **unset | origin | fields,
    )  # fmt: skip


def sample_certificate(**changes) -> Certificate:
    """One case that compiled and one control that was refused."""
    facts = CompileFacts(0.5, vmem_bytes=3 * 2**20, smem_bytes=2048, spills=4, bundles=100)
    limit = TimeBound(seconds=0.002, label="a bound")
    compiled = outcome("good", "compiled", facts=facts, cost=COST, bound=limit)
    refused = outcome(
        "control", "refused", expects="refused", because="vmem", message="Ran out of vmem"
    )
    fields = {
        "family": "tpu", "target": "v5e", "topology": "v5e:2x2", "device_kind": "TPU v5 lite",
        "made_at": "2026-11-15T10:00:01+00:00", "command": "xsake certify v5e", "figures": True,
        "versions": {"xsake": "0.1.0", "jax": "0.12.0.1", "libtpu": "0.0.50.1"},
        "host_processor": "made up", "outcomes": [compiled, refused],
    }  # fmt: skip
    return Certificate(**fields | changes)
