"""What is compiled: a Llama of 8B parameters on many chips, by machine, mesh and attention."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from xsake.certify import cuda, tpu
from xsake.errors import ArgumentError
from xsake.model.config import DecoderConfig, LayerKind, Rope
from xsake.training.config import MeshSection, TrainingConfig

CONTEXT = 32768
BLOCK = 512  # of TPUs, and of the arithmetic
WINDOW, SINKS = 1024, 64
MASK = f"window({WINDOW - 1}, 0) | sinks({SINKS})"

LLAMA_8B = DecoderConfig(
    vocab_size=128256, width=4096, mlp_width=14336, layers=32, q_heads=32, kv_heads=8,
    head_dim=128, context=CONTEXT, is_tied=False,
    kinds=(LayerKind(rope=Rope(base=500000.0)),),
)  # fmt: skip


class Machine(NamedTuple):
    """Many chips, as their compiler knows them.

    Attributes:
        platform: of jax.
        chip: a target of `xsake certify`.
        topology: all chips, in the compiler's words.
        implementation: of attention.
        block: tokens of a block.
    """

    platform: Literal["tpu", "cuda"]
    chip: str
    topology: str
    implementation: str
    block: int

    @property
    def memory_bytes(self) -> int:
        """Of one chip."""
        known = tpu.TARGETS if self.platform == "tpu" else cuda.TARGETS
        return known[self.chip].peak.hbm_bytes


MACHINES = {
    "v5p-256": Machine("tpu", "v5p", "v5p:8x8x4", "mosaic_tpu", BLOCK),
    "v5e-256": Machine("tpu", "v5e", "v5e:16x16", "mosaic_tpu", BLOCK),
    "h100-64": Machine("cuda", "sm_90a", "1x8x8", "mosaic_gpu_hopper", 128),
}

Attention = Literal["dense", "mask"]
Positive = Annotated[int, Field(ge=1)]


class ScaleCase(BaseModel):
    """One program.

    Attributes:
        target: a key of `MACHINES`.
        attention: all visible blocks, or those of `MASK`.
        mesh: of all chips.
        batch: sequences of one update.
        accumulation: microbatches of one update.
        logit_positions: positions of each sequence whose logits exist at once.
        exchange: how context shards get at keys; used where `mesh.context` is above 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    attention: Attention
    mesh: MeshSection
    batch: Positive
    accumulation: Positive = 1
    context: Positive = CONTEXT
    # Every round gathers the last weights and scatters their gradient: few rounds, little traffic.
    logit_positions: Positive = 2048
    exchange: Literal["gather", "ring"] = "gather"
    decoder: DecoderConfig = LLAMA_8B

    @property
    def machine(self) -> Machine:
        """The chips that it is compiled for."""
        return MACHINES[self.target]

    @property
    def name(self) -> str:
        """Of the file that keeps the outcome."""
        axes = "_".join(f"{axis}{n}" for axis, n in self.mesh.model_dump().items() if n > 1)
        parts = f"_in{self.accumulation}" if self.accumulation > 1 else ""
        return f"{self.target}_{self.attention}_{axes}_batch{self.batch}{parts}"

    @property
    def config(self) -> TrainingConfig:
        """The run that the step belongs to; its folders are never looked at."""
        attention: dict[str, Any] = {"kind": self.attention}
        if self.attention == "mask":
            attention["mask"] = MASK
        return TrainingConfig.from_dict({
            "model": {
                "decoder": self.decoder.model_dump(),
                "compute_dtype": "bfloat16",
                "remat": True,
                "loss_chunk_size": self.logit_positions,
            },
            "data": {"folder": "corpus", "context": self.context, "batch": self.batch},
            "optimizer": {"peak_learning_rate": 3e-4, "grad_accum_steps": self.accumulation},
            "attention": attention,
            "mesh": self.mesh.model_dump(),
            "checkpoint": {"folder": "checkpoints"},
            "run": {"name": self.name, "steps": 1000},
        })  # fmt: skip


def case_of(
    target: str, attention: Attention, mesh: dict[str, int], batch: int, **changes: Any
) -> ScaleCase:
    """A case of the 8B shape.

    Args:
        target: chip and number of chips, such as "v5p-256".
        attention: of the layers.
        mesh: devices of each axis.
        batch: sequences of one update.
        changes: of the other fields.

    Example:
        >>> case_of("v5e-256", "mask", {"fsdp": 32, "tensor": 8}, 32).name
        'v5e-256_mask_fsdp32_tensor8_batch32'
    """
    if target not in MACHINES:
        raise ArgumentError(
            "scale-target",
            "there is no such target",
            got=repr(target),
            expected=", ".join(MACHINES),
        )
    fields = {"target": target, "attention": attention, "mesh": mesh, "batch": batch}
    return ScaleCase.model_validate(fields | changes)
