# `just` lists the recipes. Without just: run `.ci/setup`, then `.venv/bin/just`.
set shell := ["bash", "-euo", "pipefail", "-c"]

venv := ".venv"
export PATH := justfile_directory() / venv / "bin:" + env("PATH")
# Some machines forbid it: every process would then compile all of JAX's modules again, 10 s of them.
export PYTHONDONTWRITEBYTECODE := ""
all_types := "xsake,beartype.beartype(conf=beartype.BeartypeConf(strategy=beartype.BeartypeStrategy.On, is_pep484_tower=True))"
extras := "--extra flax --extra model --extra train --extra serve --extra trackers --extra equinox --extra viz --extra bench --extra testing"
compile := "uv pip compile --quiet --universal --python-version 3.12 --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links --custom-compile-command 'just lock'"

_default:
    @just --list

# make the environment from the locks
setup:
    .ci/setup {{ venv }}

# everything that is quick: lint, types, imports
check: lint types imports

lint:
    ruff check
    ruff format --check
    python .ci/words.py --check

types:
    pyrefly check

imports:
    lint-imports --no-logo

# format, and fix what can be fixed
fmt:
    ruff check --fix
    ruff format

# the tests of every change (arguments go to pytest); compiled in a hurry, as JAX compiles its own tests
[no-exit-message]
test *args:
    JAX_DISABLE_MOST_OPTIMIZATIONS=1 pytest -q {{ args }}

# every test, slow ones included, every type checked, many more examples, compiled as for users; then every supported jax
nightly *args: && showcase certify-smoke (native "-n" "2") native-quality (jax-range "--slow")
    pytest -q -m "slow or not slow" --timeout=1800 --hypothesis-profile=nightly --jaxtyping-packages='{{ all_types }}' {{ args }}

# update the source tree in docs/tree.md
tree:
    python .ci/tree.py

# build the documentation; a warning is an error
docs:
    sphinx-build -q -W --keep-going -b html docs docs/_build/html

# build the showcase from committed data, and walk through it if there is a Chromium; needs Node 20.9
showcase:
    # `npm ci` requires the binaries of all platforms in the lock, which an index may not have; locked.mjs checks the same.
    cd showcase && npm install --no-save --ignore-scripts --cache ../.ci/npm && node scripts/locked.mjs
    cd showcase && npm test
    cd showcase && NEXT_TELEMETRY_DISABLED=1 npm run build
    cd showcase && npm run walk
    python .ci/stage_inputs.py passed showcase

# Lighthouse's opinion of the built showcase
showcase-score:
    cd showcase && node tests/score.mjs

# the wheel in an empty environment, then the README's quick start
clean-install *args:
    .ci/clean_install {{ args }}

# the wheel with every supported minor version of jax; `--record` writes the table of docs/install.md
jax-range *args:
    .ci/jax_range {{ args }}

# the gate's part of it: the oldest, few tests
jax-range-smoke:
    .ci/jax_range --quick

# the wheel of xsake-cpu, and every test of the backend native_cpu
native *args:
    .ci/native {{ args }}

# sanitizers, clang-tidy, 1,000 layouts and an emulated aarch64 for the C++ of xsake-cpu; needs Debian's packages
native-quality *lanes:
    .ci/native_quality {{ lanes }}

# sdist, wheel, bill of materials and pages in dist/, tried on every Python; publishes nothing
release *tag:
    .ci/release {{ tag }}

# the whole gate
ci:
    .ci/run

# every promise about speed and memory; rows go to benchmarks/results
bench *args:
    python -m benchmarks.experiments.claims {{ args }}

# the same at small sizes, in a few minutes; nothing is kept
bench-smoke:
    python -m benchmarks.experiments.claims --quick --rounds 3 || [ $? -eq 3 ] # small sizes keep few promises

# everything the README's table tells about time and memory, then the table itself
bench-all:
    python -m benchmarks.experiments.claims || [ $? -eq 3 ] # a promise that is missed is in its rows
    python -m benchmarks.hads.speed --rounds 3
    python -m benchmarks.experiments.prefill --rounds 3
    just venv={{ venv }} headline

