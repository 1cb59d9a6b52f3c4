"""What one real model looks at in one document, as files that the showcase explores.

python -m benchmarks.hads.explore --profile profile.json     # a profile of benchmarks.hads.ladder

The document is the first of the test documents: the profile has not seen it. The same document,
its last tokens replaced by its first, shows which heads fetch a passage from far back. Files go to
results/hads/explore_<context>_<block>/; nothing else is measured or changed.
"""

import argparse
import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from benchmarks.hads.corpus import documents
from benchmarks.hads.explored import WHOLE, Choices, Packed
from benchmarks.peers.models import directory
from xsake._io import atomic_write
from xsake._provenance import checkout_root, environment
from xsake.hads import make_policy
from xsake.hads.budget import ForcedBlocks
from xsake.hads.calibrate import (
    COPY_DIVISOR,
    CalibrationDocument,
    DocumentMasses,
    append_copy,
)
from xsake.hads.curves import correct_estimates
from xsake.hads.hooks import make_mass_hook
from xsake.hads.profile import Profile
from xsake.hads.selectors import Sampled
from xsake.model.huggingface import load
from xsake.model.observer import Observer
from xsake.model.tokenizer import Tokenizer

RESULTS = Path(__file__).resolve().parents[1] / "results" / "hads"
POLICIES = ("effect", "kl", "mass", "entropy_budget", "uniform")
PERCENTS = tuple(range(5, 101))
CARRIERS = 12  # heads that fetch most of a copied passage
REFERENCE_HEADS = 6
REFERENCE_PERCENTS = (5, 10, 20, 30, 50, 80, 100)


@dataclasses.dataclass(frozen=True)
class Seen:
    """A document as heads saw it.

    Args:
        masses: true ones, all heads of all layers in one axis.
        packed: the same for a browser.
    """

    masses: DocumentMasses
    packed: Packed


def main() -> None:
    """Let the model read both documents and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", type=Path, required=True)
    profile = Profile.load(parser.parse_args().profile)
    folder = directory()
    tokenizer = Tokenizer.load(folder)
    document = next(x for x in documents(tokenizer) if x.split == "test")
    reading = CalibrationDocument(
        f"{document.kind}: {document.name}", document.tokens[: profile.context]
    )
    observer = Observer(load(folder).model)
    look = make_mass_hook(profile.block, (Sampled(),), profile.components)
    plain, copied = (
        _seen(observer(jnp.asarray(each.tokens)[None], look), profile)
        for each in (reading, append_copy(reading))
    )
    passage = tokenizer.decode(reading.tokens[: profile.context // COPY_DIVISOR].tolist())
    write(RESULTS / f"explore_{profile.context}_{profile.block}", profile, reading, plain, copied,
          passage)  # fmt: skip


def _seen(found, profile: Profile) -> Seen:
    masses = DocumentMasses.of(found, 0)
    weights = profile.selector_weights["sampled"].reshape(profile.model.heads, -1)
    order = correct_estimates(masses.estimates["sampled"], weights)
    return Seen(masses, Packed.of(masses.true, order, profile.forced))


def write(
    folder: Path,
    profile: Profile,
    reading: CalibrationDocument,
    plain: Seen,
    copied: Seen,
    passage: str,
) -> None:
    """All files of the folder.

    Args:
        folder: where they go.
        profile: what the policies decide by.
        reading: the document.
        plain: what heads saw in it.
        copied: what they saw in the document that ends with a copy of its beginning.
        passage: the text that is copied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    heads, layers = profile.model.q_heads, profile.model.layers
    for layer in range(layers):
        own = slice(layer * heads, (layer + 1) * heads)
        part = Packed(plain.packed.codes[own], plain.packed.places[own])
        atomic_write(folder / f"layer_{layer:02}.bin.gz", part.to_bytes())
    totals = spent(profile)
    atomic_write(folder / "totals.bin.gz", _shrunk(totals))
    carried = carry(plain.masses.true, copied.masses.true)
    best = np.argsort(-(carried[1] - carried[0]), kind="stable")[:CARRIERS]
    part = Packed(copied.packed.codes[best], copied.packed.places[best])
    atomic_write(folder / "copy.bin.gz", part.to_bytes())
    choices = Choices(plain.packed, profile.forced)
    text = {
        **_origin(profile, reading),
        "entropy": _rounded(plain.masses.entropy.reshape(layers, heads)),
        "whole": whole_model(choices, totals),
        "reference": reference(choices, totals),
        "copy": {
            "tokens": profile.context // COPY_DIVISOR,
            "passage": " ".join(passage.split())[:600],
            "without": _rounded(carried[0].reshape(layers, heads)),
            "with": _rounded(carried[1].reshape(layers, heads)),
            "heads": best.tolist(),
        },
        "largest_error": float(_largest_error(plain, profile.forced)),
    }
    atomic_write(folder / "explore.json", json.dumps(text, ensure_ascii=False) + "\n")


