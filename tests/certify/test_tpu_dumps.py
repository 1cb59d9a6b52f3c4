"""Dumps are excerpts of what libtpu 0.0.50.1 wrote for stand-in kernels: whole bundles were left
out, together with their rows of slot counts, and long comments cut."""

import shutil
from pathlib import Path

import pytest

from xsake.certify import llo, tpu
from xsake.errors import ArgumentError

DUMPS = Path(__file__).parent / "dumps"


def read(name: str) -> llo.LloKernel:
    (kernel,) = llo.read_kernels(DUMPS / name)
    return kernel


def test_a_grid_step_is_told_apart_from_what_surrounds_it():
    kernel = read("v4_flat_grid")
    assert (kernel.name, kernel.bundles) == ("bsa_wl.1", 90)
    assert sum(section.bundles for section in kernel.grid_loop) == 67
    (work,) = kernel.work
    assert (work.bundles, work.slots["MXU"], work.slots["EUP"]) == (22, 7, 5)
    assert [section.bundles for section in kernel.edges] == [12, 8, 8]
    assert kernel.inner_loops == ()


def test_an_inner_loop_is_found_with_its_delay_slots():
    """Bundles 0x6c to 0x179: a branch at 0x175 and four delay slots, of which one is empty."""
    kernel = read("v5e_inner_loop")
    (loop,) = kernel.inner_loops
    assert [section.bundles for section in loop] == [16]
    assert loop == kernel.work
    assert tpu.collect_facts([kernel], 1.0, 0).loop_bundles == 16
    assert sum(section.bundles for section in kernel.grid_loop) == 51


def test_sections_cover_the_loop_without_gap_or_overlap():
    for folder in DUMPS.iterdir():
        loop = read(folder.name).grid_loop
        for before, behind in zip(loop, loop[1:], strict=False):
            assert before.first + before.bundles == behind.first


def test_memory_is_the_highest_byte_in_use():
    kernel = read("v5e_inner_loop")
    assert kernel.vmem_bytes == 0x60400 + 0x10000
    assert kernel.smem_bytes == 0x4818 + 4


def test_spills_of_vector_and_scalar_registers_are_counted_apart():
    kernel = read("v4_flat_grid")
    assert kernel.vector_spills == 8 + 7
    assert kernel.scalar_spills == 14
    assert read("v5e_inner_loop").vector_spills == 0


def test_operands_that_the_compiler_moved_into_vector_memory_are_counted():
    assert read("tpu7x_whole_operands").vmem_operands == 6
    assert read("v5e_inner_loop").vmem_operands == 0


def test_facts_state_the_largest_kernel_and_the_most_memory():
    kernels = [read(name) for name in ("v4_flat_grid", "v5e_inner_loop")]
    facts = tpu.collect_facts(kernels, 1.5, 0)
    assert (facts.bundles, facts.loop_bundles, facts.spills) == (90, 67, 15)
    assert (facts.vmem_bytes, facts.smem_bytes) == (561152, 67648)
    assert facts.details["kernels"] == 2
    parts = ("work_bundles", "edge_bundles", "scalar_bundles")
    assert [facts.details[part] for part in parts] == [22, 28, 17]


def test_what_a_dump_lacks_is_unknown_and_not_guessed(tmp_path):
    for file in (DUMPS / "v4_flat_grid").glob("*-final_bundles.txt"):
        shutil.copy(file, tmp_path)
    (kernel,) = llo.read_kernels(tmp_path)
    assert kernel.bundles == 90
    facts = tpu.collect_facts([kernel], 1.0, None)
    assert (facts.vmem_bytes, facts.smem_bytes, facts.spills) == (None, None, None)
    assert "work_bundles" not in facts.details


def test_slot_counts_of_another_schedule_are_not_believed(tmp_path):
    shutil.copytree(DUMPS / "v4_flat_grid", tmp_path / "dump")
    (slots,) = (tmp_path / "dump").glob("*-utilization.txt")
    slots.write_text(slots.read_text() + "0 0 0 0 0 0 0 0 0 1\n")
    (kernel,) = llo.read_kernels(tmp_path)
    assert kernel.vector_spills is None and kernel.work == ()


def test_without_kernels_there_are_only_the_compilers_own_figures(tmp_path):
    glue = tmp_path / "0003-TLP-final_bundles.txt"
    glue.write_text("     0   :  { %s1 = smov 0 } /* entry bundle: %fusion.1 = fusion(%x) */\n")
    facts = tpu.collect_facts(llo.read_kernels(tmp_path), 2.0, 4096)
    assert (facts.temp_bytes, facts.bundles, facts.details) == (4096, None, {})


def test_kernels_of_one_folder_keep_their_own_files(tmp_path):
    for name in ("v4_flat_grid", "v5e_inner_loop"):
        shutil.copytree(DUMPS / name, tmp_path, dirs_exist_ok=True)
    found = {kernel.name: kernel.vmem_bytes for kernel in llo.read_kernels(tmp_path)}
    assert found == {"bsa_wl.1": 561152, "wl3.1": 0x60400 + 0x10000}


def test_every_target_has_public_figures_of_one_device():
    for target in tpu.TARGETS.values():
        assert "Google Cloud documentation" in target.peak.source
        assert 1e14 < target.peak.bf16_flops_per_second < 2e15
        assert target.cores_per_device == (2 if target.name in ("v4", "v5p") else 1)


def test_a_dump_folder_that_libtpu_would_misread_is_refused():
    with pytest.raises(ArgumentError, match="XSK-102.libtpu-path"):
        tpu.process_variables(Path("/with space"))
