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


def real_shape(say: Callable[..., None], quick: bool = False) -> dict[str, Any]:
    """Walk and table mode in bf16; needs about 40 GiB of GPU memory and a minute."""
    shape = SHAPE | ({"num_hidden_layers": 1, "layer_types": ["full_attention"], "vocab_size": 250000} if quick else {})
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        drafter = Drafter(parse_config(shape, "benchmark")).eval().requires_grad_(False)
        embedding = torch.randn(shape["vocab_size"], 5120)
        head = torch.randn(shape["vocab_size"], 5120)
        torch.set_default_dtype(torch.float32)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for prompts, context, new in ((16, 256, 8), (64, 512, 24), (64, 2048, 24), (128, 512, 24)):
        result[f"walk_{prompts}x{context}"] = row = _walk(drafter, embedding, head, prompts, context, new)
        say(f"walk of {prompts} prompts at {context} tokens of context", row)
    result["table_512"] = row = _table(drafter, embedding, head, 512)
    say("table of 448 anchors", row)
    return result


def _items(width: int, prompts: int, context: int, new: int) -> list[tuple[CachedSequence, torch.Tensor]]:
    """Random texts and states on the GPU; random drafts are refused, so every cycle emits one token."""
    taps = torch.randn(context + new, width, device="cuda", dtype=torch.bfloat16)
    made = []
    for number in range(prompts):
        ids = torch.randint(2, 240000, (context + new,), generator=torch.Generator().manual_seed(number)).tolist()
        made.append((CachedSequence(str(number), tuple(ids), context, context + new + 64), taps))
    return made


def _walk(drafter: Drafter, embedding: Any, head: Any, prompts: int, context: int, new: int) -> dict[str, float]:
    items = _items(drafter.fc.in_features, prompts, context, new)
    chain = Verifier.parse("chain")

    def run() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        # Time of the cycles alone: the context is computed before the first one.
        short = [
            (CachedSequence(s.prompt_id, s.token_ids[: s.prompt_length + 2], s.prompt_length, s.cap), t)
            for s, t in items
        ]
        list(walk_together(drafter, iter(short), embedding, head, chain, prompts))
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        start = time.perf_counter()
        list(walk_together(drafter, iter(items), embedding, head, chain, prompts))
        torch.cuda.synchronize()
        return time.perf_counter() - start - first

    run()
    torch.cuda.reset_peak_memory_stats()
    spent = min(run() for _ in range(3))
    cycles = prompts * (new - 2)
    return _limits(drafter, prompts, context, new - 2, spent) | {"cycles_per_s": cycles / spent}


def _table(drafter: Drafter, embedding: Any, head: Any, length: int) -> dict[str, float]:
    ((sequence, taps),) = _items(drafter.fc.in_features, 1, 64, length - 64)
    names = [
        Verifier.parse(n)
        for n in ("chain", "topk-8", *(f"ddtree-{n}" for n in (8, 15, 16, 32, 64, 128, 256, 512, 1024)))
    ]
    spent = {}
    for what, verifiers in (("chain", names[:1]), ("everything", names), ("chain", names[:1]), ("everything", names)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        anchor_table(drafter, sequence, taps, embedding, head, verifiers)
        torch.cuda.synchronize()
        spent[what] = time.perf_counter() - start
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
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
