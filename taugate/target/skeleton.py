"""The text model without its weights: every module on the meta device, one decoder layer filled at a time.

Which arguments a layer gets (positions, rotary embedding, masks, under which names) is the business of each model and
each release of transformers. It is not repeated here: the model's own forward runs over stubs in place of its layers,
and what it hands to each of them is recorded. It depends on the position and length of a segment alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taugate.errors import CheckpointError
from taugate.target.layout import Layout, open_layout
from taugate.target.segments import cache_argument, filled_cache

if TYPE_CHECKING:
    from torch import Tensor, nn

ATTENTION = "sdpa"  # the attention of both engines; with mask None it is causal, which "eager" is not


def text_model_config(directory: Path, depth: int | None = None) -> Any:
    """The text model's config from transformers, cut to its first `depth` layers; needs no weights."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config()
    if depth is not None and depth < config.num_hidden_layers:
        config.num_hidden_layers = depth
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:depth]
    config._attn_implementation = ATTENTION
    return config


def needed_depth(layers: int, taps: list[int], final_hidden: bool) -> int:
    """How many layers have to run. Raises CheckpointError for a tap outside the model, or when nothing is wanted."""
    if outside := [tap for tap in taps if not 0 <= tap < layers]:
        raise CheckpointError(f"taps {outside} are outside the target's layers 0…{layers - 1}")
    if not taps and not final_hidden:
        raise CheckpointError("a capture of no tap and no final_hidden was asked for; name one of them")
    return layers if final_hidden else max(taps) + 1


class Skeleton:
    """Layers 0…depth-1 of a checkpoint's text model, with rotary embedding and final norm on `device`.

    dtype: a torch dtype, the precision of the forward; parameters in `Layout.fp32_keys` stay in fp32.
    """

    def __init__(self, directory: Path, taps: list[int], final_hidden: bool, dtype: Any, device: str) -> None:
        import torch
        from transformers import AutoModel

        self.layout: Layout = open_layout(directory)
        layers = text_model_config(directory).num_hidden_layers
        self.depth = needed_depth(layers, taps, final_hidden)
        self.config = text_model_config(directory, self.depth)
        self.dtype, self.device = dtype, device
        with torch.device("meta"):
            model = AutoModel.from_config(self.config, attn_implementation=ATTENTION)
        model.eval().requires_grad_(False)
        self.layers: list[nn.Module] = list(model.layers)
        self.norm: nn.Module = model.norm
        model.rotary_emb = type(model.rotary_emb)(config=self.config).to(device)
        self._stubs = torch.nn.ModuleList(_stub() for _ in self.layers)
        model.layers, model.norm, model.embed_tokens = self._stubs, torch.nn.Identity(), torch.nn.Identity()
        self._model = model
        # Experts run by what the router chose, which the host has to read.
        self.branches = bool(getattr(self.config, "num_experts", 0))
        self._cache_argument = cache_argument(model.forward)
        self._calls: dict[tuple[int, int, bool], list[dict[str, Any]]] = {}

    def calls(self, begin: int, end: int, cached: bool) -> list[dict[str, Any]]:
        """Keyword arguments of each layer for tokens begin…end-1 of a sequence; `cached`: other segments follow or
        precede, so the layer gets a cache (to be put in by `with_cache`).
        """
        import torch

        key = (begin, end, cached)
        if key not in self._calls:
            cache = {self._cache_argument: filled_cache(self.config, begin)} if cached else {}
            nothing = torch.zeros(1, 1, 1, dtype=self.dtype, device=self.device)
            self._model(
                inputs_embeds=nothing.expand(1, end - begin, self.config.hidden_size), use_cache=cached, **cache
            )
            self._calls[key] = [stub.given for stub in self._stubs]
        return self._calls[key]

    def with_cache(self, call: dict[str, Any], cache: Any) -> dict[str, Any]:
        """The arguments of `call` with the cache of one sequence."""
        return {name: cache if name in ("cache", "past_key_values") else value for name, value in call.items()}


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Let the module's parameters be these tensors, by their keys inside the module."""
    import torch

    for key, tensor in tensors.items():
        path, _, name = key.rpartition(".")
        owner = module.get_submodule(path)
        owner._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)


def empty(module: nn.Module) -> None:
    """Let go of the tensors that `fill` gave."""
    fill(module, {key: parameter.to("meta") for key, parameter in module.named_parameters()})


def forward_dtypes(layout: Layout, prefix: str, tensors: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """The torch dtype of each parameter below `prefix` ("layers.3.") in a forward of `dtype`."""
    import torch

    return {key: torch.float32 if prefix + key in layout.fp32_keys else dtype for key in tensors}


def _stub() -> nn.Module:
    import torch

    class Stub(torch.nn.Module):
        given: dict[str, Any]

        def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
            self.given = given
            return hidden_states

    return Stub()
