"""Parts of hybrid targets by fused kernels and joined products that give the modules' own bits.

At 1,024 tokens of a 27B target the launches between the matrix products take as long as two thirds of the products.
The fused kernels stand in for them only where they have proved equal: the first call of each kind and shape computes
both, the fused one twice, and compares them bit for bit; at a difference the shape is given up for good and the model's
own module runs. So a state never depends on them, and both engines use them alike.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from taugate.target.kernels import modeling_module

Result = TypeVar("Result")  # a tensor, or a tuple of tensors
_TRIALS = 2  # a kernel that is not repeatable must not pass by luck


class Fused:
    """Which kinds ("norm", "convolution", …) have proved equal, for which calls."""

    def __init__(self) -> None:
        self._equal: dict[tuple[str, Hashable], Any] = {}
        self._refused: dict[tuple[str, Hashable], str] = {}

    def facts(self) -> dict[str, Any]:
        """The kinds in use; and of those that were refused, for how many shapes, and the first of them."""
        used = {"used": sorted({kind for kind, _ in self._equal})}
        reasons: dict[str, list[str]] = {}
        for (kind, key), reason in self._refused.items():
            reasons.setdefault(kind, []).append(f"{reason} for {key}")
        refused = {kind: f"{len(said)} shapes, first: {said[0]}" for kind, said in reasons.items()}
        return {**used, "refused": refused} if refused else used

    def refuse(self, kind: str, key: Hashable, error: Exception) -> None:
        """Leave these calls to the model's own modules."""
        self._refused[kind, key] = f"{type(error).__name__} ({next(iter(str(error).splitlines()), '')})"

    def call(
        self, kind: str, key: Hashable, fused: Callable[[Any], Result], own: Callable[[], Result], ways: Sequence[Any]
    ) -> Result:
        """fused(way) with the one of `ways` that equals own(), else own() itself."""
        import torch

        if (kind, key) in self._equal:
            return fused(self._equal[kind, key])
        expected = own()
        # Nothing can be compared while a graph is recorded.
        if (kind, key) in self._refused or torch.cuda.is_current_stream_capturing():
            return expected
        self._refused[kind, key] = "other bits"
        for way in ways:
            try:
                equal = all(_same(fused(way), expected) for _ in range(_TRIALS))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # what a Triton cannot compile is no reason to end a capture
                self.refuse(kind, key, error)
                continue
            if equal:
                self._equal[kind, key] = way
                del self._refused[kind, key]
                break
        return expected


def _same(some: Any, others: Any) -> bool:
    """The same bits, but for a zero's sign; several tensors, which are for attention, also in the same layout, since it
    chooses by that.
    """
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
    try:
        forwards = importlib.import_module("taugate.target.fused_forwards")
    except ImportError as error:  # of a Triton that has moved what the kernels use
        fused.refuse("all", "every shape", error)
        yield
        return
    changed: list[tuple[Any, str, Any]] = []
    for owner, attribute, wrapper in forwards.wrappers(fused, module):
        own = getattr(owner, attribute)
        changed.append((owner, attribute, own))
        setattr(owner, attribute, wrapper(own))
    try:
        yield
    finally:
        for owner, attribute, own in reversed(changed):
            setattr(owner, attribute, own)
