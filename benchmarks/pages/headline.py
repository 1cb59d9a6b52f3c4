"""The README's table of figures and its picture, made of committed rows and of nothing else.

python -m benchmarks.pages.headline  # writes the tables of README.md and of pages in docs
python -m benchmarks.pages.headline --draw  # a picture too: quality and time by effective cost

A figure without rows is shown as not measured. `tests/test_documentation.py` holds the
README against this.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.experiments.common import RESULTS, ROOT
from benchmarks.experiments.cpu import decode_shape
from benchmarks.experiments.decoding import BUDGET as STEP_BUDGET
from benchmarks.experiments.decoding import PROMPTS as STEP_PROMPTS
from benchmarks.experiments.generation import NEW, PROMPTS, smollm2_shape
from benchmarks.hads import decoding, end_to_end
from benchmarks.pages.marked_page import filled
from xsake._io import atomic_write
from xsake.benchmarking import BenchmarkRow, Shape, Spread
from xsake.evaluation.summary import estimate
from xsake.reports import plots
from xsake.reports.plan_report import interpolate_share

README, DECODING = ROOT / "README.md", ROOT / "docs" / "decoding.md"
PICTURE = RESULTS / "headline.png"
STEPS_AFTER = max(STEP_PROMPTS)
LOSS = 0.089  # mean KL of attention at which rules are compared by what they cost
WINDOWS = {"a_shape": "first block and window", "sliding_window": "window"}
# Share of the work and blocks of the timed plans.
TIMED = {
    "plan_8192_64_25": (0.25, 64),
    "plan_8192_64_30": (0.3, 64),
    "plan_8192_64_35": (0.35, 64),
    "plan_4096_32": (0.3, 32),
}
PUBLISHED = ("minference", "flexprefill", "xattention_16", "sparge", "a_shape", "sliding_window")


def rows_of(name: str, results: Path = RESULTS) -> list[BenchmarkRow]:
    """Return the rows of an experiment."""
    path = results / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [BenchmarkRow.model_validate_json(line) for line in lines]


def newest(name: str, side: str, results: Path = RESULTS, **fields: object) -> BenchmarkRow | None:
    """Return the last row of a side with the given fields."""
    found = [
        row
        for row in rows_of(name, results)
        if row.side == side
        and all(
            fields[x] == (row.shape.q_tokens if x == "tokens" else getattr(row, x)) for x in fields
        )
    ]
    return found[-1] if found else None


def ratio(row: BenchmarkRow | None, baseline: str) -> str | None:
    """Format a ratio as `0.33x [0.31, 0.35]`; None without a row."""
    if row is None or all(baseline != each.baseline for each in row.ratios):
        return None
    return format_ratio(row.ratio_to(baseline))


def format_ratio(spread: Spread) -> str:
    """Format a ratio with its quartiles, or as unclear if the spread is too large.

    Example:
        >>> format_ratio(Spread(0.3256, 0.3139, 0.3598))
        '0.33x [0.31, 0.36]'
        >>> format_ratio(Spread(0.49, 0.38, 0.66))
        'unclear [0.38, 0.66]'
    """
    median = f"{spread.median:.2f}x" if spread.is_clear else "unclear"
    return f"{median} [{spread.q25:.2f}, {spread.q75:.2f}]"


def lines_of(path: Path) -> list[dict]:
    """The lines of a file of results after its head; none if it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()[1:]] if path.exists() else []


def cost_of(rows: list[dict], rule: str, loss: float) -> float | None:
    """Return the effective share of blocks of a rule at a loss, by log-linear interpolation.

    Example:
        >>> rows = [{"rule": "a", "effective": e, "kl": k} for e, k in ((0.2, 0.1), (0.4, 0.025))]
        >>> round(cost_of(rows, "a", 0.05), 3)
        0.3
    """
    points = sorted((row["effective"], row["kl"]) for row in rows if row["rule"] == rule)
    if not points:
        return None
    required = interpolate_share(*zip(*points, strict=True), loss)
    return required.share if required.relation == "=" else None


