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
import importlib.util
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from taugate.errors import KernelPathError

PATHS = ("torch", "fla", "hub", "flash_qla")
DELTA_RULE = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
CONVOLUTION = ("causal_conv1d_fn", "causal_conv1d_update")
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
                setattr(module, name, _counted(name, *_implementation(name, original, path)))
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


def bound_module(function: Callable[..., Any]) -> str:
    """Module of the implementation behind a function of a modeling module."""
    return (_closure(function).get("implementation") or function).__module__


def _implementation(name: str, original: Callable[..., Any], path: str) -> tuple[Callable[..., Any], Any]:
    """The function to call, and the one whose module is the proof."""
    if name in DELTA_RULE and path == "fla":
        return _named_arguments(_fla(name, original))
    if name in DELTA_RULE and path == "flash_qla":
        return _flash_qla_function(name, original)
    if name in DELTA_RULE and path == "hub":
        return _named_arguments(_hub(name))
    return _fallback(name, original)


def _fla(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    bound = _closure(original).get("implementation")
    if bound is None or not bound.__module__.startswith("fla."):
        raise KernelPathError(
            f"kernel_path is 'fla', but transformers bound {getattr(bound, '__module__', None)} to {name}; "
            "`python -c 'import fla.ops.gated_delta_rule'` shows why"
        )
    return bound


def _flash_qla_function(name: str, original: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    """fla's chunk function with its FlashQLA backend alone; single tokens have no FlashQLA kernel and stay with fla."""
    bound = _fla(name, original)
    if name != "torch_chunk_gated_delta_rule":
        return _named_arguments(bound)
    if importlib.util.find_spec("flash_qla") is None:
        raise KernelPathError("kernel_path is 'flash_qla', but the package flash_qla is not installed")
    from fla.ops.gated_delta_rule.backends.flash_qla import FlashQLABackend

    backend = FlashQLABackend()

    @functools.wraps(backend.chunk_gated_delta_rule)
    def only(*args: Any, **kwargs: Any) -> Any:
        accepted, reason = backend.verify("chunk_gated_delta_rule", *args, **kwargs)
        if not accepted:
            raise KernelPathError(f"kernel_path is 'flash_qla', but FlashQLA refuses this target: {reason}")
        return backend.chunk_gated_delta_rule(*args, **kwargs)

    return _named_arguments(only)


def _hub(name: str) -> Callable[..., Any]:
    """The function of kernels-community/fla, which has to be in the local cache: captures never download."""
    function = "chunk_gated_delta_rule" if name == DELTA_RULE[0] else "fused_recurrent_gated_delta_rule"
    try:
        from kernels import get_kernel

        return getattr(get_kernel("kernels-community/fla", version=2), function)
    except Exception as error:
        raise KernelPathError(
            f"kernel_path is 'hub', but {function} of kernels-community/fla cannot be loaded "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); "
            "install `kernels` and fetch that kernel first"
        ) from None


def _named_arguments(function: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    """`function` without the keyword arguments that it does not name, which models pass along."""
    named = inspect.signature(function).parameters

    def selective(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{key: value for key, value in kwargs.items() if key in named})

    return selective, function


def _fallback(name: str, original: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    """The PyTorch function itself, with the guard against packed sequences that its wrapper had."""
    plain = original.__wrapped__ if hasattr(original, "__wrapped__") else original

    def guarded(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None:
            raise KernelPathError(f"the PyTorch {name} cannot keep packed sequences apart; capture them one by one")
        return plain(*args, **kwargs)

    return guarded, plain


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


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if code else {}