def _origin(profile: Profile, reading: CalibrationDocument) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "model": profile.model.model_dump(),
        "document": {
            "name": reading.name, "tokens": len(reading.tokens), "sha256": reading.sha256,
        },
        "context": profile.context,
        "block": profile.block,
        "n": profile.n,
        "always": {"sinks": profile.forced.num_sink, "locals": profile.forced.num_local},
        "selector": "sampled",
        "policies": list(POLICIES),
        "percents": list(PERCENTS),
        "profile": {
            "digest": profile.digest,
            "documents": len(profile.documents),
            "commit": profile.environment.commit,
        },
        "environment": dataclasses.asdict(environment(checkout_root())),
        "command": "python -m benchmarks.hads.explore",
    }  # fmt: skip


def spent(profile: Profile) -> Int[np.ndarray, "policies budgets X"]:
    """Blocks of every head, by policy and percent of the visible blocks."""
    found = [
        [
            _policy(name).plan_shares(profile, percent / 100).reshape(-1)
            for percent in PERCENTS
        ]
        for name in POLICIES
    ]  # fmt: skip
    return np.array(found, np.int64)


def _policy(name: str):
    needs_curve = name in ("effect", "kl", "mass")
    return make_policy(name, **({"curve": "sampled"} if needs_curve else {}))


def _shrunk(totals: Int[np.ndarray, "policies budgets X"]) -> bytes:
    """Totals as little-endian 16-bit numbers; a head of 256 rows would still fit."""
    assert totals.max() < 2**16, totals.max()
    return gzip.compress(totals.astype("<u2").tobytes(), compresslevel=9, mtime=0)


def carry(
    plain: Float[np.ndarray, "X n n"], copied: Float[np.ndarray, "X n n"]
) -> Float[np.ndarray, "2 X"]:
    """Mass that rows of the copy put on the passage, without and with the copy, mean over rows.

    A row's own words stand in one block of the passage, and the words after them there or in the
    next one; the first row is left out because its block holds the sink.
    """
    n = plain.shape[-1]
    first = n - n // COPY_DIVISOR
    rows = np.arange(first + 1, n)
    both = [masses[:, rows, rows - first] + masses[:, rows, rows - first + 1] for masses in
            (plain, copied)]  # fmt: skip
    return np.stack([masses.mean(-1) for masses in both])


def whole_model(
    choices: Choices, totals: Int[np.ndarray, "policies budgets X"]
) -> dict[str, dict[str, list[float]]]:
    """Means over all heads, by policy and percent."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, budgets in zip(POLICIES, totals, strict=True):
        kept = [choices.kept(own) for own in budgets]
        found[name] = {
            field: [round(float(getattr(each, field).mean()), 9) for each in kept]
            for field in ("kl", "mass", "recall")
        }
    return found


def reference(
    choices: Choices, totals: Int[np.ndarray, "policies budgets X"]
) -> list[dict[str, Any]]:
    """Some heads at some percents with every policy: what a page has to show there."""
    heads = np.linspace(0, totals.shape[-1] - 1, REFERENCE_HEADS).astype(int)
    rows = []
    for name, budgets in zip(POLICIES, totals, strict=True):
        for percent in REFERENCE_PERCENTS:
            own = budgets[PERCENTS.index(percent)]
            kept = choices.kept(own)
            rows += [
                {"policy": name, "percent": percent, "head": int(head), "blocks": int(own[head]),
                 "kl": float(kept.kl[head]), "mass": float(kept.mass[head]),
                 "recall": float(kept.recall[head])}
                for head in heads
            ]  # fmt: skip
    return rows


def _largest_error(seen: Seen, forced: ForcedBlocks) -> float:
    """Between masses and what is written of them."""
    codes, _ = seen.packed.unpacked()
    shares = seen.masses.true / seen.masses.true.sum(-1, keepdims=True)
    return float(np.abs(codes / WHOLE - shares).max())


def _rounded(values: Float[np.ndarray, "L Hq"]) -> list[list[float]]:
    return [[round(float(x), 5) for x in row] for row in values]


if __name__ == "__main__":
    main()
