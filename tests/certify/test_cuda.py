"""The families of NVIDIA GPUs: what ptxas says is read right, and only what is served is asked."""

import re

import pytest

from xsake.certify import cases, cuda, family, gpu_specs
from xsake.errors import ArgumentError

# As ptxas 13.4 words it; numbers are made up.
PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'some_kernel' for 'sm_80'
ptxas info    : Function properties for some_kernel
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 200 registers, used 2 barriers, 1 bytes smem, 424 bytes cmem[0]
"""
CODE = """.version 8.8
.target sm_80
\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}, {%r2}, {%r3}, {%r4};
\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}, {%r2}, {%r3}, {%r4};
\tldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1}, [%r2];
\tcp.async.cg.shared.global [%r1], [%rd2], 16, 16;
\tcp.async.commit_group;
\tcp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1];
"""


def written(folder, name: str, ptxas: str = PTXAS) -> None:
    (folder / f"{name}.ptxas").write_text(ptxas)
    (folder / f"{name}.ptx").write_text(CODE)
    (folder / f"{name}.resources.txt").write_text("Resources(smem_scratch_bytes=43008, x=0)")


def test_what_ptxas_says_is_read(tmp_path):
    written(tmp_path, "first")
    written(tmp_path, "second", PTXAS.replace("200", "255"))
    largest, other = cuda.read_kernels(tmp_path)
    assert (largest.name, largest.registers, other.registers) == ("second", 255, 200)
    assert (other.target, other.spill_bytes, other.shared_bytes) == ("sm_80", (12, 8), 43008)
    assert other.instructions == {"mma": 2, "wgmma": 0, "ldmatrix": 1, "cp_async": 1, "tma": 1}
    assert cuda.read_kernels(tmp_path / "first.ptx") == []


@pytest.mark.parametrize("name", ["cuda", "hopper", "turing"])
def test_all_are_families_with_requirements_by_name(name):
    loaded = family.load_family(family.FAMILIES[name])
    assert name == loaded.NAME
    assert isinstance(loaded, family.TargetFamily)
    words = " ".join(loaded.requirements("0.12.0.1"))
    assert "jax-cuda13-plugin==0.12.0.1" in words and "://" not in words
    assert all(package in words for package in loaded.PACKAGES)
    assert loaded.process_variables(None) == {"JAX_PLATFORMS": "cpu"}


def test_targets_are_found_and_have_the_shared_memory_of_their_capability():
    assert family.find_target("sm_90a").family == "cuda"
    assert family.find_target("sm_75").family == "turing"
    assert family.find_target("sm_90a_wgmma").peak == family.find_target("sm_90a").peak
    kibi = {name: target.peak.vmem_bytes // 1024 for name, target in cuda.TARGETS.items()}
    assert kibi == {
        "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_120a": 99
    }  # fmt: skip


def test_only_what_the_kernels_take_is_selected():
    smoke = cases.select_cases("smoke", cuda.AMPERE)
    assert {case.dtype for case in smoke if case.expects == "compiles"} == {"bfloat16"}
    passes = {*cases.PASSES, *cases.SELECTED_PASSES, cases.PAGED_PASS}
    assert {case.pass_name for case in smoke} == passes
    assert [case for case in smoke if case.expects == "refused"] == list(cuda.CONTROLS)
    assert {case.tokens for case in cases.select_cases("all", cuda.TURING)} == {4096}


def test_a_description_names_every_number_once_and_an_unknown_gpu_has_none():
    text = gpu_specs._target_config(gpu_specs.SPECS["sm_90a"])
    names = re.findall(r"^  (\w+):", text, re.MULTILINE)
    assert len(names) == len(set(names))
    assert "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES" in text
    with pytest.raises(ArgumentError, match="sm_70"):
        gpu_specs.devices("sm_70", "1x1x1")
