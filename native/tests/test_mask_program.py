"""Random mask programs against the evaluation of `xsake.kernels.mask_program`."""

import native_call
import numpy as np
import oracle
import pytest
import xsake_cpu

mask_program = pytest.importorskip("xsake.kernels.mask_program")
from xsake.kernels.mask_program import MaskProgram, ProgramStep, Term  # noqa: E402

TOKENS, HEADS = 64, 2
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
ARITHMETIC = ("add", "sub", "mul", "min", "max", "div", "rem", "and", "or", "xor")
UNARY = ("neg", "abs", "sign", "population_count", "clz", "not")
SHIFTS = ("shift_left", "shift_right_arithmetic", "shift_right_logical")


def visible_pairs(program, heads=HEADS):
    """Pairs [Hq, Tq, Tk] that the handler computes: scores are 0, values name the key."""
    rng = np.random.default_rng(0)
    case = oracle.build_case(
        rng, q_tokens=TOKENS, q_heads=heads, kv_heads=1, dim=1, v_dim=TOKENS, force_partial=True
    )
    case.q = np.zeros_like(case.q)
    case.v = np.eye(TOKENS, dtype=np.float32)[None, :, None]
    case.program = tuple(xsake_cpu.encode_program(program.steps, program.answer))
    case.tables, case.program_heads = program.tables.reshape(-1), program.heads
    return np.moveaxis(native_call.forward(case)[0][0] > 0, 1, 0)


def expected_pairs(program, heads=HEADS):
    """The same by `MaskProgram.allows`."""
    position = np.arange(TOKENS, dtype=np.int32)
    columns = [program.tables[:, h * program.heads // heads] for h in range(heads)]
    return np.stack([program.allows(position[:, None], position[None], list(c)) for c in columns])


class Builder:
    """Draws steps of known dtypes."""

    def __init__(self, rng):
        self.rng, self.steps, self.by_dtype = rng, [], {"bool": [], "int32": [], "uint32": []}
        self.by_dtype["int32"] = [Term("position", 0, "int32"), Term("position", 1, "int32")]

    def constant(self, dtype):
        """A constant, or an integer of the head."""
        if self.rng.random() < 0.3:
            return Term("table", int(self.rng.integers(3)), dtype)
        if dtype == "bool":
            return Term("constant", int(self.rng.integers(2)), dtype)
        low, high = (0, 2**32) if dtype == "uint32" else (-(2**31), 2**31)
        number = self.rng.choice([self.rng.integers(low, high), self.rng.integers(0, 40)])
        return Term("constant", int(number), dtype)

    def term(self, dtype):
        known = self.by_dtype[dtype]
        if known and self.rng.random() < 0.75:
            return known[self.rng.integers(len(known))]
        return self.constant(dtype)

    def add(self, operation, dtype, *terms):
        step = Term("step", len(self.steps), dtype)
        self.steps.append(ProgramStep(operation, terms))
        self.by_dtype[dtype].append(step)
        return step

    def draw(self):
        """Add one random step."""
        rng = self.rng
        dtype = rng.choice(["int32", "uint32"])
        kind = rng.integers(7)
        if kind == 0:
            self.add(rng.choice(COMPARISONS), "bool", self.term(dtype), self.term(dtype))
        elif kind == 1:
            self.add(rng.choice(ARITHMETIC), dtype, self.term(dtype), self.term(dtype))
        elif kind == 2:
            self.add(rng.choice(UNARY), dtype, self.term(dtype))
        elif kind == 3:
            amount = Term("constant", int(rng.integers(32)), dtype)
            self.add(rng.choice(SHIFTS), dtype, self.term(dtype), amount)
        elif kind == 4:
            dtype = rng.choice(["bool", "int32", "uint32"])
            self.add("select_n", dtype, self.term("bool"), self.term(dtype), self.term(dtype))
        elif kind == 5:
            source = rng.choice(["bool", "int32", "uint32"])
            target = rng.choice(["int32", "uint32"] + ["bool"] * (source != "bool"))
            self.add(f"to_{target}", target, self.term(source))
        else:
            operation = rng.choice(["and", "or", "xor", "eq", "ne", "not"])
            count = 1 if operation == "not" else 2
            self.add(operation, "bool", *(self.term("bool") for _ in range(count)))

    def finish(self):
        """A program whose answer depends on bits of the last integers."""
        x = self.add("xor", "int32", self.term("int32"), self.term("int32"))
        answer = self.add(
            "to_bool", "bool", self.add("and", "int32", x, Term("constant", 5, "int32"))
        )
        answer = self.add("xor", "bool", answer, self.term("bool"))
        rows = self.rng.integers(-50, 50, (3, 2))
        return MaskProgram(tuple(map(tuple, rows.tolist())), tuple(self.steps), answer, 2)


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed):
    builder = Builder(np.random.default_rng(seed))
    for _ in range(12):
        builder.draw()
    program = builder.finish()
    np.testing.assert_array_equal(visible_pairs(program), expected_pairs(program))


@pytest.mark.parametrize("name", [*COMPARISONS, *ARITHMETIC, *UNARY, *SHIFTS])
@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_every_operation(name, dtype):
    """Each operation on numbers of both signs, zero and the extremes included."""
    builder = Builder(np.random.default_rng(0))
    q, k = builder.by_dtype["int32"]
    if dtype == "uint32":
        q, k = builder.add("to_uint32", dtype, q), builder.add("to_uint32", dtype, k)
    constant = lambda x: Term("constant", x, dtype)
    x = builder.add("sub", dtype, builder.add("mul", dtype, q, constant(7_654_321)), constant(99))
    x = builder.add("xor", dtype, x, k)
    y = builder.add("sub", dtype, k, constant(20))
    terms = (x,) if name in UNARY else (x, constant(5)) if name in SHIFTS else (x, y)
    if name in COMPARISONS:
        answer = builder.add(name, "bool", *terms)
    else:
        value = builder.add("rem", dtype, builder.add(name, dtype, *terms), constant(3))
        answer = builder.add("eq", "bool", value, constant(1))
    program = MaskProgram((), tuple(builder.steps), answer, 1)
    np.testing.assert_array_equal(visible_pairs(program), expected_pairs(program))


def test_masks_of_the_package():
    from xsake import masks

    drawn = [masks.Causal(), masks.Causal() & masks.Window(9, 0), ~masks.Causal()]
    drawn.append(masks.PerHead([masks.Window(3, 0), masks.Window(9, 4)]))
    for mask in drawn:
        program = mask_program.trace_mask(mask)
        assert isinstance(program, MaskProgram)
        np.testing.assert_array_equal(visible_pairs(program), expected_pairs(program))