# the README's table and picture, and the table of races in the docs, from committed rows
headline:
    python -m benchmarks.pages.headline --draw
    python -m benchmarks.pages.evidence
    python -m benchmarks.pages.comparisons

# what the README's table tells about losses, then the table itself; takes hours, and goes on where it was stopped
bench-quality:
    python -m benchmarks.hads.capture
    python -m benchmarks.hads.ladder
    python -m benchmarks.hads.plans --context 8192 --work 25%,30%,35%
    python -m benchmarks.hads.end_to_end --plans plan_4096_64,plan_8192_64_25,plan_8192_64_30,plan_8192_64_35 --context 8192 --tests 12
    python -m benchmarks.hads.end_to_end --plans plan_4096_32
    python -m benchmarks.hads.end_to_end --plans plan_4096_32 --split fresh
    python -m benchmarks.hads.end_to_end --rules all
    just venv={{ venv }} headline

# a few ratios that must not become worse; a part of the gate
bench-gate:
    python -m benchmarks.experiments.gate

# two commits beside each other, interleaved: just bench-commits main~5 main
bench-commits *args:
    python -m benchmarks.experiments.commits {{ args }}

# put faults into real training runs; writes benchmarks/results/faults.json
faults *args:
    python -m benchmarks.faults {{ args }}

# what watching costs, slow clients, a million steps; rows go to benchmarks/results/observability
eyes:
    python -m benchmarks.observability.cost
    python -m benchmarks.observability.streams
    python -m benchmarks.observability.million

# make the golden checkpoints of tests/model again, with transformers in its own environment
golden *args:
    python -m benchmarks.peers.golden {{ args }} make

# a real model of the measurements as a Hugging Face directory; prints where it is: just model [NAME]
model *args:
    python -m benchmarks.peers.models {{ args }}

# compile every case for every TPU and GPU target; writes certificates/
certify *args:
    xsake certify --cases all {{ args }}

# the gate's part of it: two TPUs and two GPUs, few cases, nothing is kept
certify-smoke *args:
    xsake certify v5e --cases smoke --no-figures --no-resume --out .ci/certificates --environments .ci/environments {{ args }}
    xsake certify v6e --cases 'smollm2_135m_4k_25_bf16_[fd]*' --no-figures --no-resume --out .ci/certificates --environments .ci/environments
    xsake certify sm_80 sm_90a_wgmma --cases 'smollm2_135m_4k_25_bf16_[fd]*' --no-figures --no-resume --out .ci/certificates --environments .ci/environments
    xsake certify sm_80 --cases smollm2_135m_4k_100_bf16_page16_paged_decode --no-figures --no-resume --out .ci/certificates --environments .ci/environments
    python .ci/stage_inputs.py passed certify-smoke

# write the table of certificates into the documentation
hardware:
    python -m xsake.certify.table docs/hardware.md certificates

# known vulnerabilities of everything that is locked; needs the vulnerability databases of PyPI and npm
audit:
    pip-audit --strict --disable-pip --require-hashes -r requirements/dev.txt -r requirements/build.txt -r requirements/release.txt
    cd showcase && npm audit --package-lock-only

# resolve the locks again
lock:
    echo uv | {{ compile }} - -o requirements/uv.txt
    # every extra but `cpu`, whose package is built from native/
    {{ compile }} pyproject.toml {{ extras }} --group dev -o requirements/dev.txt
    printf '%s\n' scikit-build-core jax==0.8.0 jaxlib==0.8.0 cmake ninja | {{ compile }} - -o requirements/native.txt
    {{ compile }} --group build -o requirements/build.txt
    {{ compile }} --group release -o requirements/release.txt
    for minor in 0.8 0.9 0.10 0.11 0.12; do \
        {{ compile }} pyproject.toml --extra testing --extra flax --extra equinox --group jax-range --constraint <(echo "jax==$minor.*") -o requirements/jax_$minor.txt; \
    done
