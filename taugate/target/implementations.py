"""The implementations behind each kernel path: of fla, FlashQLA, the hub, and the PyTorch fallback; see `kernels`."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from taugate.errors import KernelPathError

DELTA_RULE = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
CONVOLUTION = ("causal_conv1d_fn", "causal_conv1d_update")


def bound_module(function: Callable[..., Any]) -> str:
    """Module of the implementation behind a function of a modeling module."""
    return (_closure(function).get("implementation") or function).__module__


def implementation(name: str, original: Callable[..., Any], path: str) -> tuple[Callable[..., Any], Any]:
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


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if code else {}
