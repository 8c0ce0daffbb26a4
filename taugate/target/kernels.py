"""Which implementation of the gated delta rule runs: chosen explicitly, and proved afterwards.

transformers >= 5.15 binds fla whenever `import fla` works, GPU or not, and a broken fla silently becomes the
fallback; fla in turn hands its work to FlashQLA when that package is installed. So nothing is left to their choice: the
functions of the modeling module are replaced for the time of a capture, each call is counted, by layer, with the module
of the function that really ran, and `require` compares.

Paths: "torch" (the PyTorch fallback, any device), "fla" (its Triton kernels), and two that are never taken unless
asked for: "flash_qla" (FlashQLA through fla) and "hub" (kernels-community/fla through the package `kernels`).
"""

from __future__ import annotations

import functools
import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from taugate.errors import KernelPathError
from taugate.target.implementations import CONVOLUTION, DELTA_RULE, implementation

PATHS = ("torch", "fla", "hub", "flash_qla")
_OF_FAMILY = {
    "qwen3_5": "transformers.models.qwen3_5.modeling_qwen3_5",
    "qwen3_5_moe": "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
    "qwen3_next": "transformers.models.qwen3_next.modeling_qwen3_next",
}
# What the module of an implementation begins with, by path.
_ORIGIN = {"torch": "transformers.", "fla": "fla.", "flash_qla": "fla.ops.gated_delta_rule.backends.flash_qla"}
_FLA_SWITCH = "FLA_FLASH_QLA"
_LAYER: ContextVar[int] = ContextVar("layer", default=-1)
Calls = list[tuple[str, str]]
_ACTIVE: ContextVar[KernelEvidence | None] = ContextVar("evidence", default=None)
_TAPE: ContextVar[Calls | None] = ContextVar("tape", default=None)


@dataclass
class KernelEvidence:
    """What ran: how often each implementation was called, by (layer, function of the modeling module, its module)."""

    path: str
    hybrid: bool
    calls: Counter[tuple[int, str, str]] = field(default_factory=Counter)

    def require(self) -> dict[str, Any]:
        """The evidence as JSON. Raises KernelPathError if another implementation ran, or none in a hybrid model."""
        rules = {module for (_, name, module) in self.calls if name in DELTA_RULE}
        wrong = sorted(module for module in rules if not _of_path(module, self.path))
        if wrong:
            layers = sorted({layer for (layer, _, module) in self.calls if module in wrong})
            raise KernelPathError(
                f"kernel_path is {self.path!r}, but {', '.join(wrong)} ran in layers {layers}; nothing was kept"
            )
        if self.hybrid and not rules:
            raise KernelPathError(f"kernel_path is {self.path!r}, but no gated delta rule was seen to run")
        total: Counter[str] = Counter()
        layers_of: dict[str, set[int]] = {}
        for (layer, name, module), count in self.calls.items():
            total[f"{name} <- {module}"] += count
            layers_of.setdefault(f"{name} <- {module}", set()).add(layer)
        return {
            "path": self.path,
            "calls": dict(sorted(total.items())),
            "layers": {what: sorted(layers) for what, layers in sorted(layers_of.items())},
        }


def enter_layer(layer: int) -> None:
    """Count what is called from now on as layer `layer`'s; -1 is outside of any."""
    _LAYER.set(layer)


@contextmanager
def recorded_calls() -> Iterator[Calls]:
    """The calls within the body, which are not counted now but each time that `count_again` is given them."""
    tape: Calls = []
    token = _TAPE.set(tape)
    try:
        yield tape
    finally:
        _TAPE.reset(token)


def count_call(name: str, module: str) -> None:
    """Count a call of a modeling module's function that the implementation in `module` serves."""
    tape, evidence = _TAPE.get(), _ACTIVE.get()
    if tape is not None:
        tape.append((name, module))
    elif evidence is not None:
        evidence.calls[_LAYER.get(), name, module] += 1


def count_again(calls: Calls) -> None:
    """Count recorded calls as made in the layer that runs now: a CUDA graph of them was replayed."""
    evidence = _ACTIVE.get()
    if evidence is not None:
        evidence.calls.update((_LAYER.get(), name, module) for name, module in calls)


@contextmanager
def kernel_path(path: str, model_type: str, device: str) -> Iterator[KernelEvidence]:
    """Run the body with every gated delta rule on `path`; restores the modeling module afterwards.

    Raises KernelPathError when the path cannot run here: kernels without a GPU, a package that does not import, or a
    transformers without the functions to replace.
    """
    if path not in PATHS:
        raise KernelPathError(f"kernel_path {path!r} is unknown; it is one of {', '.join(PATHS)}")
    module = modeling_module(model_type)
    evidence = KernelEvidence(path, hybrid=module is not None)
    if module is None:  # a full-attention target has no such kernels; all paths are the same
        yield evidence
        return
    require_device(path, model_type, device)
    originals = {name: getattr(module, name) for name in (*DELTA_RULE, *CONVOLUTION) if hasattr(module, name)}
    if not set(DELTA_RULE) <= originals.keys():
        raise KernelPathError(
            f"{module.__name__} has no {' or '.join(DELTA_RULE)}; transformers 5.17 and later are supported"
        )
    token = _ACTIVE.set(evidence)
    with _flash_qla(path == "flash_qla"):
        try:
            for name, original in originals.items():
                setattr(module, name, _counted(name, *implementation(name, original, path)))
            yield evidence
        finally:
            _ACTIVE.reset(token)
            for name, original in originals.items():
                setattr(module, name, original)


def modeling_module(model_type: str) -> Any | None:
    """transformers' module of a hybrid family, "_text" or not; None for every other model type."""
    name = _OF_FAMILY.get(model_type.removesuffix("_text"))
    return importlib.import_module(name) if name else None


def require_device(path: str, model_type: str, device: str) -> None:
    """Raise KernelPathError for kernels that would have to run without a GPU."""
    if path != "torch" and device == "cpu" and model_type.removesuffix("_text") in _OF_FAMILY:
        raise KernelPathError(
            f'kernel_path "{path}" needs a GPU, and the capture runs on a CPU; set capture.kernel_path = "torch"'
        )


def _counted(name: str, call: Callable[..., Any], proof: Any) -> Callable[..., Any]:
    @functools.wraps(proof)
    def counted(*args: Any, **kwargs: Any) -> Any:
        count_call(name, proof.__module__)
        return call(*args, **kwargs)

    return counted


def _of_path(module: str, path: str) -> bool:
    """Whether an implementation of this module belongs to the path. A hub kernel lives in neither package."""
    if path == "hub":
        return not module.startswith(("transformers.", "fla."))
    if path == "fla" and module.startswith(_ORIGIN["flash_qla"]):
        return False
    return module.startswith(_ORIGIN[path])


@contextmanager
def _flash_qla(wanted: bool) -> Iterator[None]:
    """Switch fla's FlashQLA backend, which is on wherever its package is installed."""
    before = os.environ.get(_FLA_SWITCH)
    os.environ[_FLA_SWITCH] = "1" if wanted else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FLA_SWITCH]
        else:
            os.environ[_FLA_SWITCH] = before
