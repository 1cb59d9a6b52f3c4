"""transformers on torch: the same model generating greedily from the same prompt."""

import numpy as np
import torch
import transformers

from benchmarks.peers.protocol import Prepared


def versions() -> dict[str, str]:
    """What is measured."""
    return {"torch": str(torch.__version__), "transformers": transformers.__version__}


def start(threads: int) -> None:
    """Fix the number of threads."""
    torch.set_num_threads(threads)


def prepare(arrays: dict[str, np.ndarray], case: dict) -> Prepared:
    """Prefill and `new - 1` steps, attention by SDPA."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        case["model"], dtype=torch.float32, attn_implementation="sdpa"
    )
    prompt = torch.from_numpy(arrays["tokens"][:1, : case["prompt"]].astype(np.int64))

    def run() -> torch.Tensor:
        with torch.inference_mode():
            found = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                max_new_tokens=case["new"], min_new_tokens=case["new"],
            )  # fmt: skip
        return found[0, prompt.shape[1] :]

    return Prepared(run, lambda found: {"tokens": found.numpy()})
