"""Hopper target family: the `wgmma` kernels of `mosaic_gpu_hopper`, compiled for an H100."""

from xsake.certify import cuda, gpu_specs
from xsake.certify.case import CompileCase

NAME = "hopper"
KERNELS = "xsake.kernels.block_sparse.mosaic_gpu.hopper"
SELECTED_KERNELS = cuda.SELECTED_KERNELS
PLATFORM = "sm_90"
PACKAGES = cuda.PACKAGES
TARGETS = {"sm_90a_wgmma": gpu_specs.target("sm_90a_wgmma", NAME)}
CONTROLS = cuda.CONTROLS

requirements = cuda.requirements
process_variables = cuda.process_variables
device_kind = cuda.device_kind
compile = cuda.compile


def supports(case: CompileCase) -> bool:
    """Whether the kernels support a case: 16-bit, block lists, head_dim up to 128."""
    return case.dtype == "bfloat16" and case.slots is None and case.head_dim <= 128
