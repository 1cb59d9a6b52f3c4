"""Public specifications of NVIDIA GPUs, and compile-only devices for them."""

from typing import Any, NamedTuple

from xsake.certify.family import PeakFigures, Target
from xsake.errors import ArgumentError

_KIBI, _MEBI, _GIBI, _GIGA, _TERA = 2**10, 2**20, 2**30, 10**9, 10**12


class GpuSpec(NamedTuple):
    """Specification of a GPU, from its data sheet and the CUDA programming guide."""

    name: str  # as reported by the driver
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    shared_kibi: int  # shared memory per SM; a thread block gets 1 KiB less from 8.0 on
    threads: int  # maximum per SM
    units: int  # float32 units per SM
    giga_bytes: int  # memory bandwidth, GB/s
    cache_mebi: int  # level 2
    giga_hertz: float  # boost clock
    gibi: int  # memory
    tera_flops: float  # dense 16-bit products with float32 accumulation
    source: str


SPECS = {
    "sm_75": GpuSpec("Tesla T4", (7, 5), 40, 64, 1024, 64, 320, 4, 1.59, 15, 65, "T4 data sheet"),
    "sm_80": GpuSpec(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 164, 2048, 64, 2039, 40, 1.41, 80, 312,
        "A100 data sheet",
    ),
    "sm_86": GpuSpec(
        "NVIDIA GeForce RTX 3090", (8, 6), 82, 100, 1536, 128, 936, 6, 1.70, 24, 71,
        "GA102 white paper",
    ),
    "sm_89": GpuSpec(
        "NVIDIA L4", (8, 9), 58, 100, 1536, 128, 300, 48, 2.04, 23, 121, "L4 data sheet",
    ),
    "sm_90a": GpuSpec(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 228, 2048, 128, 3352, 50, 1.98, 80, 989,
        "H100 data sheet",
    ),
    "sm_100a": GpuSpec(
        "NVIDIA B200", (10, 0), 148, 228, 2048, 128, 7672, 126, 1.965, 180, 2250,
        "HGX B200 data sheet",
    ),
    "sm_120a": GpuSpec(
        "NVIDIA GeForce RTX 5090", (12, 0), 170, 100, 1536, 128, 1792, 96, 2.41, 32, 209.5,
        "RTX Blackwell white paper",
    ),
}  # fmt: skip


def target(name: str, family: str) -> Target:
    """Return a target: "sm_80", or "sm_90a_wgmma" for other kernels on the same GPU."""
    spec = SPECS[_key(name)]
    peak = PeakFigures(
        float(spec.tera_flops * _TERA),
        float(spec.giga_bytes * _GIGA),
        spec.gibi * _GIBI,
        shared_per_block(spec),
        f"NVIDIA, {spec.source}; shared memory from the CUDA programming guide",
    )
    described = f"{spec.name}, compute capability {'.'.join(map(str, spec.capability))}"
    return Target(name, family, "1x1x1", described, spec.cores, peak)


def _key(name: str) -> str:
    """Return the GPU of a target name."""
    return "_".join(name.split("_")[:2])


def shared_per_block(spec: GpuSpec) -> int:
    """Return the maximum shared memory of a thread block in bytes."""
    return (spec.shared_kibi - (spec.capability[0] >= 8)) * _KIBI


def devices(name: str, topology: str = "1x1x1") -> list[Any]:
    """Return the compile-only devices of a target in a topology: slices x hosts x GPUs per host."""
    if _key(name) not in SPECS:
        raise ArgumentError("gpu", "Unknown GPU.", got=name, expected=", ".join(SPECS))
    from jax.experimental import topologies

    described = topologies.get_topology_desc(
        platform="cuda", target_config=_target_config(SPECS[_key(name)]), topology=topology
    )
    return described.devices


def _target_config(spec: GpuSpec) -> str:
    """Return the device as a text `GpuTargetConfigProto` of XLA."""
    major, minor = spec.capability
    features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    numbers = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * _KIBI,
        "shared_memory_per_core": spec.shared_kibi * _KIBI,
        "shared_memory_per_block_optin": shared_per_block(spec),
        "threads_per_core_limit": spec.threads,
        "core_count": spec.cores,
        "fpus_per_core": spec.units,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "memory_bandwidth": spec.giga_bytes * _GIGA,
        "l2_cache_size": spec.cache_mebi * _MEBI,
        "clock_rate_ghz": spec.giga_hertz,
        "device_memory_size": spec.gibi * _GIBI,
        "device_address_bits": 64,
    }
    versions = ("driver_version", "runtime_version", "compile_time_toolkit_version")
    strings = {"name": spec.name, **dict.fromkeys(versions, "13.0.0"), "dnn_version": "9.10.0"}
    return "\n".join(
        [
            "gpu_device_info {",
            *(f"  {name}: {value}" for name, value in numbers.items()),
            *(f'  {name}: "{value}"' for name, value in strings.items()),
            f"  cuda_compute_capability {{ major: {major} minor: {minor} "
            f"feature_extension: {features} }}",
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 10 patch: 0 }",
            f'device_description_str: "{spec.name}"',
        ]
    )