def figures(results: Path = RESULTS) -> list[tuple[str, str]]:
    """Return all lines of the table: workload and measurement."""
    find = lambda *asked, **fields: newest(*asked, results=results, **fields)
    compare = lambda row, **names: _joined({said: ratio(row, x) for x, said in names.items()})
    dense = find("causal", "xsake", tokens=4096)
    backward = find("backward", "ragged_25", tokens=4096)
    sparse = [find("same_blocks", "xsake", tokens=4096, layout=f"ragged_{x}") for x in (25, 43)]
    lines: list[tuple[str, str | None]] = [
        *_native_lines(find, compare),
        *_decoding_lines(find, compare, results),
        ("full causal, 4096 tokens, forward", _joined({
            "`jax.nn`": ratio(dense, "jax.nn"), "tokamax": ratio(dense, "tokamax"),
            "torch SDPA": ratio(dense, "torch.sdpa"),
        })),
        ("the same ragged blocks, forward: 25% and 43%", _joined({
            f"{name} at {x}%": ratio(row, side)
            for side, name in (("torch.flex", "compiled FlexAttention"), ("ejkernel", "ejkernel"))
            for x, row in zip((25, 43), sparse, strict=True)
        })),
        *(
            (f"25% of the blocks against all of them, {tokens} tokens, forward", compare(
                find("same_blocks", "xsake", tokens=tokens, layout="ragged_25"),
                **{"torch.sdpa": "dense torch SDPA"},
            ))
            for tokens in (4096, 8192)
        ),
        ("25% of the blocks, forward and backward, 4096 tokens", compare(backward, **{
            "jax.nn": "`jax.nn`", "torch.sdpa": "dense torch SDPA", "tokamax": "tokamax",
            "ejkernel": "ejkernel on the same blocks", "full causal": "our own full causal call",
        })),
        ("temporary memory, forward and backward, 16,384 tokens", _memory(results)),
        *(
            (f"SmolLM2-135M, attention of 8192 tokens, {_plan(name)}", _speed_and_loss(
                compare(row, dense="our own dense attention"), results, name,
            ))
            for name in TIMED
            if (row := find("hads/speed", name, tokens=8192))
        ),
        *(
            (f"SmolLM2-135M, whole prefill of 8192 tokens, {_plan(name)}", _speed_and_loss(
                compare(row, **{dense: f"our own dense attention, both `{backend}`"}),
                results, name,
            ))
            for name in TIMED
            for backend, more in (("xla", ""), ("native_cpu", ", native_cpu"))
            if (row := find("prefill", name + more, tokens=8192))
            and (dense := "xsake" + more)
        ),
        ("perplexity by `plan_4096_32` at 30% of the work, 4096 tokens", _perplexity(results)),
        (f"blocks at equal KL of attention ({LOSS} nats, 4096 tokens), rules that choose blocks",
         _equal_quality(results)),
        ("on a GPU or a TPU", None),
    ]  # fmt: skip
    return [(asked, found or "**not measured**") for asked, found in lines]


def _native_lines(find, compare) -> Iterator[tuple[str, str | None]]:
    """Lines of the kernels of xsake-cpu."""
    peers = {"torch.sdpa": "dense torch SDPA", "xsake.xla": "our `xla`"}
    flex = {"torch.flex": "compiled FlexAttention on the same blocks"}
    square, what = Shape.square(4096), "`xsake[cpu]`: {}, 4096 tokens, {}"
    for direction in ("forward", "forward+backward"):
        said = direction.replace("+", " and ")
        row = find("cpu", "xsake", shape=square, direction=direction)
        yield what.format("full causal", said), compare(row, **peers)
        side = "25% of 128" if direction == "forward" else "both passes, 25%"
        row = find("cpu", side, shape=square, direction=direction)
        yield what.format("25% of the blocks", said), compare(row, **peers, **flex)
    row = find("cpu", "bfloat16", shape=square)
    half = {"float32": "float32", "torch.sdpa bfloat16": "torch SDPA in bfloat16"}
    yield what.format("full causal in bfloat16", "forward"), compare(row, **half)
    row = find("cpu", "xsake", shape=decode_shape(8))
    asked = "`xsake[cpu]`: decoding, one query over 8192 keys, 32 heads of 128 on 8, batch 8"
    yield asked, compare(row, **peers)
    for prompt in PROMPTS:
        for what, tokens in (("first token", prompt), (f"{NEW} tokens", 1)):
            row = find("generation", f"xsake, {what}", shape=smollm2_shape(tokens, prompt))
            sides = {f"transformers, {what}": "transformers", f"xsake.xla, {what}": "our `xla`"}
            yield (
                f"`xsake[cpu]`: SmolLM2-135M, dense, {what} after a prompt of {prompt}",
                (compare(row, **sides)),
            )


