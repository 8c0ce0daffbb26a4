"""One forward, layer by layer: what every layer read, what its token mixer and it gave, and what came out at the end.

The same record is made of the float64 reference (`taugate.target.reference`) and of a transformers model, free running
or with every layer fed what the reference fed it, so that `taugate.target.levels` can compare them level by level.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MIXERS = ("linear_attn", "self_attn")


@dataclass(frozen=True)
class Trace:
    """Tensors [B, T, H], one per layer, in the precision of the forward; `logits` [B, T, V] if there is a head.

    mixers: outputs of attention or Gated DeltaNet alone, before the residual is added; outputs: of whole layers, raw
    (`tap.L`); final_hidden: after the final norm.
    """

    inputs: tuple[Tensor, ...]
    mixers: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    final_hidden: Tensor
    logits: Tensor | None = None


def trace(
    model: Any,
    token_ids: Sequence[Sequence[int]],
    mask: Tensor | None = None,
    *,
    forced: Sequence[Tensor] | None = None,
    pieces: Sequence[int] | None = None,
) -> Trace:
    """Run a transformers causal language model (or its text model) on whatever kernels are bound.

    token_ids: [B, T]; mask: [B, T], 0 at pads. forced: the input of every layer, given to it in the model's dtype in
    place of what the layer before it made. pieces: lengths that sum to T: the sequence is fed piece by piece through
    a cache (prefill in parts; decode where a piece is 1) and the states are joined.
    """
    import torch

    text = getattr(model, "model", model)
    rows = len(text.layers)
    device = next(text.parameters()).device
    ids = torch.tensor(token_ids, device=device)
    kept: dict[tuple[str, int], list[Tensor]] = {}
    done = 0

    def before(layer: int) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            if forced is not None:
                hidden = forced[layer][:, done : done + hidden.shape[1]].to(hidden)
            kept.setdefault(("inputs", layer), []).append(hidden)
            return ((hidden, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": hidden})

        return hook

    def after(name: str, layer: int) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            kept.setdefault((name, layer), []).append(output[0] if isinstance(output, tuple) else output)

        return hook

    hooks = []
    for number, layer in enumerate(text.layers):
        hooks.append(layer.register_forward_pre_hook(before(number), with_kwargs=True))
        hooks.append(layer.register_forward_hook(after("outputs", number)))
        mixer = next(getattr(layer, name) for name in MIXERS if hasattr(layer, name))
        hooks.append(mixer.register_forward_hook(after("mixers", number)))
    hooks.append(text.norm.register_forward_hook(after("final", 0)))
    name = "cache" if "cache" in inspect.signature(text.forward).parameters else "past_key_values"
    cache, logits = None, []
    try:
        with torch.inference_mode():
            for length in pieces or [ids.shape[1]]:
                seen = None if mask is None else mask[:, : done + length].to(device)
                out = model(
                    input_ids=ids[:, done : done + length],
                    attention_mask=seen,
                    use_cache=pieces is not None,
                    **({name: cache} if cache is not None else {}),
                )
                cache = getattr(out, name, None)
                logits += [out.logits] if hasattr(out, "logits") else []
                done += length
    finally:
        for hook in hooks:
            hook.remove()

    def joined(what: str) -> tuple[Tensor, ...]:
        return tuple(torch.cat(kept[what, layer], 1) for layer in range(rows))

    return Trace(
        inputs=joined("inputs"),
        mixers=joined("mixers"),
        outputs=joined("outputs"),
        final_hidden=torch.cat(kept["final", 0], 1),
        logits=torch.cat(logits, 1) if logits else None,
    )
