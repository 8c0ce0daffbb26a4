"""A DFlash drafter checkpoint as published: `config.json` and safetensors, every fact read and none derived."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taugate.errors import CheckpointError
from taugate.files import sha256_files

CONFIG = "config.json"


@dataclass(frozen=True)
class DrafterConfig:
    """What the drafter's own `config.json` says (z-lab layout; nested fields live in `dflash_config`).

    `target_layer_ids` are taps: id L is the raw output of the target's decoder layer L, in the order in which
    the drafter concatenates them. `block_size` counts the anchor, so a block drafts `block_size - 1` tokens.
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
    num_target_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    is_causal: bool | None
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None

    def causal(self, layer: int) -> bool:
        """Whether a block slot sees only slots up to itself: sliding layers do, unless the config says otherwise."""
        return self.layer_types[layer] == "sliding_attention" if self.is_causal is None else self.is_causal

    def window(self, layer: int) -> int | None:
        """Attention window in tokens (query included), or None for a layer that sees the whole context."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None


def read_config(directory: Path) -> DrafterConfig:
    """Read a drafter's config. Raises CheckpointError naming the file and the field that is missing or unusable."""
    path = directory / CONFIG
    if not directory.is_dir():
        raise CheckpointError(f"drafter {directory} does not exist; give a directory with config.json and safetensors")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"drafter {directory} has no config.json, so its taps and block size are unknown") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); copy the checkpoint again") from None
    return parse_config(raw, str(path))


def parse_config(raw: dict[str, Any], where: str) -> DrafterConfig:
    """Turn the dictionary of a `config.json` into a DrafterConfig. `where` names it in errors."""
    nested = raw.get("dflash_config") or {}

    def get(name: str) -> Any:
        return nested[name] if name in nested else raw.get(name)

    def need(name: str, kind: type) -> Any:
        value = get(name)
        if value is None:
            raise CheckpointError(f"{where} does not give {name}; it is never derived, so add it as it was in training")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(f"{where}: {name} is {value!r}, expected {kind.__name__}")
        return value

    layers = need("num_hidden_layers", int)
    heads = need("num_attention_heads", int)
    taps = tuple(need("target_layer_ids", list))
    target_layers = need("num_target_layers", int)
    outside = [tap for tap in taps if not isinstance(tap, int) or not 0 <= tap < target_layers]
    if not taps or outside:
        raise CheckpointError(
            f"{where}: target_layer_ids {list(taps)} must be layer numbers 0…{target_layers - 1} of the target"
        )
    types = tuple(raw.get("layer_types") or ["full_attention"] * layers)
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if len(types) != layers or unknown:
        raise CheckpointError(f"{where}: layer_types {list(types)} must name {layers} full_ or sliding_attention layers")
    window = raw.get("sliding_window")
    if "sliding_attention" in types and not window:
        raise CheckpointError(f"{where}: sliding_attention layers need a sliding_window, which is {window!r}")
    if nested.get("selector_rank") or nested.get("conv_kernel_size"):
        raise CheckpointError(f"{where} describes a DFlash 2 drafter (convolutions and selector), not supported yet")
    if need("block_size", int) < 2:
        raise CheckpointError(f"{where}: block_size {get('block_size')} drafts nothing; it must be at least 2")
    softcap = get("final_logit_softcapping")
    return DrafterConfig(
        hidden_size=need("hidden_size", int),
        intermediate_size=need("intermediate_size", int),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=need("num_key_value_heads", int),
        head_dim=raw.get("head_dim") or need("hidden_size", int) // heads,
        vocab_size=need("vocab_size", int),
        rms_norm_eps=float(need("rms_norm_eps", float)),
        rope_theta=_rope_theta(raw, where),
        block_size=need("block_size", int),
        mask_token_id=need("mask_token_id", int),
        target_layer_ids=taps,
        num_target_layers=target_layers,
        layer_types=types,
        sliding_window=window,
        is_causal=get("is_causal"),
        input_embedding_scale=float(get("input_embedding_scale") or 1.0),
        output_multiplier=float(get("output_multiplier") or 1.0),
        final_logit_softcapping=float(softcap) if softcap else None,
    )


def _rope_theta(raw: dict[str, Any], where: str) -> float:
    """The rotary base in either spelling; a scaled rope is refused rather than silently ignored."""
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    kind = new.get("rope_type") or old.get("rope_type") or old.get("type") or "default"
    if kind != "default":
        raise CheckpointError(f"{where}: rope type {kind!r} is not supported yet; only the default rope is")
    theta = new.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise CheckpointError(f"{where} gives no rope_theta, neither on top nor in rope_parameters")
    return float(theta)


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of the 11·n + 3 tensors that a drafter of n layers holds; embedding and head are the target's."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config.num_layers):
        for name, shape in {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            shapes[f"layers.{index}.{name}.weight"] = shape
    return shapes


def weight_files(directory: Path) -> list[Path]:
    """The safetensors of a checkpoint directory, sorted. Raises CheckpointError when there is none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"drafter {directory} holds no .safetensors file; other weight formats are never opened")
    return files


def identity(directory: Path) -> str:
    """Content hash of config and weights: what a verdict is about, whatever the directory is called."""
    return sha256_files([directory / CONFIG, *weight_files(directory)], directory)
