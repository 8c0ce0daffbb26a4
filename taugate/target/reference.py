"""A whole target in true float64: the yardstick for every path that computes its states.

Weights are the checkpoint's own numbers, upcast one layer at a time, so that a large target needs one layer of float64
beside its states. Hybrid Qwen3.5 (text) and full-attention Qwen3. Whole sequences from position 0, no cache: prefill in
parts and decode must give what this gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taugate.errors import CheckpointError
from taugate.numerics.reference import gdn_layer
from taugate.target.checkpoint import read_config
from taugate.target.reference_layers import Shape, attention, mlp, rms_norm
from taugate.target.shards import shard_files
from taugate.target.trace import Trace

if TYPE_CHECKING:
    from torch import Tensor

_PREFIXES = ("model.language_model.", "language_model.model.", "model.")


class Reference:
    """shape: what the config says; names: every tensor that there is; read: gives one by its name (any dtype)."""

    def __init__(self, shape: Shape, names: Sequence[str], read: Callable[[str], Tensor], device: Any = "cpu") -> None:
        self.shape, self.device = shape, device
        self._read = read
        self._layers: dict[int, list[str]] = {}
        for name in names:
            if name.startswith("layers."):
                self._layers.setdefault(int(name.split(".")[1]), []).append(name)
        if absent := [i for i in range(len(shape.kinds)) if i not in self._layers]:
            raise CheckpointError(f"the weights lack layer {absent[0]} of the {len(shape.kinds)} that the config has")

    @classmethod
    def from_checkpoint(cls, directory: Path, device: Any = "cpu") -> Reference:
        """Reads tensors from the safetensors of `directory` when they are needed. Raises CheckpointError."""
        from safetensors import safe_open

        shape = Shape.read(read_config(directory))
        where: dict[str, tuple[Any, str]] = {}
        for shard in shard_files(directory):
            stream = safe_open(shard, framework="pt")
            where |= {_inner(name): (stream, name) for name in stream.keys()}  # noqa: SIM118
        return cls(shape, list(where), lambda name: where[name][0].get_tensor(where[name][1]), device)

    @classmethod
    def from_model(cls, model: Any) -> Reference:
        """The numbers that a transformers model holds now (its dtype's rounding included), on its device."""
        state = {_inner(name): tensor for name, tensor in model.state_dict().items()}
        device = next(iter(state.values())).device
        return cls(Shape.read(model.config.to_dict()), list(state), state.__getitem__, device)

    def embed(self, token_ids: Sequence[Sequence[int]]) -> Tensor:
        """[B, T, H]."""
        import torch

        rows = torch.tensor(token_ids)
        table = self._read("embed_tokens.weight")
        return table[rows.to(table.device)].to(self.device, torch.float64)

    def weights(self, layer: int) -> dict[str, Tensor]:
        """The tensors of one layer in float64, by their names inside it."""
        import torch

        prefix = len(f"layers.{layer}.")
        return {name[prefix:]: self._read(name).to(self.device, torch.float64) for name in self._layers[layer]}

    def layer(
        self, layer: int, hidden: Tensor, mask: Tensor | None = None, weights: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """(output of the token mixer, output of the layer) for `hidden` [B, T, H] in float64; mask: [B, T], 0 at pads.

        weights: those of `weights(layer)`, to read them once for several inputs.
        """
        w = self.weights(layer) if weights is None else weights
        mask = None if mask is None else mask.to(self.device).bool()
        normed = rms_norm(hidden, w["input_layernorm.weight"], self.shape)
        if linear := _under(w, "linear_attn."):
            mixed = gdn_layer(normed, linear, self.shape.gdn, mask=mask).out
        else:
            mixed = attention(normed, _under(w, "self_attn."), self.shape, mask)
        hidden = hidden + mixed
        normed = rms_norm(hidden, w["post_attention_layernorm.weight"], self.shape)
        return mixed, hidden + mlp(normed, _under(w, "mlp."))

    def final(self, hidden: Tensor) -> Tensor:
        """The final norm."""
        import torch

        return rms_norm(hidden, self._read("norm.weight").to(self.device, torch.float64), self.shape)

    def logits(self, final_hidden: Tensor) -> Tensor:
        """[B, T, V]."""
        import torch

        name = "embed_tokens.weight" if self.shape.tied else "lm_head.weight"
        return final_hidden @ self._read(name).to(self.device, torch.float64).T

    def __call__(self, token_ids: Sequence[Sequence[int]], mask: Tensor | None = None, head: bool = True) -> Trace:
        """The whole forward of `token_ids` [B, T]; `head` False leaves out the logits, which may be large."""
        import torch

        with torch.inference_mode():
            hidden = self.embed(token_ids)
            inputs, mixers, outputs = [], [], []
            for layer in range(len(self.shape.kinds)):
                inputs.append(hidden)
                mixed, hidden = self.layer(layer, hidden, mask)
                mixers.append(mixed)
                outputs.append(hidden)
            final = self.final(hidden)
            return Trace(tuple(inputs), tuple(mixers), tuple(outputs), final, self.logits(final) if head else None)


def _inner(name: str) -> str:
    """A tensor's name without the prefixes that wrappers put before it."""
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)


def _under(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
