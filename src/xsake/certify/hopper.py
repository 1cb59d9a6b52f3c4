"""Hopper's own kernels, by `wgmma`: what `mosaic_gpu_hopper` serves, compiled for an H100."""

from xsake.certify import cuda, gpu_specs
from xsake.certify.case import Case

NAME = "hopper"
KERNELS = "xsake.kernels.block_sparse.mosaic_gpu_hopper"
SELECTED_KERNELS = cuda.SELECTED_KERNELS
PLATFORM = "sm_90"
PACKAGES = cuda.PACKAGES
TARGETS = {"sm_90a_wgmma": gpu_specs.target("sm_90a_wgmma", NAME)}
CONTROLS = cuda.CONTROLS

requirements = cuda.requirements
process_variables = cuda.process_variables
device_kind = cuda.device_kind
compile = cuda.compile


def serves(case: Case) -> bool:
    """Whether the kernels take a case: 16-bit numbers, block lists, up to 128 features."""
    return case.dtype == "bfloat16" and case.slots is None and case.head_dim <= 128
