"""Attention over pages: implementations against float64, lists of pages, what is refused."""

import dataclasses
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.lanes import gate
from xsake.errors import ArgumentError, ShapeError, UnsupportedError
from xsake.kernels.paged_decode import OP, paged_attention
from xsake.masks import Causal, FromFunction, Full, PerHead, Sinks, Window
from xsake.testing import naive, oracle
from xsake.testing.budget import check_error

NAMES = [name for name, reason in OP.implementations().items() if reason is None]
OFTEN = [name for name in NAMES if name in ("xla", "native_cpu")]
each_implementation = pytest.mark.parametrize("implementation", gate(OFTEN, NAMES))


@dataclasses.dataclass(frozen=True)
class Case:
    """Sequences in pages of one pool; `listed`: share of the pages in the lists, if there are."""

    name: str
    lengths: tuple[int, ...]
    q_tokens: int = 1
    q_heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    page: int = 16
    mask: Any = Causal()
    dtype: str = "float32"
    is_int8: bool = False
    softcap: float | None = None
    num_sinks: int | None = None
    listed: float | None = None
    is_shared: bool = False  # the first page of all sequences

    @property
    def slots(self) -> int:
        return -(-max(self.lengths) // self.page) + 1

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        """Arguments of `paged_attention`, as NumPy arrays."""
        rng = np.random.default_rng(seed)
        dtype = jnp.dtype(self.dtype)
        draw = lambda *shape: rng.standard_normal(shape).astype(dtype)
        pages = len(self.lengths) * self.slots + 3
        table = rng.permutation(pages)[: len(self.lengths) * self.slots]
        table = table.reshape(-1, self.slots).astype(np.int32)
        if self.is_shared:
            table[:, 0] = table[0, 0]
        pool = lambda dim: (pages, self.kv_heads, self.page, dim)
        arguments: dict[str, Any] = {
            "q": draw(len(self.lengths), self.q_tokens, self.q_heads, self.head_dim),
            "page_table": table, "lengths": np.array(self.lengths, np.int32),
            "mask": self.mask, "softcap": self.softcap,
        }  # fmt: skip
        for name, dim in (("k", self.head_dim), ("v", self.value_dim)):
            if self.is_int8:
                arguments[f"{name}_pages"] = rng.integers(-127, 128, pool(dim), np.int8)
                scale = rng.uniform(0.005, 0.02, pool(dim)[:2]).astype(np.float32)
                arguments[f"{name}_scale"] = scale
            else:
                arguments[f"{name}_pages"] = draw(*pool(dim))
        if self.num_sinks is not None:
            arguments["sinks"] = draw(self.q_heads, self.num_sinks)
        if self.listed is not None:
            shape = len(self.lengths), self.kv_heads, self.slots
            numbers = rng.permuted(np.broadcast_to(np.arange(self.slots), shape), axis=2)
            arguments["pages"] = np.where(rng.random(shape) < self.listed, numbers, -1)
        return arguments


CASES = [
    Case("one_query", (33, 5, 64), page=16),
    Case("several_queries", (33, 5, 64), q_tokens=3, page=4),
    Case("more_queries_than_tokens", (2, 40), q_tokens=5, page=8),
    Case("no_group", (130, 17), q_heads=3, kv_heads=3, head_dim=64, value_dim=64),
    Case("group_of_eight", (600,), q_heads=16, kv_heads=2, head_dim=32, value_dim=48, page=32),
    Case("many_queries", (90, 70), q_tokens=40, q_heads=8, page=16),
    Case("odd_sizes", (61, 20), q_tokens=2, head_dim=10, value_dim=7, page=7),
    Case("long_pages", (700, 300), page=300, q_heads=4),
    Case("window_and_sinks", (200, 77), mask=Causal() & (Window(20, 0) | Sinks(3)), num_sinks=1),
    Case("softcap", (60, 33), softcap=2.0, num_sinks=2, mask=Full()),
    Case("rule_per_head", (50, 21), mask=PerHead([Causal(), Causal() & Window(9, 0)] * 3)),
    Case("lists_per_head", (300, 120), q_tokens=2, listed=0.4),
    Case("shared_prefix", (50, 60, 16), is_shared=True, listed=0.8),
    Case("bfloat16", (200, 31), dtype="bfloat16", listed=0.7, head_dim=64, value_dim=64),
    Case("float16", (40,), dtype="float16"),
    Case("int8", (300, 40), is_int8=True, head_dim=64, value_dim=64, listed=0.7, page=32),
    Case("int8_odd", (45,), is_int8=True, head_dim=12, value_dim=9, page=5),
]


def dense_inputs(case: Case, given: dict[str, Any]) -> oracle.DenseInputs:
    """The same call over contiguous keys, slot after slot, with the pairs that count."""
    table, lengths, size = given["page_table"], given["lengths"], case.page
    batch = len(lengths)
    numbers = given.get("pages", np.arange(table.shape[1])[None, None])
    numbers = np.broadcast_to(numbers, (batch, case.kv_heads, numbers.shape[2]))
    page = np.take_along_axis(table[:, None], np.maximum(numbers, 0), axis=2)
    head = np.arange(case.kv_heads)[None, :, None]

    def gather(name: str):
        x = given[f"{name}_pages"][page, head].astype(np.float64)
        if case.is_int8:
            x = x * given[f"{name}_scale"][page, head][..., None, None]
        return np.moveaxis(x.reshape(batch, case.kv_heads, -1, x.shape[-1]), 1, 2)

    position = (numbers[..., None] * size + np.arange(size)).reshape(batch, case.kv_heads, -1)
    exists = np.repeat((numbers >= 0) & (page >= 0), size, axis=2)
    exists &= (position >= 0) & (position < lengths[:, None, None])
    group = case.q_heads // case.kv_heads
    position, exists = (np.repeat(x, group, axis=1)[:, :, None] for x in (position, exists))
    q_pos = (lengths[:, None] + np.arange(-case.q_tokens, 0))[:, None, :, None]
    heads = None
    if case.mask.heads is not None:
        heads = (np.arange(case.q_heads) * case.mask.heads // case.q_heads)[None, :, None, None]
    allowed = case.mask.allows(np.maximum(q_pos, 0), np.maximum(position, 0), heads)
    allowed = np.asarray(allowed) & exists & (q_pos >= 0)
    return oracle.DenseInputs(
        np.asarray(given["q"], np.float64), gather("k"), gather("v"),
        np.broadcast_to(allowed, (batch, case.q_heads, *allowed.shape[2:])),
        sinks=None if "sinks" not in given else np.asarray(given["sinks"], np.float64),
        softcap=case.softcap,
    )  # fmt: skip


def run(given: dict[str, Any], implementation: str, **changes: Any):
    """`(o, lse)` as NumPy arrays of float64."""
    o, lse = paged_attention(**given | changes, return_lse=True, implementation=implementation)
    return np.asarray(o, np.float64), np.asarray(lse, np.float64)


def budget_failures(case: Case, implementation: str) -> list[str]:
    """Results of a case that exceed the error budget."""
    given = case.arguments()
    inputs = dense_inputs(case, given)
    shape = *inputs.q.shape[:3], case.value_dim
    cotangents = np.zeros(shape), np.zeros(shape[:3])
    truth = oracle.attend(inputs, *cotangents)
    runs = naive.run_three_orders(inputs, *cotangents, case.dtype)
    has_padding = np.array(case.lengths)[:, None] + np.arange(-case.q_tokens, 0) < 0
    if has_padding.any() and case.num_sinks is None:
        assert not truth.out[has_padding].any()
    found = []
    for name, got in zip(("out", "lse"), run(given, implementation), strict=True):
        comparator = np.stack([getattr(each, name) for each in runs])
        report = check_error(
            name, got, comparator, getattr(truth, name), dtype=case.dtype, extra_ulps=2
        )
        found += [] if report.failure is None else [report.failure]
    return found


@each_implementation
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_are_within_the_error_budget(case, implementation):
    assert budget_failures(case, implementation) == []


@each_implementation
@pytest.mark.parametrize("name", ["several_queries", "int8"])
def test_a_list_of_every_page_changes_no_bit(name, implementation):
    case = next(case for case in CASES if case.name == name)
    given = case.arguments() | {"pages": None}
    every = np.broadcast_to(np.arange(case.slots), (len(case.lengths), 1, case.slots))
    per_head = np.broadcast_to(every, (len(case.lengths), case.kv_heads, case.slots))
    for pages in (every, per_head):
        for x, y in zip(run(given, implementation), run(given, implementation, pages=pages)):  # noqa: B905
            np.testing.assert_array_equal(x, y)


@each_implementation
def test_a_sequence_does_not_depend_on_others(implementation):
    given = Case("batch", (40, 97, 3), q_tokens=2).arguments()
    together = run(given, implementation)
    for b in range(3):
        one = {name: given[name][b : b + 1] for name in ("q", "page_table", "lengths")}
        for x, y in zip(run(given, implementation, **one), together, strict=True):
            np.testing.assert_allclose(x[0], y[b], rtol=2e-6, atol=2e-6)


def check_nonfinite_values(case: Case, implementation: str) -> None:
    """Assert that bad values of two sequences of 40 tokens reach nothing but their own queries."""
    given = case.arguments()
    clean = run(given, implementation)
    hidden, unlisted = given["page_table"][0, 0], given["page_table"][1, 3]
    bad = {name: given[name].copy() for name in ("k_pages", "v_pages")}
    for x in bad.values():
        x[hidden], x[unlisted] = np.nan, np.inf
        x[given["page_table"][0, 2], :, 12:] = np.nan  # after the end of the sequence
    for x, y in zip(run(given, implementation, **bad), clean, strict=True):
        np.testing.assert_array_equal(x, y)
    bad["v_pages"][given["page_table"][1, 2], 1, 3, 0] = np.inf
    o, lse = run(given, implementation, **bad)
    np.testing.assert_array_equal(o[0], clean[0][0])
    np.testing.assert_array_equal(o[1, :, :3], clean[0][1, :, :3])
    assert np.isnan(o[1, :, 3:]).all() and np.isnan(lse[1, :, 3:]).all()


@each_implementation
def test_values_that_are_not_finite_reach_only_queries_that_see_them(implementation):
    check_nonfinite_values(Case("bad", (40, 40), mask=Causal() & Window(10, 0)), implementation)


@pytest.mark.parametrize("implementation", OFTEN)
@hypothesis.given(
    length=st.integers(1, 64), page=st.sampled_from([4, 16]), q_tokens=st.sampled_from([1, 3]),
    window=st.none() | st.integers(0, 40), seed=st.integers(0, 9),
)  # fmt: skip
def test_pages_hold_what_contiguous_keys_hold(implementation, length, page, q_tokens, window, seed):
    mask = Causal() if window is None else Causal() & Window(window, 0)
    case = Case("drawn", (length, 64), q_tokens, q_heads=2, page=page, mask=mask, head_dim=8)
    given = case.arguments(seed)
    inputs = dense_inputs(case, given)
    shape = *inputs.q.shape[:3], case.value_dim
    truth = oracle.attend(inputs, np.zeros(shape), np.zeros(shape[:3]))
    np.testing.assert_allclose(run(given, implementation)[0], truth.out, atol=5e-6)


def test_jit_vmap_and_scan_give_the_same():
    given = Case("traced", (33, 20)).arguments()
    arrays = {name: jnp.asarray(given[name]) for name in ("q", "page_table", "lengths")}
    pool = {name: jnp.asarray(given[name]) for name in ("k_pages", "v_pages")}
    call = lambda arrays: paged_attention(**arrays, **pool, implementation="xla")
    expected = call(arrays)
    np.testing.assert_array_equal(jax.jit(call)(arrays), expected)
    one = jax.tree.map(lambda x: x[:, None], arrays)
    np.testing.assert_allclose(jax.vmap(call)(one)[:, 0], expected, atol=1e-6)
    np.testing.assert_allclose(jax.lax.map(call, one)[:, 0], expected, atol=1e-6)


def test_what_does_not_fit_is_refused():
    given = Case("fits", (33, 20)).arguments()
    k = given["k_pages"]
    refused = [
        ({"k_pages": k.swapaxes(1, 2)}, ShapeError, "paged-shapes"),
        ({"lengths": given["lengths"][:1]}, ShapeError, "paged-shapes"),
        ({"k_pages": k.astype(np.float16)}, ShapeError, "paged-dtypes"),
        ({"page_table": given["page_table"].astype(np.float32)}, ArgumentError, "paged-integers"),
        ({"pages": np.zeros((2, 3, 4), np.int32)}, ShapeError, "paged-lists"),
        ({"k_scale": np.ones(k.shape[:2], np.float32)}, ShapeError, "paged-scales"),
        ({"mask": PerHead([Causal()] * 5)}, ShapeError, "paged-mask-heads"),
        ({"k_pages": k.astype(np.int8), "v_pages": given["v_pages"].astype(np.int8)}, ShapeError,
         "paged-scales"),
    ]  # fmt: skip
    for changes, error, slug in refused:
        with pytest.raises(error) as refusal:
            paged_attention(**given | changes)
        assert refusal.value.slug == slug


def test_there_is_no_gradient():
    given = Case("gradient", (33,)).arguments()
    with pytest.raises(UnsupportedError) as refusal:
        jax.grad(lambda q: paged_attention(**given | {"q": q}).sum())(jnp.asarray(given["q"]))
    assert refusal.value.slug == "paged-gradient"


@pytest.mark.skipif("native_cpu" not in NAMES, reason="xsake-cpu is not installed")
def test_the_native_kernel_declines_a_mask_of_floats():
    given = Case("wavy", (33,)).arguments()
    wavy = FromFunction(lambda q, kv: jnp.sin(q * kv) > 0)
    with pytest.raises(UnsupportedError, match="computes with float32"):
        paged_attention(**given | {"mask": wavy}, implementation="native_cpu")
    paged_attention(**given | {"mask": wavy})  # by `xla`