def _decoding_lines(find, compare, results: Path) -> Iterator[tuple[str, str | None]]:
    """Lines of decoding steps: the speed of a plan with its loss at the same length."""
    shape = smollm2_shape(1, STEPS_AFTER).model_copy(update={"batch": 8})
    what = f"`xsake[cpu]`: SmolLM2-135M, a decoding step after {STEPS_AFTER} tokens, batch 8, {{}}"
    peers = {"transformers": "transformers", "0.1.0": "XSAKE 0.1.0"}
    yield what.format("dense"), compare(find("decoding", "dense", shape=shape), **peers)
    speed = compare(find("decoding", "plan", shape=shape), dense="our own dense step", **peers)
    setting = {"task": "text", "context": 8192, "selector": "labels", "budgets": "plan",
               "budget": STEP_BUDGET}  # fmt: skip
    known = [
        x
        for x in decoding.rows(results / "hads" / "decoding.jsonl")
        if setting.items() <= x.items()
    ]
    loss = "".join(f"; {_decoding_loss(row)}" for row in known)
    asked = f"by `{decoding.PLAN}` at {STEP_BUDGET:.0%} of the pages"
    yield what.format(asked), speed + loss if speed and loss else None


def _decoding_loss(row: dict) -> str:
    """Loss of a row of `benchmarks.hads.decoding` as perplexity, with an interval."""
    sums = np.array([[1, gap] for gap in row["nll_gap_by_document"]])
    gap = estimate(lambda x: np.expm1(x[..., 1] / x[..., 0]), sums, 0).model_dump()
    said = _gap({"perplexity_gap": gap})
    return f"perplexity {said}, next-token KL {row['kl']:#.2g}, {row['documents']} documents"


def table(results: Path = RESULTS) -> str:
    """The table in Markdown."""
    lines = [f"| {asked} | {found} |" for asked, found in figures(results)]
    return "\n".join(["| | measured |", "|---|---|", *lines, ""])


def pages_table(results: Path = RESULTS) -> str:
    """Losses of decoding by the pages it reads, in Markdown."""
    rows = decoding.rows(results / "hads" / "decoding.jsonl")
    lines = [
        "| tokens | pages | KV | text: KL, loss | copy: KL, loss | fact: KL, loss |",
        "|---|---|---|---|---|---|",
    ]
    for context in (4096, 8192):
        for (selector, budgets), each in decoding.BUDGETS.items():
            for budget in each:
                setting = {"context": context, "selector": selector, "budgets": budgets,
                           "budget": budget}  # fmt: skip
                known = {x["task"]: x for x in rows if setting.items() <= x.items()}
                if known:
                    lines.append(_pages_line(setting, known))
    return "\n".join([*lines, ""])


def _pages_line(setting: dict, known: dict[str, dict]) -> str:
    by = {"oracle": "true masses", "window": "the first and the last"}
    selector, budgets = setting["selector"], setting["budgets"]
    heads = "" if budgets == "plan" or selector == "window" else ", all heads equal"
    what = f"{setting['budget'] * 100:.3g}%, {by.get(selector, selector)}{heads}"
    losses = [
        f"{known[task]['kl']:#.2g}, {known[task]['nll_gap']:+.3f}" if task in known else ""
        for task in decoding.STEPS
    ]
    share = next(iter(known.values()))["kv_share"]
    return f"| {' | '.join([str(setting['context']), what, f'{share:.1%}', *losses])} |"


