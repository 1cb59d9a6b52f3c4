"""Dumps are excerpts of what libtpu 0.0.50.1 wrote for stand-in kernels: whole bundles were left
out, together with their rows of slot counts, and long comments cut."""

import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from xsake.certify import llo, tpu
from xsake.errors import ArgumentError

DUMPS = Path(__file__).parent / "dumps"
FIGURES = "bundles", "vmem_bytes", "smem_bytes", "vector_spills", "scalar_spills", "vmem_operands"


def read(name: str) -> llo.LloKernel:
    (kernel,) = llo.read_kernels(DUMPS / name)
    return kernel


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("v4_flat_grid", (90, 561152, 67648, 8 + 7, 14, 0)),
        # memory is the highest byte in use
        ("v5e_inner_loop", (63, 0x60400 + 0x10000, 0x4818 + 4, 0, 9, 0)),
        ("tpu7x_whole_operands", (62, 327680, 67600, 0, 5, 6)),
    ],
)
def test_figures_of_a_kernel_and_sections_without_gap_or_overlap(name, figures):
    kernel = read(name)
    assert tuple(getattr(kernel, figure) for figure in FIGURES) == figures
    for before, behind in pairwise(kernel.grid_loop):
        assert before.first + before.bundles == behind.first


def test_a_grid_step_is_separated_from_its_surroundings():
    kernel = read("v4_flat_grid")
    assert kernel.name == "bsa_wl.1"
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


def test_facts_state_the_largest_kernel_and_the_most_memory():
    kernels = [read(name) for name in ("v4_flat_grid", "v5e_inner_loop")]
    facts = tpu.collect_facts(kernels, 1.5, 0)
    assert (facts.bundles, facts.loop_bundles, facts.spills) == (90, 67, 15)
    assert (facts.vmem_bytes, facts.smem_bytes) == (561152, 67648)
    assert facts.details["kernels"] == 2
    parts = ("work_bundles", "edge_bundles", "scalar_bundles")
    assert [facts.details[part] for part in parts] == [22, 28, 17]


def test_missing_files_and_slots_of_another_schedule_leave_figures_unknown(tmp_path):
    shutil.copytree(DUMPS / "v4_flat_grid", tmp_path / "dump")
    (slots,) = (tmp_path / "dump").glob("*-utilization.txt")
    slots.write_text(slots.read_text() + "0 0 0 0 0 0 0 0 0 1\n")
    (kernel,) = llo.read_kernels(tmp_path)
    assert kernel.vector_spills is None and kernel.work == ()
    for file in (tmp_path / "dump").iterdir():
        if not file.name.endswith("-final_bundles.txt"):
            file.unlink()
    (kernel,) = llo.read_kernels(tmp_path)
    facts = tpu.collect_facts([kernel], 1.0, None)
    assert (facts.bundles, facts.vmem_bytes, facts.smem_bytes, facts.spills) == (90, *[None] * 3)
    assert "work_bundles" not in facts.details


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


def test_a_dump_folder_that_libtpu_would_misread_is_refused():
    with pytest.raises(ArgumentError, match="XSK-102.libtpu-path"):
        tpu.process_variables(Path("/with space"))
