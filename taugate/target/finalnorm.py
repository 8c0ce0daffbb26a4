"""The target's final norm alone: from the last layer's raw output to final_hidden, without loading the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from taugate.errors import CheckpointError
from taugate.target.checkpoint import read_config, text_config
from taugate.target.shards import read_tensors

if TYPE_CHECKING:
    from torch import Tensor

_KEYS = ("model.norm.weight", "model.language_model.norm.weight", "norm.weight")
# x · rsqrt(mean x² + eps) in fp32; Qwen3.5 and Qwen3-Next multiply by 1 + w in fp32, Qwen3 and Llama round to the
# model's precision first and then multiply by w (transformers, modeling_qwen3_next.py and modeling_qwen3.py).
_ONE_PLUS_W = ("qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe", "qwen3_next")


class FinalNorm:
    """The norm of the checkpoint in `directory`; its weight is read at the first use. Raises CheckpointError."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        text = text_config(read_config(directory))
        self.one_plus_w, self.eps = text["model_type"] in _ONE_PLUS_W, float(text.get("rms_norm_eps", 1e-6))
        self._weight: Tensor | None = None

    def __call__(self, raw: Tensor) -> Tensor:
        """final_hidden of raw last-layer outputs [S, H], in their dtype."""
        import torch

        x = raw.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        weight = self._read()
        if self.one_plus_w:
            return (x * (1.0 + weight.float())).to(raw.dtype)
        return weight.to(raw.dtype) * x.to(raw.dtype)

    def _read(self) -> Tensor:
        from safetensors import safe_open

        if self._weight is None:
            stored = read_tensors(self.directory)
            key = next((key for key in _KEYS if key in stored), None)
            if key is None:
                raise CheckpointError(f"{self.directory} holds none of {', '.join(_KEYS)}")
            with safe_open(stored[key].pieces[0].file, framework="pt") as stream:
                self._weight = stream.get_tensor(key)
        return self._weight
