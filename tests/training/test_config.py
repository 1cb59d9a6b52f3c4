"""Configurations: round trips, and errors that name every wrong setting."""

import copy
import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xsake.errors import ArgumentError
from xsake.schemas import schema_text
from xsake.training.config import TrainingConfig

DOCUMENT = {
    "model": {"preset": "tiny", "compute_dtype": "float32", "decoder": {"layers": 2}},
    "data": {"folder": "corpus", "context": 64, "batch": 8},
    "optimizer": {"peak_learning_rate": 1e-2, "warmup_steps": 5},
    "checkpoint": {"folder": "run/checkpoints"},
    "run": {"steps": 100},
}
PLAN = ['attention.kind="plan"', "attention.budget=0.8", "attention.block=8"]
NATIVE = ['attention.kind="native_sparse"', "model.decoder.native_sparse={}"]


def config(*overrides: str) -> TrainingConfig:
    """A run of a tiny model in float32: 8 sequences of 64 tokens, 100 steps."""
    return TrainingConfig.from_dict(DOCUMENT, overrides)


def test_a_file_and_its_dictionary_are_one_config(tmp_path):
    document = copy.deepcopy(DOCUMENT)
    layers = document["model"].pop("decoder")["layers"]
    lines = [f"model.decoder.layers = {layers}"]
    for section, values in document.items():
        lines += [f"{section}.{name} = {json.dumps(value)}" for name, value in values.items()]
    (tmp_path / "run.toml").write_text("\n".join(lines))
    found = TrainingConfig.read(tmp_path / "run.toml", ["run.seed=3"])
    assert found == config("run.seed=3") != config()
    assert found.model.decoder.layers == 2 and found.model.decoder.width == 48


def test_overrides_change_nothing_but_their_setting():
    before = copy.deepcopy(DOCUMENT)
    found = config('attention.kind="mask"', 'attention.mask="window(15, 0) | sinks(2)"')
    assert found.attention.mask == "window(15, 0) | sinks(2)"
    assert found.model_copy(update={"attention": config().attention}) == config()
    assert before == DOCUMENT


def test_the_schedule_ends_with_the_run_by_default():
    assert config().total_steps == 100
    assert config("optimizer.total_steps=300").total_steps == 300


@given(
    rate=st.floats(1e-9, 1e3),
    batch=st.integers(1, 8).map(lambda x: x * 6),
    parts=st.sampled_from([1, 2, 3, 6]),
    budget=st.floats(0.6, 0.99),
    no_decay=st.lists(st.sampled_from(["norms", "biases", "embeddings"]), max_size=3),
    enabled=st.booleans(),
)
def test_the_record_reads_as_the_config_it_was_made_of(
    rate, batch, parts, budget, no_decay, enabled
):
    found = config(
        f"optimizer.peak_learning_rate={rate!r}",
        f"data.batch={batch}",
        f"optimizer.grad_accum_steps={parts}",
        f"optimizer.no_decay={json.dumps(no_decay)}",
        f"guard.enabled={json.dumps(enabled)}",
        *PLAN,
        f"attention.budget={budget!r}",
        "attention.annealing={steps = 50}",
    )
    again = TrainingConfig.from_json(found.to_json())
    assert again == found and again.digest == found.digest
    assert TrainingConfig.from_dict(json.loads(found.to_json())) == found
    assert found.digest != config().digest


def test_the_record_fits_its_schema():
    schema = json.loads(schema_text("training.schema.json"))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    record = json.loads(config(*PLAN, "attention.annealing={steps = 50}").to_json())
    assert not list(validator.iter_errors(record))
    record["run"]["stepps"] = 3
    assert list(validator.iter_errors(record))


