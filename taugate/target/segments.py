"""How a long sequence is cut: fixed pieces, whatever memory there is, so that a state never depends on the machine's.

Scratch memory of a forward grows with its length: 150 to 500 KiB a token at the sizes of Qwen3.6-27B. So both engines
run a sequence in pieces of `SEGMENT` tokens, and carry the recurrent, convolution and key/value state from one to the
next in the cache of transformers. Splitting moves no chunk boundary of the gated delta rule, since SEGMENT is a
multiple of its 64, but it does round the carried state's use once more; equal pieces make both engines equal.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SEGMENT = 1024
# transformers runs a single cached token through another kernel than a chunk; a tail this short joins its neighbour.
SHORTEST = 64


def segments(length: int, size: int = SEGMENT) -> list[tuple[int, int]]:
    """(begin, end) of the pieces of a sequence of `length` tokens; none is shorter than 64 unless the sequence is."""
    cuts = list(range(0, length, size)) or [0]
    if len(cuts) > 1 and length - cuts[-1] < SHORTEST:
        cuts.pop()
    return list(zip(cuts, [*cuts[1:], length], strict=True))


def new_cache(config: Any) -> Any:
    """An empty cache for the states of one sequence."""
    from transformers import DynamicCache

    return DynamicCache(config=config)


def filled_cache(config: Any, length: int) -> Any:
    """A cache that says it holds `length` tokens, of one value each: enough to ask a model for its masks."""
    import torch
    from transformers.cache_utils import CacheLayerMixin

    cache = new_cache(config)
    token = torch.zeros(1, 1, length, 1)
    for layer in cache.layers if length else ():
        if isinstance(layer, CacheLayerMixin):
            layer.update(token, token)
    return cache


def cache_argument(forward: Any) -> str:
    """Name of a forward's argument for the cache: "cache" since transformers 5.2x, "past_key_values" before."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def joined(pieces: list[Tensor]) -> Tensor:
    """[1, S, H] of the states of a sequence's segments; a single one as it is, without a copy."""
    import torch

    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
