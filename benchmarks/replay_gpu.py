"""The replay on a GPU with a drafter of the real Qwen3.6-27B-DFlash shape: cycles per second against the
hardware.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from taugate.drafter.config import parse_config
from taugate.drafter.model import Drafter
from taugate.drafter.replay import CachedSequence, Verifier, anchor_table, walk_together

SHAPE = {
    "block_size": 16, "num_target_layers": 64, "mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61],
    "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048, "use_sliding_window": True, "rms_norm_eps": 1e-6, "rope_theta": 10000000,
    "vocab_size": 248320,
}  # fmt: skip
PEAK_FLOPS, PEAK_BYTES = 989e12, 4.8e12  # H200 SXM, dense bf16 and HBM3e, from its data sheet


SMALL = SHAPE | {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 2000, "mask_token_id": 7,
}  # fmt: skip


def real_shape(say: Callable[..., None], device: str, quick: bool = False) -> dict[str, Any]:
    """Walk and table mode in bf16; needs about 40 GiB of GPU memory and two minutes. quick: does it run at all?"""
    shape = SMALL if quick else SHAPE
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)  # bf16 on a CPU is emulated, slowly
    with torch.device(device):
        drafter = Drafter(parse_config(shape, "benchmark")).eval().requires_grad_(False)
        embedding = torch.randn(shape["vocab_size"], shape["hidden_size"])
        head = torch.randn(shape["vocab_size"], shape["hidden_size"])
    torch.set_default_dtype(torch.float32)
    name = torch.cuda.get_device_name() if device == "cuda" else device
    result: dict[str, Any] = {"device": name, "torch": torch.__version__}
    for prompts, context, new in (
        ((2, 40, 6),) if quick else ((16, 256, 8), (64, 512, 24), (64, 2048, 24), (128, 512, 24))
    ):
        result[f"walk_{prompts}x{context}"] = row = _walk(drafter, embedding, head, prompts, context, new)
        say(f"walk of {prompts} prompts at {context} tokens of context", row)
    result["table"] = row = _table(drafter, embedding, head, 128 if quick else 512)
    say("table", row)
    return result


def _now(like: Any) -> float:
    if like.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _items(embedding: Any, width: int, prompts: int, context: int, new: int) -> list[tuple[CachedSequence, Any]]:
    """Random texts and states on the device; random drafts are refused, so every cycle emits one token."""
    taps = torch.randn(context + new, width, device=embedding.device, dtype=embedding.dtype)
    made = []
    for number in range(prompts):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(2, len(embedding), (context + new,), generator=generator).tolist()
        made.append((CachedSequence(str(number), tuple(ids), context, context + new + 64), taps))
    return made


def _walk(drafter: Drafter, embedding: Any, head: Any, prompts: int, context: int, new: int) -> dict[str, float]:
    items = _items(embedding, drafter.fc.in_features, prompts, context, new)
    # The context is computed before the first cycle: what a walk of two tokens takes is not part of the cycles' time.
    short = [(CachedSequence(s.prompt_id, s.token_ids[: context + 2], context, s.cap), taps) for s, taps in items]
    chain = Verifier.parse("chain")

    def run() -> float:
        start = _now(embedding)
        list(walk_together(drafter, iter(short), embedding, head, chain, prompts))
        middle = _now(embedding)
        list(walk_together(drafter, iter(items), embedding, head, chain, prompts))
        return _now(embedding) - middle - (middle - start)

    run()
    spent = min(run() for _ in range(3))
    steps = new - 2
    return {"cycles_per_s": prompts * steps / spent} | _limits(drafter, prompts, context, steps, spent)


def _table(drafter: Drafter, embedding: Any, head: Any, length: int) -> dict[str, float]:
    ((sequence, taps),) = _items(embedding, drafter.fc.in_features, 1, 64, length - 64)
    everything = [
        Verifier.parse(n) for n in ("chain", "topk-8", *(f"ddtree-{2**n}" for n in range(3, 11)), "ddtree-15")
    ]
    spent = {}
    for what, verifiers in (("chain", everything[:1]), ("everything", everything)) * 2:
        start = _now(embedding)
        anchor_table(drafter, sequence, taps, embedding, head, verifiers)
        spent[what] = _now(embedding) - start
    anchors = len(sequence.anchors())
    return {
        "anchors_per_s": anchors / spent["everything"],
        "everything_over_chain": spent["everything"] / spent["chain"],
    }


def _limits(drafter: Drafter, prompts: int, context: int, steps: int, spent: float) -> dict[str, float]:
    """What the hardware would need for these steps: arithmetic at peak, or every weight, key and value read
    once a step.
    """
    config = drafter.config
    body = sum(p.numel() for layer in drafter.layers for p in layer.parameters())
    head = config.vocab_size * config.hidden_size
    block = config.block_size
    attention = 2 * block * context * config.num_heads * config.head_dim * config.num_layers  # multiply-adds
    flops = 2 * prompts * (block * body + (block - 1) * head + attention)
    keys = prompts * context * config.num_layers * 2 * config.num_kv_heads * config.head_dim
    moved = 2 * (body + head + keys)
    compute, memory = steps * flops / PEAK_FLOPS, steps * moved / PEAK_BYTES
    return {
        "step_ms": 1e3 * spent / steps,
        "compute_limit_ms": 1e3 * compute / steps,
        "memory_limit_ms": 1e3 * memory / steps,
        "times_the_binding_limit": spent / max(compute, memory),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0,
    }