def _joined(found: dict[str, str | None]) -> str | None:
    known = [f"{ratio} of {name}" for name, ratio in found.items() if ratio]
    return "time: " + ", ".join(known) if known else None


def _memory(results: Path) -> str | None:
    ours, theirs = (
        newest("memory", side, results, tokens=16384) for side in ("xsake causal", "jax.nn")
    )
    if ours is None or theirs is None or not ours.temp_bytes or not theirs.temp_bytes:
        return None
    return f"{ours.temp_bytes / theirs.temp_bytes:.1%} of `jax.nn`"


def _equal_quality(results: Path) -> str | None:
    rows = lines_of(results / "hads" / "ladder_4096_64.jsonl")
    ours, oracle = (cost_of(rows, name, LOSS) for name in ("hads", "oracle_model"))
    others = {name: cost_of(rows, name, LOSS) for name in PUBLISHED}
    reached = {name: cost for name, cost in others.items() if cost is not None}
    if ours is None or not reached:
        return None
    best = min(reached, key=lambda name: reached[name])
    said = f"{ours:.1%} of the work, best published rule ({best}) {reached[best]:.1%}"
    return said + (f", true masses {oracle:.1%}" if oracle else "")


def _plan(name: str) -> str:
    work, block = TIMED[name]
    return f"`{name}` (blocks of {block}, {work:.0%} of the work)"


def losses(results: Path, plan: str, context: int, split: str, rule: str = "plan") -> dict | None:
    """The measured losses of a plan, or of a window that costs as much."""
    asked = {"plan": plan, "context": context, "split": split, "rule": rule}
    rows = end_to_end.read_rows(results / "hads" / "plan_loss.jsonl")
    return next((row for row in rows if asked.items() <= row.items()), None)


def _gap(row: dict, name: str = "perplexity_gap") -> str:
    return "{value:+.1%} [{low:.1%}, {high:.1%}]".format(**row[name])


def _speed_and_loss(speed: str | None, results: Path, plan: str) -> str | None:
    """A speed is stated with the loss of the same plan, or not at all."""
    row = losses(results, plan, 8192, "test")
    if speed is None or row is None:
        return None
    return f"{speed}; perplexity {_gap(row)}, {row['documents']} documents"


def _perplexity(results: Path) -> str | None:
    parts = [
        f"{_gap(row)} on {row['documents']} {split} documents (last quarter of the positions "
        f"{_gap(row, 'perplexity_gap_last_quarter')})"
        for split in ("test", "fresh")
        if (row := losses(results, "plan_4096_32", 4096, split))
    ]
    return "; ".join(parts) or None


def draw(path: Path = PICTURE, results: Path = RESULTS) -> None:
    """Quality and time against what is computed: one picture."""
    with plots.open_png(path, (13.5, 4.2)) as figure:
        left, middle, right = figure.subplots(1, 3, width_ratios=(5, 3.6, 5))
        _draw_loss(left, results)
        _draw_perplexity(middle, results)
        _draw_times(right, results)
        for axes in (left, right):
            axes.grid()
            axes.legend()
            plots.format_ticks(axes.xaxis, "{:.0%}")


