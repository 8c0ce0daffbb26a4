"""Parts of hybrid targets by fused kernels and joined products that give the modules' own bits.

At 1,024 tokens of a 27B target the launches between the matrix products take as long as two thirds of the products.
The fused kernels stand in for them only where they have proved equal: the first call of each kind and shape computes
both and compares them bit for bit; at the first difference the kind is given up for good and the model's own module
runs. So a state never depends on them, and both engines use them alike.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from taugate.target.kernels import modeling_module

Result = TypeVar("Result")  # a tensor, or a tuple of tensors


class Fused:
    """Which kinds ("norm", "convolution", …) have proved equal, for which calls."""

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        self._equal: dict[tuple[str, Hashable], Any] = {}
        self._kinds: set[str] = set()

    def facts(self) -> dict[str, Any]:
        """The kinds in use, and why others are not."""
        used = {"used": sorted(self._kinds - self.refused.keys())}
        return {**used, "refused": self.refused} if self.refused else used

    def call(
        self, kind: str, key: Hashable, fused: Callable[[Any], Result], own: Callable[[], Result], ways: tuple[Any, ...]
    ) -> Result:
        """fused(way) with the one of `ways` that equals own(), else own() itself."""
        import torch

        if kind in self.refused:
            return own()
        if (kind, key) in self._equal:
            return fused(self._equal[kind, key])
        expected = own()
        if torch.cuda.is_current_stream_capturing():  # nothing can be compared while a graph is recorded
            return expected
        for way in ways:
            if _same(fused(way), expected):
                self._equal[kind, key] = way
                self._kinds.add(kind)
                return expected
        self.refused[kind] = f"differed from the module's own bits for {key}"
        return expected


def _same(some: Any, others: Any) -> bool:
    """The same bits; several tensors, which are for attention, also in the same layout, since it chooses by that."""
    import torch

    if isinstance(some, tuple):
        return all(a.stride() == b.stride() and torch.equal(a, b) for a, b in zip(some, others, strict=True))
    return torch.equal(some, others)


@contextmanager
def fused_modules(fused: Fused, model_type: str) -> Iterator[None]:
    """Within the body the family's modules use `fused` for bfloat16 states on a GPU; restored afterwards.

    To be entered inside `kernel_path`, whose choice of the gated delta rule it leaves alone.
    """
    module = modeling_module(model_type)
    if module is None:
        yield
        return
    wrappers = importlib.import_module("taugate.target.fused_forwards").wrappers(fused, module)
    changed: list[tuple[Any, str, Any]] = []
    for owner, attribute, wrapper in wrappers:
        own = getattr(owner, attribute)
        changed.append((owner, attribute, own))
        setattr(owner, attribute, wrapper(own))
    try:
        yield
    finally:
        for owner, attribute, own in reversed(changed):
            setattr(owner, attribute, own)
