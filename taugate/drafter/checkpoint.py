"""A DFlash drafter checkpoint on disk: `config.json` and safetensors, checked tensor by tensor.

No code is ever run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from taugate.drafter.config import Dflash2, DrafterConfig, parse_config
from taugate.errors import CheckpointError
from taugate.files import sha256_files

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Dflash2", "DrafterConfig", "expected_shapes", "identity", "parse_config", "read_config", "read_tensors"]

CONFIG = "config.json"
# Copies of the target's own tensors that the speculators layout may hold; the target's are used.
_TARGETS_OWN = {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d"}
_SELECTOR = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def read_config(directory: Path) -> DrafterConfig:
    """Read a drafter's config.

    Raises CheckpointError naming the file and the field that is missing or unusable.
    """
    path = directory / CONFIG
    if not directory.is_dir():
        raise CheckpointError(f"drafter {directory} does not exist; give a directory with config.json and safetensors")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"drafter {directory} has no config.json, so its taps and block size are unknown"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); copy the checkpoint again") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__}, expected an object; copy the checkpoint again")
    return parse_config(raw, str(path))


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a drafter of this config holds: 11·n + 3 for n layers, more for DFlash
    2.

    Embedding and head are the target's, except the head of a pruned draft vocabulary.
    """
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
        if parts := config.dflash2:
            for name in ("attention_conv", "mlp_conv"):
                rows = 2 * parts.conv_kernel_size * (hidden // parts.conv_group_size)
                shapes[f"layers.{index}.{name}.base_kernel"] = (2, parts.conv_kernel_size, hidden)
                shapes[f"layers.{index}.{name}.kernel_projection.weight"] = (rows, hidden)
    if parts := config.dflash2:
        shapes |= {f"{name}.weight": (config.vocab_size, parts.selector_rank) for name in _SELECTOR}
        shapes["candidate_selector.hidden_projection.weight"] = (parts.selector_rank, hidden)
    if config.draft_vocab_size:
        shapes |= {"lm_head.weight": (config.draft_vocab_size, hidden), "d2t": (config.draft_vocab_size,)}
    return shapes


def weight_files(directory: Path) -> list[Path]:
    """The safetensors of a checkpoint directory, sorted. Raises CheckpointError when there is none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"drafter {directory} holds no .safetensors file; other weight formats are never opened")
    return files


def read_tensors(directory: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """All tensors of a drafter.

    Raises CheckpointError for missing, extra, misshapen or non-finite ones, by name.
    """
    from safetensors import SafetensorError, safe_open

    expected, found = expected_shapes(config), {}
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as stream:
                found.update({_name(name): stream.get_tensor(name) for name in stream.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors ({error}); copy the checkpoint again"
            ) from None
    if config.layout == "speculators":
        spare = _TARGETS_OWN if config.draft_vocab_size else {*_TARGETS_OWN, "lm_head.weight", "d2t"}
        found = {name: tensor for name, tensor in found.items() if name not in spare}
    for name in sorted(expected.keys() - found.keys()):
        raise CheckpointError(f"drafter {directory} lacks tensor {name}, expected with shape {list(expected[name])}")
    for name in sorted(found.keys() - expected.keys()):
        raise CheckpointError(f"drafter {directory} holds tensor {name}, which no part of a DFlash drafter takes")
    for name, shape in expected.items():
        tensor = found[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"drafter {directory}: tensor {name} has shape {list(tensor.shape)}, its config expects {list(shape)}"
            )
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"drafter {directory}: tensor {name} holds numbers that are not finite; copy the checkpoint again"
            )
    return found


def _name(name: str) -> str:
    """The selector's codebooks are published without the suffix that their module gives them."""
    return f"{name}.weight" if name in _SELECTOR else name


def identity(directory: Path) -> str:
    """Content hash of config and weights: what a verdict is about, whatever the directory is called."""
    return sha256_files([directory / CONFIG, *weight_files(directory)], directory)
