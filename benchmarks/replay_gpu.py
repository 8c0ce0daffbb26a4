"""The replay on a GPU with a drafter of the real Qwen3.6-27B-DFlash shape: cycles per second against the hardware."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from taugate.drafter.config import parse_config
from taugate.drafter.model import Drafter
from taugate.drafter.replay import CachedSequence, Verifier, anchor_table, blocks_together, walk_together

SHAPE = {
    "block_size": 16, "num_target_layers": 64, "mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61],
    "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048, "use_sliding_window": True, "rms_norm_eps": 1e-6, "rope_theta": 10000000,
    "vocab_size": 248320,
}  # fmt: skip
SMALL = SHAPE | {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 2000, "mask_token_id": 7,
}  # fmt: skip
PEAK_FLOPS, PEAK_BYTES = 989e12, 4.8e12  # H200 SXM, dense bf16 and HBM3e, from its data sheet
ANCHORS = 64  # drafted at once in table mode
BUDGETS = (8, 15, 16, 32, 64, 128, 256, 512, 1024)
EVERYTHING = [Verifier.parse(name) for name in ("chain", "topk-8", *(f"ddtree-{n}" for n in BUDGETS))]


def real_shape(say: Callable[..., None], device: str, quick: bool = False) -> dict[str, Any]:
    """Walk and table mode in bf16; needs about 60 GiB of GPU memory and a minute. quick: does it run at all?"""
    shape = SMALL if quick else SHAPE
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)  # bf16 on a CPU is emulated, slowly
    with torch.device(device):
        drafter = Drafter(parse_config(shape, "benchmark")).eval().requires_grad_(False)
        embedding = torch.randn(shape["vocab_size"], shape["hidden_size"])
        # Logits with a deviation of 4: the best of so many tokens has half the probability or a tenth, as text has it.
        head = torch.randn(shape["vocab_size"], shape["hidden_size"]) * (4 / shape["hidden_size"] ** 0.5)
    torch.set_default_dtype(torch.float32)
    name = torch.cuda.get_device_name() if device == "cuda" else device
    peaks = _measured_peaks() if device == "cuda" else (PEAK_FLOPS, PEAK_BYTES)
    result: dict[str, Any] = {"device": name, "torch": torch.__version__}
    result |= {"measured_tflops": peaks[0] / 1e12, "measured_tb_per_s": peaks[1] / 1e12}
    rows = ((2, 40, 6),) if quick else ((16, 256, 24), (64, 512, 24), (64, 2048, 24), (128, 512, 24), (32, 8192, 16))
    for prompts, context, new in rows:
        result[f"walk_{prompts}x{context}"] = row = _walk(drafter, embedding, head, prompts, context, new, peaks)
        say(f"walk of {prompts} prompts at {context} tokens of context", row)
    result["table"] = row = _table(drafter, embedding, head, 128 if quick else 576, peaks)
    say("table", row)
    return result


def _now(like: Any) -> float:
    if like.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _measured_peaks() -> tuple[float, float]:
    """What this GPU really does: flop/s of a large bf16 product, bytes/s of a large copy."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.empty(2**31, dtype=torch.uint8, device="cuda")

    def best(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(8):
            start = _now(a)
            for _ in range(10):
                work()
            times.append((_now(a) - start) / 10)
        return min(times)

    return 2 * 8192**3 / best(lambda: a @ a), 2**31 / best(lambda: b[: 2**30].copy_(b[2**30 :]))


def _items(embedding: Any, width: int, prompts: int, context: int, new: int) -> list[tuple[CachedSequence, Any]]:
    """Random texts and states on the device; random drafts are refused, so every cycle emits one token."""
    taps = torch.randn(context + new, width, device=embedding.device, dtype=embedding.dtype)
    made = []
    for number in range(prompts):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(2, len(embedding), (context + new,), generator=generator).tolist()
        made.append((CachedSequence(str(number), tuple(ids), context, context + new + 64), taps))
    return made


def _walk(
    drafter: Drafter, embedding: Any, head: Any, prompts: int, context: int, new: int, peaks: tuple[float, float]
) -> dict[str, float]:
    items = _items(embedding, drafter.fc.in_features, prompts, context, new)
    # The context is computed before the first cycle: what a walk of two tokens takes is not part of the cycles' time.
    short = [(CachedSequence(s.prompt_id, s.token_ids[: context + 2], context, s.cap), taps) for s, taps in items]
    chain = Verifier.parse("chain")

    def run() -> tuple[float, float]:
        start = _now(embedding)
        list(walk_together(drafter, iter(short), embedding, head, chain, prompts))
        middle = _now(embedding)
        list(walk_together(drafter, iter(items), embedding, head, chain, prompts))
        return middle - start, _now(embedding) - middle

    run()
    if embedding.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    times = [run() for _ in range(3)]
    before, whole = (min(column) for column in zip(*times, strict=True))
    steps, spent = new - 2, whole - before
    row = {"cycles_per_s": prompts * steps / spent, "step_ms": 1e3 * spent / steps, "context_ms": 1e3 * before}
    return row | _limits(drafter, prompts, context, spent / steps, peaks)


def _limits(drafter: Drafter, prompts: int, context: int, step: float, peaks: tuple[float, float]) -> dict[str, float]:
    """What the hardware would need for such a step (all blocks through all layers and the head): arithmetic at peak,
    or every weight, key and value read once.
    """
    config = drafter.config
    body = sum(p.numel() for layer in drafter.layers for p in layer.parameters())
    head, block = config.vocab_size * config.hidden_size, config.block_size
    seen = sum(min(context, config.window(n) or context) + block for n in range(config.num_layers))
    attention = 2 * block * seen * config.num_heads * config.head_dim  # multiply-adds
    flops = 2 * prompts * (block * body + (block - 1) * head + attention)
    keys = prompts * seen * 2 * config.num_kv_heads * config.head_dim
    moved = 2 * (body + head + keys + prompts * block * config.hidden_size)
    data_sheet, measured = (max(flops / f, moved / b) for f, b in ((PEAK_FLOPS, PEAK_BYTES), peaks))
    return {
        "binds": "compute" if flops / PEAK_FLOPS > moved / PEAK_BYTES else "memory",
        "tflops": flops / step / 1e12,
        "tb_per_s": moved / step / 1e12,
        "times_the_binding_limit": step / data_sheet,
        "times_the_measured_limit": step / measured,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0,
    }


def _table(drafter: Drafter, embedding: Any, head: Any, length: int, peaks: tuple[float, float]) -> dict[str, float]:
    ((sequence, taps),) = _items(embedding, drafter.fc.in_features, 1, 64, length - 64)
    sequence = _accepted_text(drafter, sequence, taps, embedding, head)
    anchors = len(sequence.anchors())

    def run(what: str) -> float:
        start = _now(embedding)
        if what == "forwards":
            forwards(drafter, sequence, taps, embedding, head, ANCHORS)
        else:
            verifiers = EVERYTHING[:1] if what == "chain" else EVERYTHING
            anchor_table(drafter, sequence, taps, embedding, head, verifiers, ANCHORS, predict=what == "predict")
        return _now(embedding) - start

    names = ("forwards", "chain", "everything", "predict")
    spent = {what: min(run(what) for _ in range(4)) for what in names}
    row = {f"{what}_s": spent[what] for what in names}
    limit = _limits(drafter, anchors, length // 2, spent["everything"], peaks)
    return row | {
        "anchors": anchors,
        "anchors_per_s": anchors / spent["everything"],
        "table_over_forwards": spent["everything"] / spent["forwards"],
        "forwards_times_the_binding_limit": limit["times_the_binding_limit"] * spent["forwards"] / spent["everything"],
    }


def forwards(drafter: Drafter, sequence: CachedSequence, taps: Any, embedding: Any, head: Any, batch: int) -> None:
    """What table mode drafts, and nothing else: context, blocks and logits at every anchor."""
    with torch.inference_mode():
        context, everywhere = drafter.context(taps[None], blocks_together(taps, batch)), sequence.anchors()
        ids = torch.tensor(sequence.token_ids, device=embedding.device)
        for first in range(0, len(everywhere), batch):
            some = everywhere[first : first + batch]
            anchors = torch.arange(some.start, some.stop, device=embedding.device)[None]
            sizes = torch.full_like(anchors, drafter.config.block_size)
            hidden = drafter(context, ids[anchors], anchors, sizes, embedding, (some[0], some[-1]))
            drafter.logits(hidden[0, :, 1:], head)


@torch.inference_mode()
def _accepted_text(drafter: Drafter, like: CachedSequence, taps: Any, embedding: Any, head: Any) -> CachedSequence:
    """A text of which the drafter guesses runs of every length, so that no verifier is spared its work."""
    generator, tokens = torch.Generator().manual_seed(0), list(like.token_ids[: like.prompt_length + 1])
    context, block = drafter.context(taps[None]), drafter.config.block_size
    while len(tokens) < len(like.token_ids):
        anchor = len(tokens) - 1
        where = torch.tensor([[anchor]], device=embedding.device)
        known = torch.tensor([[tokens[anchor]]], device=embedding.device)
        hidden = drafter(context, known, where, torch.full_like(where, block), embedding, (anchor, anchor))
        chosen = torch.multinomial(drafter.logits(hidden[0, 0, 1:], head).float().softmax(-1), 1)[:, 0].tolist()
        guessed = drafter.logits(hidden[0, 0, 1:], head).argmax(-1).tolist()
        run = int(torch.randint(0, block, (1,), generator=generator))
        tokens += [*guessed[:run], *chosen[run : run + 1]]
    tokens = tokens[: len(like.token_ids)]
    return CachedSequence(like.prompt_id, tuple(tokens), like.prompt_length, like.cap)
