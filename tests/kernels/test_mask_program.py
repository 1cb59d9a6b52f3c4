"""What kernels evaluate of a mask is what the mask says, by operations that kernels have."""

import dataclasses
import os
import subprocess
import sys

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from tests.masks import examples
from xsake.kernels.mask_program import MaskProgram, trace_mask
from xsake.layout import ListedBlocks
from xsake.masks import (
    AbstractMask,
    BigBird,
    Causal,
    Chunked,
    Coverage,
    FromFunction,
    PerHead,
    Random,
    Segments,
    Sinks,
    Window,
)
from xsake.testing import strategies

# Primitives that the TPU compiler takes on int32, uint32 and bool; `sign` is not among them.
COMPILED = {
    *("and", "or", "xor", "not", "eq", "ne", "lt", "le", "gt", "ge", "select_n"),
    *("add", "sub", "mul", "neg", "abs", "div", "rem", "population_count", "clz"),
    *("shift_left", "shift_right_arithmetic", "shift_right_logical"),
    *("convert_element_type", "broadcast_in_dim"),
}
SHAPES = [((6, 5), (6, 5)), ((1, 5), (6, 5)), ((1, 5), (6, 1))]


@dataclasses.dataclass(frozen=True)
class EveryOther(AbstractMask):
    """A mask as a user would write it: `heads` rules, each with a divisor of its own."""

    divisors: tuple[int, ...]

    @property
    def heads(self):
        return len(self.divisors)

    def for_head(self, head):
        divisor = self.divisors[head]
        return FromFunction(lambda q, kv: (q - kv) // divisor % 2 == 0)

    def _allows(self, xp, q, kv, head):
        return (q - kv) // xp.asarray(self.divisors)[head] % 2 == 0

    def _coverage(self, xp, area, head):
        return np.int8(Coverage.UNKNOWN)


def unsigned(q, kv):
    a, b = jnp.asarray(q).astype(jnp.uint32), jnp.asarray(kv).astype(jnp.uint32)
    near = jnp.minimum(a - b, b - a) % 5 < jnp.maximum(a, b) // 3
    return near ^ (a - b > jnp.uint32(2**31)) ^ (jnp.where(a < b, a, b) <= 3) ^ (b - a >= b)


def every_operation(q, kv, head):
    d = jnp.asarray(q - kv)
    small = jnp.where(d < 0, -d, d) // (head + 1) < jnp.clip(kv, 2, 9)
    odd = jax.lax.population_count(d) % 2 == 1
    clamped = jax.lax.clamp(jnp.int32(-3), d, jnp.int32(5)) ** 3 > head
    shifted = ((d << 3) >> 1 == q) | (jax.lax.clz(d) > 29) | (jnp.sign(d) != jax.nn.relu(d))
    return small & (odd == clamped) ^ shifted | ~jnp.where(odd, kv <= q, kv < 5 * head)


USERS = [
    EveryOther((3, 1, 7)),
    ~EveryOther((2, 5)) & Causal(),
    FromFunction(lambda q, kv: (q + kv) % 3 == 0),
    FromFunction(lambda q, kv: (q - kv) // 4 == 1),
    FromFunction(lambda q, kv: q // (kv + 1) == 2),
    FromFunction(lambda q, kv: ((q ^ kv) & 1).astype(bool)),
    FromFunction(lambda q, kv, head: (q - kv) % (head + 2) == 0, heads=3),
    FromFunction(lambda q, kv, head: head > 0, heads=2),
    FromFunction(lambda q, kv, head: (q - kv) % (head + 2) == 0, heads=3).for_head(1),
    FromFunction(unsigned),
    FromFunction(every_operation, heads=4),
]
MIXED = PerHead([Causal(), Chunked(5), BigBird(1, 2, 0.3, cell=3), Sinks(2) | Window(2, 0)])

PER_HEAD = [PerHead([Causal(), Chunked(5), Sinks(2) | Window(2, 0)]), USERS[0], USERS[6]]
FORMULAS = [
    mask
    for mask in [*examples.ALL, *USERS, MIXED]
    if "Segments" not in repr(mask) and "Explicit" not in repr(mask)
]


def name(mask):
    return repr(mask)[:80]


def positions(seed, shapes):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.integers(0, 3 * examples.TOKENS, shape, np.int32)) for shape in shapes]


def check(mask, seed, shapes):
    """The formula equals the mask, for every head."""
    rule = trace_mask(mask)
    assert isinstance(rule, MaskProgram), rule
    q, kv = positions(seed, shapes)
    assert rule.tables.dtype == np.int32 and rule.tables.shape == (len(rule.rows), rule.heads)
    for head in range(rule.heads):
        column = [jnp.int32(number) for number in rule.tables[:, head]]
        found = rule.allows(q, kv, column)
        which = None if mask.heads is None else head
        expected = mask.allows(np.asarray(q), np.asarray(kv), which)
        assert found.dtype == bool
        np.testing.assert_array_equal(found, expected)


def flat(jaxpr):
    """Equations, those of inner functions included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "jit":
            assert not equation.params["jaxpr"].consts
            yield from flat(equation.params["jaxpr"].jaxpr)
        else:
            yield equation


@pytest.mark.parametrize("mask", FORMULAS, ids=name)
def test_the_formula_says_what_the_mask_says(mask):
    for seed, shapes in enumerate(SHAPES):
        check(mask, seed, shapes)


@hypothesis.given(strategies.per_head_masks(3), st.integers(0, 99), st.sampled_from(SHAPES))
def test_formulas_of_drawn_masks(mask, seed, shapes):
    check(mask, seed, shapes)


@pytest.mark.parametrize("mask", examples.TABLES[:-1] + [examples.PER_HEAD[-2]], ids=name)
def test_masks_that_read_tables_of_tokens_are_refused(mask):
    assert trace_mask(mask).endswith("looks positions up in a table")


@pytest.mark.parametrize(
    "mask, reason",
    [
        (Causal() & ~Segments([0, 0, 1]), "Segments([0, 0, 1]) looks positions up in a table"),
        (
            ListedBlocks(np.ones((1, 2, 2), bool), block_q=4, block_kv=4),
            "ListedBlocks(4 of 4, block_q=4, block_kv=4) looks positions up in a table",
        ),
        (FromFunction(lambda q, kv: jnp.sin(q) > 0), "computes with float32"),
        (FromFunction(lambda q, kv: q.astype(np.int8) > 3), "computes with int8"),
        (FromFunction(lambda q, kv: jnp.cumsum(q, axis=1) > kv), "uses 'cumsum'"),
        (FromFunction(lambda q, kv: q.T.reshape(kv.shape) > kv), "gives positions another shape"),
        (FromFunction(lambda q, kv: jnp.arange(3)[None] > kv), "reads an array of 3 numbers"),
        (FromFunction(lambda q, kv: jnp.arange(2)[:, None] > kv), "reads an array of 2 numbers"),
        (FromFunction(lambda q, kv: (q > 1) > (kv > 1)), "uses 'gt' on booleans"),
        (FromFunction(lambda q, kv: 1 << kv > q), "shifts by a number that is not known"),
        (FromFunction(lambda q, kv: q >> 40 > kv), "shifts by a number that is not known"),
        (FromFunction(lambda q, kv: q // 0 > kv), "divides by zero"),
        (FromFunction(lambda q, kv: jax.lax.select_n(q % 3, q, kv, q) > 1), "selects by number"),
    ],
    ids=lambda value: name(value) if isinstance(value, AbstractMask) else "",
)
def test_a_refusal_names_the_part_and_what_it_does(mask, reason):
    found = trace_mask(mask)
    assert found.startswith("the rule of ") and reason in found


@pytest.mark.parametrize("mask", FORMULAS, ids=name)
def test_formulas_are_made_of_operations_that_kernels_have(mask):
    rule = trace_mask(mask)
    tile = jax.ShapeDtypeStruct((8, 128), jnp.int32)
    row = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    scalars = [jax.ShapeDtypeStruct((), jnp.int32)] * len(rule.rows)
    traced = jax.make_jaxpr(rule.allows)(row, tile, scalars)
    assert not traced.consts
    for equation in flat(traced.jaxpr):
        used, output = equation.primitive.name, equation.outvars[0].aval
        assert used in COMPILED
        assert used != "select_n" or output.dtype != bool
        assert output.dtype in (bool, np.int32, np.uint32)
        assert output.ndim in (0, 2)


def test_what_depends_on_the_head_alone_is_a_table_once():
    heads = PerHead([Window(3, 3), Window(9, 9), Window(5, 5)])
    assert trace_mask(heads).tables.tolist() == [[3, 9, 5]]
    seeds = trace_mask(PerHead([Random(0.5, seed=seed, cell=16) for seed in range(4)]))
    assert len(seeds.rows) == 1 and len(set(seeds.rows[0])) == 4
    assert trace_mask(PerHead([Causal()] * 5)).tables.shape == (0, 5)
    assert trace_mask(Window(7, 2)).tables.shape == (0, 1)


def test_rules_are_values():
    rules = [trace_mask(PerHead([Window(3, 0), Window(left, 0)])) for left in (8, 9)]
    assert rules[0] != rules[1]
    assert rules[0] == dataclasses.replace(rules[1], rows=rules[0].rows)
    assert len({*rules, dataclasses.replace(rules[0])}) == 2


def test_splitting_works_while_something_else_is_traced():
    mask = PerHead([Window(3, 0), Random(0.5, seed=12, cell=3)]) | EveryOther((3, 2))

    @jax.jit
    def inside(q, kv):
        rule = trace_mask(mask)
        return rule.allows(q, kv, [jnp.int32(number) for number in rule.tables[:, 1]])

    q, kv = positions(0, SHAPES[1])
    np.testing.assert_array_equal(inside(q, kv), mask.allows(q, kv, jnp.int32(1)))


SHARDED = """
import jax, jax.numpy as jnp
from xsake.kernels.mask_program import trace_mask
from xsake.masks import Chunked, PerHead, Random

def inside(x):
    rule = trace_mask(PerHead([Chunked(3), Chunked(5), Random(0.5, cell=3)]))
    return x + rule.tables[0, 1]

mesh = jax.make_mesh((2,), ("device",))
with jax.set_mesh(mesh):
    inside = jax.shard_map(inside, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    print(jax.jit(inside)(jnp.zeros(2, int)).tolist())
"""


@pytest.mark.slow  # quicker: inside jit
def test_splitting_works_inside_shard_map():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", SHARDED]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.stdout == "[5, 5]\n", run.stderr[-3000:]


@pytest.mark.parametrize("mask", [*PER_HEAD, Causal() & Sinks(9)], ids=name)
def test_a_kernel_reads_the_head_from_a_table_of_scalars(mask):
    rule = trace_mask(mask)
    block_q, block_kv = 128, 8
    heads = rule.heads

    def kernel(table, out):
        head = pl.program_id(0)
        scalars = [table[row, head] for row in range(len(rule.rows))]
        q = jax.lax.broadcasted_iota(jnp.int32, (1, block_q), 1)
        kv = 5 + jax.lax.broadcasted_iota(jnp.int32, (block_kv, block_q), 0)
        out[0] = jnp.where(rule.allows(q, kv, scalars), 1, 0)

    table = jnp.asarray(np.pad(rule.tables, ((0, 1), (0, 0))))  # no array is empty
    found = pl.pallas_call(
        kernel,
        grid=(heads,),
        in_specs=[pl.BlockSpec(table.shape, lambda head: (0, 0))],
        out_specs=pl.BlockSpec((1, block_kv, block_q), lambda head: (head, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((heads, block_kv, block_q), jnp.int32),
        interpret=True,
    )(table)
    q, kv = np.arange(block_q)[None, None], 5 + np.arange(block_kv)[None, :, None]
    each = None if mask.heads is None else jnp.arange(heads)[:, None, None]
    np.testing.assert_array_equal(found, mask.allows(jnp.asarray(q), jnp.asarray(kv), each))