def _draw_loss(axes, results: Path) -> None:
    """Loss of attention against its cost; ours is the thick line."""
    rows = lines_of(results / "hads" / "ladder_4096_64.jsonl")
    _, peer, ochre, purple, *_ = plots.SERIES
    styles = {
        "hads": ("hads", plots.OURS, "-"), "oracle_model": ("true masses", plots.INK, ":"),
        "minference": ("MInference's patterns", peer, "-"),
        "flexprefill": ("FlexPrefill", purple, "--"),
        "a_shape": ("first block and window", ochre, "-."),
    }  # fmt: skip
    for rule, (label, colour, line) in styles.items():
        points = sorted((x["effective"], x["kl"]) for x in rows if x["rule"] == rule)
        width = 2.6 if rule == "hads" else 1.2
        axes.plot(*zip(*points, strict=True), line, color=colour, lw=width, label=label)
    axes.set(yscale="log", xlabel="work, choosing included / dense attention", xlim=(0.1, 0.5),
             ylabel="lost: KL of attention, nats")  # fmt: skip
    plots.format_ticks(axes.yaxis, "{:g}", is_log=True)
    axes.set_title("What attention loses (4096 tokens, 24 documents)")


def _draw_perplexity(axes, results: Path) -> None:
    """Loss of the whole model at the same work; each plan with its own time."""
    points = [
        (f"{work:.0%}\n{row.ratio_to('xsake').median:.2f}x", plots.OURS, loss)
        for name, (work, _) in TIMED.items()
        if (loss := losses(results, name, 8192, "test"))
        and (row := newest("prefill", name, results, tokens=8192))
    ]
    for rule, name in WINDOWS.items():
        if loss := losses(results, "plan_4096_32", 8192, "test", rule):
            points.append((name.replace(" and ", "\nand "), plots.PEER, loss))
    for place, (_, colour, loss) in enumerate(points):
        value, low, high = (100 * loss["perplexity_gap"][x] for x in ("value", "low", "high"))
        axes.plot([place, place], [low, high], color=colour, lw=2)
        axes.plot(place, value, "o", color=colour, ms=7)
        axes.annotate(f"+{value:.2g}%", (place, high), (0, 6), textcoords="offset points",
                      ha="center", fontsize=9)  # fmt: skip
    axes.set_xticks(range(len(points)), [label for label, _, _ in points])
    axes.set(yscale="log", ylabel="perplexity, more than dense", ylim=(0.1, 200))
    axes.margins(x=0.12)
    plots.format_ticks(axes.yaxis, "{:g}%")
    axes.set_title(
        "SmolLM2, 8192 tokens: loss of plans by work,\nwith prefill time / dense; windows at 30%"
    )
    axes.grid(axis="y")


def _draw_times(axes, results: Path) -> None:
    """Draw measured time against the share of blocks, and the line of equal shares."""
    axes.plot([0, 1], [0, 1], color=plots.FAINT, lw=1, ls="--", label="perfect skipping")
    series = (("forward", "ragged", 4096, "o-"), ("forward", "ragged", 8192, "s-"),
              ("forward and backward", "backward", 4096, "^-"))  # fmt: skip
    for (label, name, tokens, style), colour in zip(series, plots.SERIES, strict=False):
        points = [(1.0, 1.0)]
        for row in _of_tokens(name, tokens, results):
            if row.budget not in (None, 1.0) and row.is_own:
                points.append((row.budget, row.ratio_to("full causal").median))
        line = zip(*sorted(points), strict=True)
        axes.plot(*line, style, color=colour, lw=1.3, label=f"{label}, {tokens} tokens")
    axes.set(xlabel="computed blocks / visible blocks", ylabel="time / all blocks", xlim=(0, 1.02))
    axes.set_ylim(0, 1.05)
    axes.set_title("What is saved (2 CPU cores, ragged heads)")


def _of_tokens(name: str, tokens: int, results: Path) -> list[BenchmarkRow]:
    rows = [row for row in rows_of(name, results) if row.shape.q_tokens == tokens]
    last = rows[-1].run if rows else None
    return [row for row in rows if row.run == last]


def main() -> None:
    """Write the table, and the picture if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", action="store_true")
    asked = parser.parse_args()
    if asked.draw:
        draw()
    atomic_write(README, filled(README.read_text(), {"headline": table()}))
    atomic_write(DECODING, filled(DECODING.read_text(), {"pages": pages_table()}))
    print(table())


if __name__ == "__main__":
    main()
