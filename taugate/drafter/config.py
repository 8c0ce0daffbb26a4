"""What a drafter's `config.json` says, in any of the layouts in which DFlash drafters are published.

z-lab: decoder fields on top, DFlash fields on top or in `dflash_config`; DFlash 2 adds convolutions and a
selector. speculators: decoder fields in `transformer_layer_config`, taps numbered from 1, heads in the
checkpoint. Every fact is read and none derived: taps and rope that are merely plausible load silently and
cost acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from taugate.drafter.fields import Fields
from taugate.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "yarn", "llama3")


@dataclass(frozen=True)
class Dflash2:
    """Extra parts of a DFlash 2 drafter: grouped dynamic convolutions, and a selector among each slot's
    candidates.
    """

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int


@dataclass(frozen=True)
class DrafterConfig:
    """What the drafter's own `config.json` says.

    `target_layer_ids` are taps: id L is the raw output of the target's decoder layer L, in the order in which
    the drafter concatenates them. `block_size` counts the anchor, so a block drafts `block_size - 1` tokens.
    num_target_layers: None in the speculators layout, which does not say. draft_vocab_size: None when the
    drafter speaks the target's whole vocabulary through the target's own head.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    layer_types: tuple[str, ...]
    sliding_window: int | None
    is_causal: bool | None
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    max_position_embeddings: int | None = None
    rope: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "z-lab"
    draft_vocab_size: int | None = None
    dflash2: Dflash2 | None = None

    def causal(self, layer: int) -> bool:
        """Whether a block slot sees only slots up to itself: sliding layers do, unless the config says
        otherwise.
        """
        return self.layer_types[layer] == "sliding_attention" if self.is_causal is None else self.is_causal

    def window(self, layer: int) -> int | None:
        """Attention window in tokens (query included), or None for a layer that sees the whole context."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None


def parse_config(raw: Mapping[str, Any], where: str) -> DrafterConfig:
    """Turn the dictionary of a `config.json` into a DrafterConfig.

    `where` names it in errors (CheckpointError).
    """
    kind = raw.get("speculators_model_type")
    if kind is None:
        nested = raw.get("dflash_config") or {}
        fields = Fields([nested, raw], where)
        taps, layout, draft_vocab, causal = (
            _taps(fields, "target_layer_ids", 0),
            "z-lab",
            None,
            fields.check("is_causal", bool),
        )
        target_layers = fields.need("num_target_layers")
        if max(taps) >= target_layers:
            raise _taps_error(fields, "target_layer_ids", f"layer numbers 0…{target_layers - 1} of the target")
    else:
        fields = Fields([raw, raw.get("transformer_layer_config") or {}], where)
        if kind != "dflash":
            raise fields.fail("speculators_model_type", "'dflash'")
        for name, usual in (
            ("projector_type", "dflash"),
            ("shift_label", False),
            ("sample_from_anchor", False),
        ):
            if fields.get(name) not in (None, usual):
                raise fields.fail(name, f"{usual!r}: other drafters are not supported")
        taps, layout, target_layers = _taps(fields, "aux_hidden_state_layer_ids", 1), "speculators", None
        draft_vocab = fields.check("draft_vocab_size", int)
        if draft_vocab == fields.need("vocab_size"):
            draft_vocab = None
        causal = False if fields.check("sliding_window_non_causal", bool) else None
    layers, heads, hidden = (
        fields.need("num_hidden_layers"),
        fields.need("num_attention_heads"),
        fields.need("hidden_size"),
    )
    if heads % fields.need("num_key_value_heads"):
        raise fields.fail("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    types, window = _attention(fields, layers)
    if fields.need("block_size") < 2:
        raise fields.fail("block_size", "at least 2: the anchor and one drafted token")
    if fields.need("mask_token_id") >= fields.need("vocab_size"):
        raise fields.fail("mask_token_id", f"a token below vocab_size, {fields.get('vocab_size')}")
    rope = _rope(fields)
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=fields.need("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.need("num_key_value_heads"),
        head_dim=fields.check("head_dim", int) or hidden // heads,
        vocab_size=fields.need("vocab_size"),
        rms_norm_eps=float(fields.need("rms_norm_eps", float)),
        rope_theta=rope["rope_theta"],
        block_size=fields.need("block_size"),
        mask_token_id=fields.need("mask_token_id"),
        target_layer_ids=taps,
        num_target_layers=target_layers,
        layer_types=types,
        sliding_window=window,
        is_causal=causal,
        input_embedding_scale=float(fields.check("input_embedding_scale", float) or 1.0),
        output_multiplier=float(fields.check("output_multiplier", float) or 1.0),
        final_logit_softcapping=fields.check("final_logit_softcapping", float)
        if fields.get("final_logit_softcapping")
        else None,
        max_position_embeddings=fields.check("max_position_embeddings", int),
        rope=rope,
        layout=layout,
        draft_vocab_size=draft_vocab,
        dflash2=_dflash2(fields, hidden),
    )


def _taps_error(fields: Fields, name: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{fields.where}: {name} {fields.get(name)} must be {expected}")


def _taps(fields: Fields, name: str, first: int) -> tuple[int, ...]:
    """Taps as 0-based decoder layers; `first` is the number that this layout gives to the output of layer
    0.
    """
    taps = fields.need(name, list)
    if not taps or any(not isinstance(tap, int) or isinstance(tap, bool) or tap < first for tap in taps):
        raise _taps_error(fields, name, f"a list of layer numbers from {first} on")
    if len(set(taps)) < len(taps):
        raise _taps_error(fields, name, "different layers")
    return tuple(tap - first for tap in taps)


def _attention(fields: Fields, layers: int) -> tuple[tuple[str, ...], int | None]:
    types, window, used = (
        fields.get("layer_types"),
        fields.check("sliding_window", int),
        fields.get("use_sliding_window"),
    )
    if types is None:
        if used:
            raise CheckpointError(
                f"{fields.where} uses a sliding window and does not give layer_types, so which layers slide is unknown"
            )
        types = ["full_attention"] * layers
    if not isinstance(types, list) or len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"{fields.where}: layer_types {types} must name {layers} full_ or sliding_attention layers"
        )
    if "sliding_attention" in types and (window is None or used is False):
        raise CheckpointError(
            f"{fields.where}: sliding_attention layers need a sliding_window, found {window!r} with"
            f" use_sliding_window {used!r}"
        )
    return tuple(types), window if "sliding_attention" in types else None


def _rope(fields: Fields) -> dict[str, Any]:
    """Rotary parameters in one spelling from either: `rope_parameters`, or `rope_theta` with
    `rope_scaling`.
    """
    new, old = fields.check("rope_parameters", dict) or {}, fields.check("rope_scaling", dict) or {}
    rope = {**old, **new}
    rope["rope_type"] = rope.pop("rope_type", None) or old.get("type") or "default"
    rope.pop("type", None)
    rope.setdefault("rope_theta", fields.get("rope_theta"))
    if rope["rope_theta"] is None:
        raise CheckpointError(f"{fields.where} gives no rope_theta, neither on top nor in rope_parameters")
    if not isinstance(rope["rope_theta"], (int, float)) or rope["rope_theta"] <= 0:
        raise CheckpointError(f"{fields.where}: rope_theta is {rope['rope_theta']!r}, expected a positive number")
    if rope["rope_type"] not in ROPE_TYPES:
        raise CheckpointError(
            f"{fields.where}: rope type {rope['rope_type']!r} is not supported, expected one of {', '.join(ROPE_TYPES)}"
        )
    needed = {"default": (), "linear": ("factor",), "yarn": ("factor", "original_max_position_embeddings")}
    for name in needed.get(
        rope["rope_type"],
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ):
        if not isinstance(rope.get(name), (int, float)):
            raise CheckpointError(
                f"{fields.where}: rope type {rope['rope_type']!r} needs {name}, found {rope.get(name)!r}"
            )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"{fields.where}: partial_rotary_factor is {rope['partial_rotary_factor']}, expected 1: a"
            " drafter rotates whole heads"
        )
    return {**rope, "rope_theta": float(rope["rope_theta"])}


def _dflash2(fields: Fields, hidden: int) -> Dflash2 | None:
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    if all(fields.get(name) is None for name in names):
        return None
    parts = Dflash2(*(fields.need(name) for name in names))
    if hidden % parts.conv_group_size:
        raise fields.fail("conv_group_size", f"a divisor of hidden_size, {hidden}")
    return parts
