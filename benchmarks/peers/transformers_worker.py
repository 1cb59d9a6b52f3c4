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
    """Prefill and `new - 1` steps, attention by SDPA; with `batch` only steps, as many as `new`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        case["model"], dtype=torch.float32, attn_implementation="sdpa"
    )
    prompt = torch.from_numpy(arrays["tokens"][:1, : case["prompt"]].astype(np.int64))

    if "batch" in case:
        return _prepare_steps(model, prompt, case["new"], case["batch"])

    def run() -> torch.Tensor:
        with torch.inference_mode():
            found = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                max_new_tokens=case["new"], min_new_tokens=case["new"],
            )  # fmt: skip
        return found[0, prompt.shape[1] :]

    return Prepared(run, lambda found: {"tokens": found.numpy()})


def _prepare_steps(model, prompt: torch.Tensor, new: int, batch: int) -> Prepared:
    """Greedy steps of rows that all have the same prompt, which is processed here."""
    cache = transformers.DynamicCache()
    with torch.inference_mode():
        logits = model(prompt, past_key_values=cache, logits_to_keep=1).logits
        cache.batch_repeat_interleave(batch)
    first = logits[:, -1].argmax(-1).repeat(batch)

    @torch.inference_mode()
    def run() -> torch.Tensor:
        if decoded := cache.get_seq_length() - prompt.shape[1]:
            cache.crop(-decoded)
        tokens = [first]
        for _ in range(new):
            logits = model(tokens[-1][:, None], past_key_values=cache).logits
            tokens.append(logits[:, -1].argmax(-1))
        return torch.stack(tokens, dim=1)

    return Prepared(run, lambda tokens: {"tokens": tokens.numpy()})
