"""Known bugs of whole models, injected one at a time: in how layers are called, in what is cached, in what is recorded.

As `taugate.numerics.faults`, whose faults lie inside the core and the layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from taugate.target.levels import Batch
from taugate.target.paths import Swap
from taugate.target.random_model import SMALL
from taugate.target.trace import Trace


@dataclass(frozen=True)
class ModelCase:
    """A small random model and what it is run on.

    left_pads: masked tokens before the first of two sequences. decode: so many tokens come one by one at the end, after
    a prefill in two parts.
    """

    name: str
    tokens: int
    sizes: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    left_pads: int = 0
    decode: int = 0

    def batch(self, seed: int) -> Batch:
        """Random token ids, the same everywhere."""
        import torch

        rows = 2 if self.left_pads else 1
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, self.sizes["vocab_size"], (rows, self.tokens), generator=draw)
        if self.left_pads:
            mask = torch.ones_like(ids)
            mask[0, : self.left_pads] = 0
            return Batch((ids * mask).tolist(), mask)
        if self.decode:
            start = self.tokens - self.decode
            return Batch(ids.tolist(), pieces=(start - 9, 9, *(1 for _ in range(self.decode))))
        return Batch(ids.tolist())


@dataclass(frozen=True)
class ModelFault:
    """One bug: name, where it was seen if known, and the precision, level and case in which its check must see it.

    swaps: by name of a function of the modeling module, what is put around it; model: changes the model, not the
    reference; record: changes what is written down of a forward.
    """

    name: str
    seen: str
    dtype: str
    level: str
    case: ModelCase
    swaps: Mapping[str, Swap] = field(default_factory=dict)
    model: Callable[[Any], Any] | None = None
    record: Callable[[Trace], Trace] | None = None


def _tiled_heads(key_heads: int) -> Swap:
    """k heads 0 1 0 1 over the v heads in place of 0 0 1 1. Releases before 5.2x repeat them in the model already."""

    def tiled_rule(rule: Callable[..., Any]) -> Callable[..., Any]:
        def tiled(query: Any, key: Any, value: Any, *args: Any, **given: Any) -> Any:
            step, times = query.shape[2] // key_heads, value.shape[2] // key_heads
            q, k = (heads[:, :, ::step].repeat(1, 1, times, 1) for heads in (query, key))
            return rule(q, k, value, *args, **given)

        return tiled

    return tiled_rule


def _state_not_written(rule: Callable[..., Any]) -> Callable[..., Any]:
    def stale(*args: Any, **given: Any) -> Any:
        out, _state = rule(*args, **given)
        return out, given["initial_state"]

    return stale


def _a_log_rounded(model: Any) -> Any:
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.A_log.data = layer.linear_attn.A_log.data.bfloat16().to(layer.linear_attn.A_log.dtype)
    return model


def _last_tap_normed(found: Trace) -> Trace:
    return replace(found, outputs=(*found.outputs[:-1], found.final_hidden))


PLAIN = ModelCase("66 tokens", 66)
LEFT_PADS = ModelCase("left padding", 40, left_pads=12)
DECODE = ModelCase("decode after a prefill in two parts", 40, decode=8)
GROUPED = ModelCase(
    "2 k heads for 4 v heads", 24, SMALL | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
)
CASES = (PLAIN, LEFT_PADS, DECODE, GROUPED)

FAULTS = (
    ModelFault(
        "tap one layer too early", "vllm #40727, TorchSpec #87", "bf16", "propagated", PLAIN,
        record=lambda found: replace(found, outputs=found.inputs),
    ),
    ModelFault(
        "last layer's tap after the final norm", "sglang #32204, hipfire #258", "bf16", "propagated", PLAIN,
        record=_last_tap_normed,
    ),
    ModelFault(
        "final hidden before the final norm", "NeMo Automodel #3899", "bf16", "propagated", PLAIN,
        record=lambda found: replace(found, final_hidden=found.outputs[-1]),
    ),
    ModelFault(
        "A_log rounded to bfloat16 (model)", "ms-swift #9972, sglang #20741", "fp32", "layer", PLAIN,
        model=_a_log_rounded,
    ),
    ModelFault(
        "left pads not masked (model)", "transformers #46773", "bf16", "layer", LEFT_PADS,
        {"apply_mask_to_padding_states": lambda _: lambda hidden, mask: hidden},
    ),
    ModelFault(
        "state not written in decoding", "vllm #53051", "bf16", "propagated", DECODE,
        {"torch_recurrent_gated_delta_rule": _state_not_written},
    ),
    ModelFault(
        "k heads tiled over v heads, not grouped (model)", "", "bf16", "layer", GROUPED,
        {"torch_chunk_gated_delta_rule": _tiled_heads(GROUPED.sizes["linear_num_key_heads"])},
    ),
)  # fmt: skip