WRONG = [
    (["optimizer.peak_lr=1"], ["optimizer.peak_lr", "unknown setting", "peak_learning_rate"]),
    (["optimiser.accumulation=2"], ["optimiser: unknown setting", "did you mean optimizer?"]),
    (["data.warmup_steps=3"], ["data.warmup_steps", "did you mean optimizer.warmup_steps?"]),
    (["data.xyzzy=1"], ["expected one of folder, context, batch, seed"]),
    (["model.decoder.widht=3"], ["model.decoder.widht", "did you mean model.decoder.width?"]),
    (["attention.annealing.step=3"], ["attention.annealing.step", "attention.annealing.steps"]),
    (['optimizer.warmup_steps="ten"'], ["optimizer.warmup_steps", "integer", "'ten'"]),
    (["run.steps=true"], ["run.steps", "integer", "True"]),
    (["run.steps=0"], ["run.steps", "greater than or equal to 1"]),
    (["optimizer.peak_learning_rate=nan"], ["optimizer.peak_learning_rate", "finite"]),
    (["optimizer.beta2=1.0"], ["optimizer.beta2", "less than 1"]),
    (['run.name="../x"'], ["run.name", "pattern"]),
    (["run.steps=0", "mesh.data=0"], ["run.steps", "mesh.data"]),
    (["run=3"], ["run:", "dictionary"]),
    (["data.batch=6", "optimizer.grad_accum_steps=4"], ["batch", "multiple of 4"]),
    (["mesh.data=3"], ["batch", "multiple of 3"]),
    (["mesh.fsdp=2", "mesh.data=2", "data.batch=6"], ["multiple of 4"]),
    (["data.context=512"], ["longer than the model's", "model.decoder.context=256"]),
    (["mesh.context=7"], ["mesh.context=7", "multiple of 7"]),
    (["mesh.tensor=4"], ["2 kv heads", "divisor of 2"]),
    (["optimizer.warmup_steps=100"], ["warmup", "fewer than 100"]),
    (["optimizer.total_steps=50"], ["run.steps=100", "optimizer.total_steps=50", "leave it out"]),
    (['model.preset="huge"'], ["unknown preset", "'huge'", "smollm2-135m"]),
    (["model.preset=3"], ["unknown preset", "3"]),
    (["model.decoder.kv_heads=4"], ["model.decoder: self.q_heads=6 must be a multiple of"]),
    (['optimizer.no_decay_axes=["vocabulary"]'], ["'vocabulary'", "vocab, position"]),
    (['optimizer.no_decay=["norm"]'], ["optimizer.no_decay.0", "'norms'"]),
    (['checkpoint.folder="corpus"'], ["data.folder and checkpoint.folder are the same", "corpus"]),
    (
        ['attention.kind="sparse"'],
        ["attention.kind", "'dense', 'mask', 'plan', 'native_sparse' or 'indexed'"],
    ),
    (['attention.kind="mask"'], ["needs a mask", "window(255, 0)"]),
    (['attention.kind="mask"', 'attention.mask="windw(3, 0)"'], ["unknown mask name", "window"]),
    (['attention.mask="causal"'], ["'dense'", "attention.mask", "attention.kind"]),
    (["attention.budget=0.5"], ["'dense'", "attention.budget"]),
    (['attention.kind="plan"'], ["needs either a plan or a budget"]),
    ([*PLAN, 'attention.plan="p.json"'], ["attention.budget", "together with attention.plan"]),
    ([*PLAN, "attention.budget=0.0"], ["attention.budget", "greater than 0"]),
    ([*PLAN, "attention.budget=0.1"], ["forced blocks", "at least 0.5834"]),
    ([*PLAN, "attention.block=32"], ["too short for block selection", "2 blocks of 32"]),
    ([*PLAN, "attention.annealing={steps = 9, start_budget = 0.8}"], ["must decrease the budget"]),
    ([*PLAN, "attention.annealing={steps = 101}"], ["ends before the annealing", "step 101"]),
    (['attention.kind="native_sparse"'], ["or neither"]),
    (["model.decoder.native_sparse={}"], ["or neither"]),
    (['attention.kind="indexed"'], ["or neither"]),
    (["model.decoder.indexer={}"], ["or neither"]),
    (["attention.indexer={}"], ["does not use all given settings"]),
    ([*NATIVE, "mesh.context=2"], ["does not support context parallelism"]),
    ([*NATIVE, "attention.budget=0.5"], ["does not use all given settings"]),
    (["optimizer.grad_accum_steps"], ["not of the form setting=value", "section.setting=value"]),
    (["=3"], ["not of the form setting=value"]),
    (["data.folder=corpus"], ["data.folder", "not TOML", 'data.folder="corpus"']),
    (["data.folder="], ["not TOML", "no value"]),
    (["run.steps=1\nrun.seed = 2"], ["several values", "one value"]),
    (["run.steps.x=3"], ["inside a plain value", "run.steps.x"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "words"), WRONG, ids=lambda x: x[-1][:40])
def test_a_wrong_setting_is_reported_by_name(overrides, words):
    with pytest.raises(ArgumentError) as raised:
        config(*overrides)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("section", ["model", "data", "optimizer", "checkpoint", "run"])
def test_what_has_no_default_is_asked_for(section):
    rest = {name: value for name, value in DOCUMENT.items() if name != section}
    with pytest.raises(ArgumentError, match=f"{section}: is required"):
        TrainingConfig.from_dict(rest)
    with pytest.raises(ArgumentError, match=f"{section}\\.|has no model"):
        TrainingConfig.from_dict(DOCUMENT | {section: {}})


def test_files_that_are_no_configs_are_refused(tmp_path):
    path = tmp_path / "run.toml"
    with pytest.raises(ArgumentError, match="XSK-102.file-unreadable"):
        TrainingConfig.read(path)
    for content in (b"[model", b"\xff\xfe", b"#" * (2**20 + 1)):
        path.write_bytes(content)
        with pytest.raises(ArgumentError, match="XSK-102.config-toml"):
            TrainingConfig.read(path)
    with pytest.raises(ArgumentError, match="XSK-102.config"):
        TrainingConfig.from_json("{")


LONG_KEY = ".".join(["a"] * 100_000)


@pytest.mark.parametrize(
    "value",
    ["[" * 100_000 + "]" * 100_000, "{a=" * 50_000 + "1" + "}" * 50_000, f"{{{LONG_KEY} = 1}}"],
    ids=["lists", "tables", "key"],
)
def test_toml_that_would_take_much_memory_is_refused(tmp_path, value):
    (tmp_path / "run.toml").write_text(f"a = {value}")
    with pytest.raises(ArgumentError, match="XSK-102.config-toml"):
        TrainingConfig.read(tmp_path / "run.toml")
    with pytest.raises(ArgumentError, match="not TOML"):
        config(f"run.steps={value}")


def test_a_record_of_a_run_is_refused_by_its_size_and_its_first_problems():
    with pytest.raises(ArgumentError, match="XSK-102.config-size"):
        TrainingConfig.from_json(b'{"a":[' + b"1," * 2**20 + b"1]}")
    unknown = json.dumps({f"{number}\x1b\n": 1 for number in range(40_000)})
    with pytest.raises(
        ArgumentError, match=r"(?s)0\\u001b\\n: unknown setting.*and 39,98\d more"
    ) as caught:
        TrainingConfig.from_json(unknown)
    assert len(str(caught.value)) < 5000
