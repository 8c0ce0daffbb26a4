"""The parts of a decoder layer in float64: norms, rotary embedding, gated attention, MLP. Gated DeltaNet itself is
`taugate.numerics.reference.gdn_layer`.

transformers casts to float32 inside norms, rotary embedding, softmax, gate and delta rule whatever the model's dtype,
so `model.double()` is a float32 model. These functions follow the published definitions, take every number as the
checkpoint has it and never leave float64. Tensors are [B, T, …]; weights come by their names inside the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taugate.errors import CheckpointError
from taugate.numerics.reference import GdnShape

if TYPE_CHECKING:
    from torch import Tensor

_QUERIES_AT_ONCE = 256  # bounds the score matrix: [heads, 256, T] float64
LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class Shape:
    """What a config says about the computation. `hybrid`: Qwen3.5 conventions (norms scale by 1 + w, attention has an
    output gate, `kinds` may name Gated DeltaNet layers); else those of Qwen3.
    """

    hybrid: bool
    kinds: tuple[str, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    theta: float
    eps: float
    gdn: GdnShape | None = None
    tied: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Shape:
        """From a config.json (its `text_config` if there is one). Raises CheckpointError for what is not known here."""
        text = config.get("text_config") or config
        model_type, count = text.get("model_type", ""), int(text["num_hidden_layers"])
        if model_type not in ("qwen3", "qwen3_5_text"):
            raise CheckpointError(f"the float64 reference knows qwen3 and qwen3_5_text, not {model_type!r}")
        hybrid = model_type == "qwen3_5_text"
        rope = text.get("rope_parameters") or {}
        if (rope.get("rope_type") or "default") != "default" or text.get("rope_scaling"):
            raise CheckpointError("the float64 reference knows the plain rotary embedding only, not a scaled one")
        kinds = tuple(text.get("layer_types") or [FULL] * count)
        if set(kinds) - {LINEAR, FULL} or text.get("attention_bias") or text.get("hidden_act", "silu") != "silu":
            raise CheckpointError("the float64 reference knows no sliding windows, no attention biases and silu only")
        head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        partial = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
        return cls(
            hybrid=hybrid,
            kinds=kinds,
            hidden=text["hidden_size"],
            heads=text["num_attention_heads"],
            kv_heads=text["num_key_value_heads"],
            head_dim=head_dim,
            rotary_dim=int(head_dim * partial),
            theta=float(rope.get("rope_theta", text.get("rope_theta", 10000.0))),
            eps=float(text["rms_norm_eps"]),
            gdn=_gdn(text) if LINEAR in kinds else None,
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        )


def _gdn(text: Mapping[str, Any]) -> GdnShape:
    return GdnShape(
        key_heads=text["linear_num_key_heads"],
        value_heads=text["linear_num_value_heads"],
        key_dim=text["linear_key_head_dim"],
        value_dim=text["linear_value_head_dim"],
        norm_eps=float(text["rms_norm_eps"]),
    )


def rms_norm(x: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    """x / √(mean x² + ε), scaled by 1 + w (Qwen3.5) or w (Qwen3)."""
    scale = 1 + weight if shape.hybrid else weight
    return x / ((x * x).mean(-1, keepdim=True) + shape.eps).sqrt() * scale


def mlp(x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    """down(silu(gate(x)) · up(x))."""
    return _linear(_silu(_linear(x, w["gate_proj.weight"])) * _linear(x, w["up_proj.weight"]), w["down_proj.weight"])


def attention(x: Tensor, w: Mapping[str, Tensor], shape: Shape, mask: Tensor | None) -> Tensor:
    """Causal grouped-query attention with normed queries and keys; in Qwen3.5 also with a sigmoid output gate.

    x: [B, T, H]; mask: [B, T] bool, False at pads, which nobody but themselves attends to.
    """
    import torch

    batch, length, _ = x.shape
    query = _linear(x, w["q_proj.weight"]).view(batch, length, shape.heads, -1)
    gate = None
    if shape.hybrid:  # each head's rows are its query and then its gate
        query, gate = query.chunk(2, dim=-1)
    key = _linear(x, w["k_proj.weight"]).view(batch, length, shape.kv_heads, -1)
    value = _linear(x, w["v_proj.weight"]).view(batch, length, shape.kv_heads, -1)
    query = _rotate(rms_norm(query, w["q_norm.weight"], shape), shape).transpose(1, 2)
    key = _rotate(rms_norm(key, w["k_norm.weight"], shape), shape).transpose(1, 2)
    groups = shape.heads // shape.kv_heads
    key, value = key.repeat_interleave(groups, 1), value.transpose(1, 2).repeat_interleave(groups, 1)
    places, parts = torch.arange(length, device=x.device), []
    for first in range(0, length, _QUERIES_AT_ONCE):
        rows = places[first : first + _QUERIES_AT_ONCE, None]
        allowed = (places[None] <= rows)[None]
        if mask is not None:
            allowed = allowed & mask[:, None] | (places[None] == rows)
        scores = query[:, :, first : first + _QUERIES_AT_ONCE] @ key.transpose(-1, -2) * shape.head_dim**-0.5
        parts.append(scores.masked_fill(~allowed[:, None], float("-inf")).softmax(-1) @ value)
    out = torch.cat(parts, 2).transpose(1, 2)
    if gate is not None:
        out = out * gate.sigmoid()
    return _linear(out.reshape(batch, length, -1), w["o_proj.weight"])


def _rotate(x: Tensor, shape: Shape) -> Tensor:
    """Rotary embedding of the first `rotary_dim` channels, halves paired; x: [B, T, heads, head_dim].

    Text has one position per token, so that the three sections of a multimodal embedding coincide.
    """
    import torch

    half = shape.rotary_dim // 2
    options = {"dtype": torch.float64, "device": x.device}
    frequency = shape.theta ** (-torch.arange(half, **options) / half)
    angle = (torch.arange(x.shape[1], **options)[:, None] * frequency)[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


def _silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()
