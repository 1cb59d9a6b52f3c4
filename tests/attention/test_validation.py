"""What a call accepts, and that every refusal says what, got, expected and how to fix it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import xsake
from tests.attention.dense import attend, draw
from tests.lanes import slow
from xsake.errors import ArgumentError, LayoutError, MaskError, ShapeError, UnsupportedError
from xsake.kernels.block_sparse import reference
from xsake.layout import BlockLayout
from xsake.masks import Causal, Explicit, FromFunction, Full, PerHead, Segments, Window

Q, K, V = draw(batch=2, q_tokens=24, q_heads=4, kv_heads=2)
BLOCKS = {"block_q": 8, "block_kv": 8}
ids = np.zeros((2, 24), np.int64)
HASHES = jnp.full((2, 24), 3_000_000_000, jnp.uint32)
Q8 = jnp.asarray(Q).astype(jnp.float8_e4m3fn)


@pytest.mark.parametrize(
    ("error", "change", "parts"),
    [
        (ShapeError, {"q": Q[0]}, ("q (24, 4, 8)", "3 without a batch", "heads come after")),
        (ShapeError, {"k": K[:1]}, ("k (1, 24, 2, 8)", "[B, Tk, Hk, D]", "repeat")),
        (ShapeError, {"k": K[..., :4]}, ("k (2, 24, 2, 4)", "same head dimension", "only v")),
        (ShapeError, {"q": Q[:, :0]}, ("q (2, 0, 4, 8)", "at least 1", "empty batch")),
        (ShapeError, {"q": Q[:, :, :3]}, ("q (2, 24, 3, 8)", "multiple", "each kv head")),
        (ShapeError, {"q": Q.astype(np.float16)}, ("q float16", "one floating dtype", "astype")),
        (ShapeError, {"bias": np.zeros((2, 4, 24, 5), np.float32)}, ("24, 5)", "= (2, 4, 24, 24)")),
        (ShapeError, {"bias": np.zeros((1, 1, 24, 24), bool)}, ("bool", "as `mask`")),
        (ShapeError, {"sinks": np.zeros(2, np.float32)}, ("(2,)", "(4,) or (4, S)", "repeat")),
        (ShapeError, {"q_segment_ids": ids[0]}, ("(24,)", "integers (2, 24)", "per token")),
        (ShapeError, {"q_segment_ids": ids * 1.0}, ("float", "integers (2, 24)", "per token")),
        (ShapeError, {"kv_positions": ids[:, :5]}, ("(2, 5)", "(2, 24) or (24,)", "per token")),
        (ShapeError, {"mask": PerHead([Full()] * 3)}, ("3 heads", "[1, 2, 4]", "per kv head")),
        (
            ShapeError,
            {"layout": BlockLayout.from_mask(Causal(), q_tokens=25, **BLOCKS)},
            ("25 x 25", "equal lengths", "q_tokens=q.shape[1]"),
        ),
        (
            ShapeError,
            {"layout": BlockLayout.from_block_mask(np.ones((3, 1, 3, 3), bool), **BLOCKS)},
            ("layout.batch=3", "1 or 2", "share one list"),
        ),
        (ArgumentError, {"scale": np.inf}, ("inf", "a number", "1 / sqrt(D)")),
        (ArgumentError, {"scale": "a"}, ("'a'", "finite number", "1 / sqrt(D)")),
        (ArgumentError, {"scale": [1.0]}, ("[1.0]", "finite number", "1 / sqrt(D)")),
        (ShapeError, {"q": Q8, "k": Q8, "v": Q8}, ("float8_e4m3fn", "float32, bfloat16", "astype")),
        (MaskError, {"mask": np.ones((24, 24), int)}, ("int64 array (24, 24)", "booleans")),
        (MaskError, {"mask": "casual"}, ("casual", "one of", "causal")),
        (MaskError, {"mask": len}, ("builtin_function", "Causal()", "booleans")),
        (ShapeError, {"mask": np.ones((2, 24, 5), bool)}, ("(2, 24, 5)", "may be 1", "query i")),
        (ArgumentError, {"is_causal": np.ones(2, bool)}, ("array", "True or False", "compiled")),
        (ArgumentError, {"window": (1, 2, 3)}, ("(1, 2, 3)", "(left, right)", "1024 keys")),
        (ArgumentError, {"block_size": (8, 0)}, ("0", "1 or more", "one block")),
        (ArgumentError, {"block_size": 2.5}, ("2.5", "1 or more", "one block")),
        (
            ArgumentError,
            {"layout": BlockLayout.from_mask(Full(), q_tokens=24, **BLOCKS), "block_size": 8},
            ("8 x 8 tokens", "one of them", "its own block sizes"),
        ),
        (LayoutError, {"layout": np.ones((3, 3), bool)}, ("ndarray", "from_block_mask")),
        (ArgumentError, {"q_segment_ids": ids + 3_000_000_000}, ("3000000000", "2147483647")),
        (ArgumentError, {"q_segment_ids": HASHES}, ("uint32 from 3000000000", "number segments")),
        (ArgumentError, {"q_positions": np.arange(24) - 5}, ("-5 to 18", "from 0 to", "from 0")),
        (ArgumentError, {"kv_positions": np.arange(24) + 2**31}, ("2147483648", "from 0 to")),
        (ArgumentError, {"softcap": 0.0}, ("0.0", "above 0", "None disables it")),
        (ArgumentError, {"kv_segment_ids": ids}, ("only one", "both", "q_segment_ids alone")),
        (ArgumentError, {"implementation": "cuda"}, ("'cuda'", "'xla' or", "None to let")),
        (
            ArgumentError,
            {
                "layout": BlockLayout.from_block_mask(
                    np.eye(6, dtype=bool), block_q=4, block_kv=4
                ).resize(8, 8),
                "q_positions": np.arange(24),
            },
            ("ListedBlocks", "a layout without a mask", "pass the mask to the call"),
        ),
        (
            LayoutError,
            {
                "layout": BlockLayout.from_block_mask(np.ones((4, 3, 3), bool), **BLOCKS),
                "mask": PerHead([Causal(), Full()]),
            },
            ("mask heads 2, layout heads 4", "equal numbers", "one rule per head"),
        ),
    ],
)
def test_errors_state_what_got_expected_and_fix(error, change, parts):
    with pytest.raises(error) as caught:
        xsake.attention(**{"q": Q, "k": K, "v": V, **change})
    text = str(caught.value)
    assert text.startswith(error.code) and all(part in text for part in parts), text
    for label in ("got:", "expected:", "fix:"):
        assert label in text, text
    with pytest.raises(error):  # explain makes the same checks
        xsake.explain(**{"q": Q, "k": K, "v": V, **change})


def test_a_named_implementation_that_declines_raises_its_reason(monkeypatch):
    monkeypatch.setattr(reference, "unsupported_reason", lambda *_: "it is too cold")
    with pytest.raises(UnsupportedError, match="too cold"):
        xsake.attention(Q, K, V, implementation="reference")
    assert xsake.explain(Q, K, V).declined["reference"] == "it is too cold"


@pytest.mark.parametrize("factors", [np.ones(4, np.float32), np.int32(2)])
def test_a_traced_scale_is_one_floating_point_number(factors):
    with pytest.raises(ShapeError, match="XSK-101.traced-scale"):
        jax.jit(lambda s: xsake.attention(Q, K, V, scale=s))(factors)


def test_a_layout_with_a_mask_is_rejected_with_positions():
    """Its blocks were dropped by token index: with positions it would miss blocks in silence."""
    grid, sizes = np.ones((1, 3), bool), {"q_tokens": 1, "kv_tokens": 24, "block_q": 1}
    rule = FromFunction(lambda q_pos, kv_pos: kv_pos <= q_pos)
    layouts = [
        BlockLayout.from_mask(Causal(), block_kv=8, **sizes),
        BlockLayout.from_block_mask(grid, mask=rule, block_kv=8, **sizes),
        BlockLayout.from_block_mask(jnp.asarray(grid), mask=rule, block_kv=8, **sizes),
    ]
    at = {"q_positions": jnp.array([23])}
    for layout in layouts:
        with pytest.raises(ArgumentError, match="XSK-102.masked-layout-with-positions"):
            xsake.attention(Q[:, :1], K, V, layout=layout, **at)
    every = attend(Q[:, :1], K, V, np.ones((1, 1, 1, 24), bool))
    for chosen in (grid, jnp.asarray(grid)):
        layout = BlockLayout.from_block_mask(chosen, block_kv=8, **sizes)
        ours = xsake.attention(Q[:, :1], K, V, layout=layout, mask=rule, **at)
        np.testing.assert_allclose(ours, every, atol=2e-6)


def test_traced_integers_that_int32_may_not_hold_are_refused_or_checked():
    run = lambda ids: xsake.attention(Q, K, V, q_segment_ids=ids)
    with pytest.raises(ArgumentError, match="traced uint32"):
        jax.jit(run)(HASHES)
    with jax.enable_x64(True):
        wide = jnp.asarray(ids + 2**31)
        error, _ = jax.jit(checkify.checkify(run))(wide)
        assert "q_segment_ids" in str(error.get())
        error, _ = jax.jit(checkify.checkify(run))(wide - 2**31)
        assert error.get() is None


STRICT = {
    "logits": {"bias": np.zeros((1, 1, 24, 24), np.float32), "sinks": jnp.zeros(4), "softcap": 5.0},
    "masking": {"q_segment_ids": ids, "q_positions": np.arange(24)},
}


@pytest.mark.parametrize("more", STRICT)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_nothing_relies_on_implicit_promotion_of_dtypes(implementation, more):
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (Q, K, V))

    def gradients(q, k, v):
        run = lambda q, k, v: xsake.attention(
            q, k, v, mask=Causal(), implementation=implementation, **STRICT[more]
        )
        out, pull = jax.vjp(run, q, k, v)
        return out, *pull(out)

    with jax.numpy_dtype_promotion("strict"):
        results = jax.eval_shape(gradients, q, k, v)
    assert all(x.dtype == jnp.bfloat16 for x in results)


def test_symbolic_sizes_are_refused():
    (batch,) = jax.export.symbolic_shape("b")
    q = jax.ShapeDtypeStruct((batch, 24, 4, 8), jnp.float32)
    with pytest.raises(UnsupportedError, match="XSK-401.symbolic-size"):
        jax.export.export(jax.jit(lambda q: xsake.attention(q, q, q, mask=Causal())))(q)


def test_one_segment_argument_serves_both_sides_only_for_equal_lengths():
    with pytest.raises(ArgumentError, match="XSK-102.segment-ids-pair"):
        xsake.attention(Q[:, :5], K, V, q_segment_ids=ids[:, :5])


def test_numpy_and_jax_inputs_give_the_same():
    ours = xsake.attention(Q, K, V, mask=Causal())
    np.testing.assert_array_equal(
        ours, xsake.attention(*(jnp.asarray(x) for x in (Q, K, V)), mask=Causal())
    )


@pytest.mark.parametrize("layout_heads", [1, 4, slow(2)])
def test_masks_of_kv_heads_and_of_query_heads(layout_heads):
    rules = [Causal(), Window(3, 3), Full(), Causal() & Window(5, 0)][:layout_heads]
    mask = PerHead(rules) if layout_heads > 1 else rules[0]
    i, j = np.arange(24)[:, None], np.arange(24)[None]
    allowed = np.stack([rules[h * layout_heads // 4].allows(i, j) for h in range(4)])[None]
    expected = attend(Q, K, V, allowed)
    given = {"mask": mask}, {"layout": BlockLayout.from_mask(mask, q_tokens=24, **BLOCKS)}
    for arguments in given:
        np.testing.assert_allclose(xsake.attention(Q, K, V, **arguments), expected, atol=2e-6)


@pytest.mark.parametrize(("traced", "with_mask"), [(True, True), slow(False, False)])
def test_segments_narrow_a_layout_of_every_batch_element(traced, with_mask):
    rng = np.random.default_rng(0)
    grid = rng.random((2, 2, 3, 3)) < 0.6
    segments = np.sort(rng.integers(-1, 3, (2, 24)).astype(np.int32), axis=1)
    layout = BlockLayout.from_block_mask(jnp.asarray(grid) if traced else grid, **BLOCKS)
    allowed = grid.repeat(2, 1).repeat(8, 2).repeat(8, 3)
    allowed &= ((segments[:, :, None] == segments[:, None]) & (segments >= 0)[:, :, None])[:, None]
    arguments = {"mask": Causal()} if with_mask else {}
    if with_mask:
        allowed &= np.tril(np.ones((24, 24), bool))
    ours = xsake.attention(Q, K, V, layout=layout, q_segment_ids=segments, **arguments)
    np.testing.assert_allclose(ours, attend(Q, K, V, allowed), atol=2e-6)


def test_positions_move_the_mask_given_beside_a_layout():
    """The mask speaks about positions, so blocks may not be dropped by token index."""
    layout = BlockLayout.from_block_mask(np.ones((3, 3), bool), **BLOCKS)
    positions = np.arange(24, dtype=np.int32)[::-1].copy()
    expected = attend(Q, K, V, positions[:, None] >= positions[None])
    for arguments in ({"layout": layout}, {}):
        ours = xsake.attention(
            Q, K, V, mask=Causal(), q_positions=positions, kv_positions=positions, **arguments
        )
        np.testing.assert_allclose(ours, expected, atol=2e-6)


def test_positions_of_one_row_and_of_the_batch_together():
    q_positions = np.stack([np.arange(24), np.arange(24) + 7]).astype(np.int32)
    kv_positions = np.arange(24, dtype=np.int32)
    allowed = kv_positions[None, None, :] <= q_positions[:, :, None]
    ours = xsake.attention(
        Q, K, V, mask=Causal(), q_positions=q_positions, kv_positions=kv_positions
    )
    np.testing.assert_allclose(ours, attend(Q, K, V, allowed[:, None]), atol=2e-6)


def test_full_blocks_stay_full_under_positions():
    told = xsake.explain(
        Q,
        K,
        V,
        mask=Causal(),
        layout=BlockLayout.from_block_mask(np.ones((3, 3), bool), **BLOCKS),
        q_positions=np.arange(24),
    )
    assert (told.blocks.full, told.blocks.partial) == (
        3 * 8,
        3 * 8,
    )  # 3 below the diagonal, 3 on it


def test_an_empty_layout_may_be_pruned():
    nothing = Explicit(np.zeros((24, 24), bool))
    out, lse = xsake.attention(Q, K, V, mask=nothing, q_segment_ids=ids, return_lse=True)
    assert not out.any() and (lse == -np.inf).all()


@pytest.mark.parametrize("shape", [(2, 1), slow((1, 4))])
def test_bias_broadcasts_over_batch_and_heads_with_its_gradient(shape):
    bias = np.random.default_rng(1).normal(size=(*shape, 24, 24)).astype(np.float32)
    run = lambda bias, name: xsake.attention(Q, K, V, mask=Causal(), bias=bias, implementation=name)
    allowed = np.tril(np.ones((24, 24), bool))
    np.testing.assert_allclose(run(bias, "xla"), attend(Q, K, V, allowed, bias), atol=3e-6)
    gradients = [
        jax.grad(lambda bias, name=name: (run(bias, name) ** 2).sum())(jnp.asarray(bias))
        for name in ("xla", "reference")
    ]
    assert gradients[0].shape == bias.shape
    np.testing.assert_allclose(*gradients, atol=1e-5)


def test_a_mask_beside_a_static_layout_compiles_once():
    layout = BlockLayout.from_mask(Full(), q_tokens=24, **BLOCKS)
    seen = []
    listener = lambda event, _, **__: seen.append(event) if "backend_compile" in event else None
    xsake.attention(Q, K, V, layout=layout, mask=Window(9, 9)).block_until_ready()
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        xsake.attention(Q, K, V, layout=layout, mask=Window(9, 9)).block_until_ready()
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert seen == []


def test_static_segments_equal_run_time_segments():
    row = np.repeat(np.array([0, 1, -1], np.int32), 8)
    static = xsake.attention(Q, K, V, mask=Segments(row))
    dynamic = xsake.attention(Q, K, V, q_segment_ids=np.stack([row, row]))
    np.testing.assert_allclose(static, dynamic, atol=1e-6)
    assert not np.asarray(static[:, 16:]).any()
