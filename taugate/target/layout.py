"""Which stored tensor each module of the text model takes: the map that both capture engines load by.

Checked whole against the model's own parameters, built on the meta device: no weight is read and no GPU is touched.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taugate.errors import CheckpointError
from taugate.target.checkpoint import read_config, text_config
from taugate.target.shards import INDEX, SINGLE, Stored, read_tensors

# Not part of the text model: vision tower, multi-token prediction, and the frequencies that old checkpoints stored.
_SKIPPED = re.compile(r"(?:model\.)?(?:visual|vision_tower)\.|mtp\.|.*\.rotary_emb\.inv_freq$")
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_EXPERT = re.compile(r"(?P<mlp>.+\.mlp\.experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")
# Trainers and engines keep these in fp32; rounding them to bf16 is a known cause of drift (numerics of A_log = log of
# the decay rate, and of the norm before the gate).
_FP32 = re.compile(r".*linear_attn\.(?:A_log|norm\.weight)")
_READABLE = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Layout:
    """The tensors of a text model by the keys of its state dict: "embed_tokens.weight", "layers.0.…", "norm.weight".

    head: the output head as stored; None where config.json ties it to the embedding and it is not stored.
    """

    directory: Path
    tensors: Mapping[str, Stored]
    head: Stored | None

    def layer_tensors(self, layer: int) -> dict[str, Stored]:
        """The tensors of decoder layer `layer`, by their keys inside that layer ("mlp.up_proj.weight", …)."""
        prefix = f"layers.{layer}."
        return {key.removeprefix(prefix): t for key, t in self.tensors.items() if key.startswith(prefix)}

    def outer_tensors(self) -> dict[str, Stored]:
        """What is not in a decoder layer: embedding and final norm."""
        return {key: tensor for key, tensor in self.tensors.items() if not key.startswith("layers.")}

    @property
    def fp32_keys(self) -> frozenset[str]:
        """Keys that stay in fp32 whatever the precision of the forward: A_log and the gated norm, where stored so."""
        return frozenset(key for key, tensor in self.tensors.items() if tensor.dtype == "F32" and _FP32.fullmatch(key))


def open_layout(directory: Path) -> Layout:
    """Map the checkpoint in `directory` and check it against the model that its config.json describes.

    Imports torch and transformers (seconds), and needs no GPU. Raises CheckpointError naming file and key: a shard that
    is missing or cut short, a key that no module takes, a module's key that is missing, a wrong shape or dtype.
    """
    config = read_config(directory)
    tensors, head = _mapped(directory, read_tensors(directory))
    shapes = _expected(directory, config)
    for key, tensor in tensors.items():
        if key not in shapes:
            raise CheckpointError(
                f"{tensor.where} belongs to no module of a {text_config(config)['model_type']} with the sizes of "
                "config.json; copy the checkpoint again, or correct its config.json"
            )
        _check(key, tensor, shapes[key])
    for key in shapes:
        if key not in tensors:
            raise CheckpointError(f"{_listing(directory)} lacks {key} of the model; copy the checkpoint again")
    if head is not None:
        _check("lm_head.weight", head, shapes["embed_tokens.weight"])
    elif not config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings", False)):
        raise CheckpointError(
            f"{_listing(directory)} lacks lm_head.weight, and config.json does not tie it to the embedding"
        )
    return Layout(directory, tensors, head)


def _mapped(directory: Path, stored: Mapping[str, Stored]) -> tuple[dict[str, Stored], Stored | None]:
    """Stored tensors by module key, and the head. Experts stored one by one become one tensor each."""
    tensors: dict[str, Stored] = {}
    experts: dict[str, dict[tuple[int, str], Stored]] = defaultdict(dict)
    head = stored.get("lm_head.weight")
    for name, tensor in stored.items():
        if _SKIPPED.match(name) or tensor is head:
            continue
        key = next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)
        if match := _EXPERT.fullmatch(key):
            experts[match["mlp"]][int(match["number"]), match["part"]] = tensor
        elif key in tensors:
            raise CheckpointError(f"{tensor.where} and {tensors[key].where} are both for {key} of the model")
        else:
            tensors[key] = tensor
    for key, parts in experts.items():
        tensors |= _joined_experts(directory, key, parts)
    return tensors, head


def _joined_experts(directory: Path, key: str, parts: dict[tuple[int, str], Stored]) -> dict[str, Stored]:
    """transformers holds experts as gate_up_proj [E, 2·I, H] and down_proj [E, H, I]: in memory, the rows of gate_proj
    and of up_proj of expert 0, then of expert 1, …
    """
    count = 1 + max(number for number, _ in parts)
    for number in range(count):
        for part in ("gate_proj", "up_proj", "down_proj"):
            if (number, part) not in parts:
                raise CheckpointError(f"{_listing(directory)} lacks {key}.{number}.{part}.weight of the model")
            first = parts[0, part]
            if (parts[number, part].shape, parts[number, part].dtype) != (first.shape, first.dtype):
                raise CheckpointError(f"{parts[number, part].where} differs from expert 0 in shape or dtype")
    rows = [parts[n, part] for n in range(count) for part in ("gate_proj", "up_proj")]
    down = [parts[n, "down_proj"] for n in range(count)]
    inner, hidden = rows[0].shape
    return {
        f"{key}.gate_up_proj": rows[0].joined(rows[1:], (count, 2 * inner, hidden)),
        f"{key}.down_proj": down[0].joined(down[1:], (count, *down[0].shape)),
    }


def _expected(directory: Path, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the text model's parameters by key."""
    import torch
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    text = text_config(config)
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(CONFIG_MAPPING[text["model_type"]].from_dict(text))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{directory / 'config.json'} does not describe a model ({error})") from None
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def _check(key: str, tensor: Stored, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.where} has shape {list(tensor.shape)}, but config.json asks for {list(shape)}; "
            "copy the checkpoint again, or correct its config.json"
        )
    if tensor.dtype not in _READABLE:
        raise CheckpointError(
            f"{tensor.where} is stored as {tensor.dtype}; a target is captured from {', '.join(_READABLE)} only"
        )


def _listing(directory: Path) -> Path:
    return directory / (INDEX if (directory / INDEX).is_file() else SINGLE)
