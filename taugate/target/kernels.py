"""Which implementation of the gated delta rule runs: chosen explicitly, and proved afterwards.

transformers >= 5.15 binds fla whenever `import fla` works, GPU or not, and a broken fla silently becomes the
fallback. So nothing is left to its choice: the functions of the modeling module are replaced for the time of a
capture, each call is counted with the module of the function that really ran, and `require` compares.
"""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from taugate.errors import KernelPathError

PATHS = ("torch", "fla")
DELTA_RULE = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
CONVOLUTION = ("causal_conv1d_fn", "causal_conv1d_update")
_MODULES = {
    "qwen3_5_text": "transformers.models.qwen3_5.modeling_qwen3_5",
    "qwen3_5": "transformers.models.qwen3_5.modeling_qwen3_5",
    "qwen3_5_moe_text": "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
    "qwen3_next": "transformers.models.qwen3_next.modeling_qwen3_next",
}


@dataclass
class KernelEvidence:
    """What ran: for each function of the modeling module, the modules of the implementations called and how often."""

    path: str
    hybrid: bool
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def require(self) -> dict[str, Any]:
        """The evidence as JSON. Raises KernelPathError if another implementation ran, or none in a hybrid model."""
        rules = {module for (name, module) in self.calls if name in DELTA_RULE}
        wanted = "fla." if self.path == "fla" else "transformers."
        wrong = sorted(module for module in rules if not module.startswith(wanted))
        if wrong:
            raise KernelPathError(f"kernel_path is {self.path!r}, but {', '.join(wrong)} ran; nothing was kept")
        if self.hybrid and not rules:
            raise KernelPathError(f"kernel_path is {self.path!r}, but no gated delta rule was seen to run")
        return {
            "path": self.path,
            "calls": {f"{name} <- {module}": n for (name, module), n in sorted(self.calls.items())},
        }


@contextmanager
def kernel_path(path: str, model_type: str, device: str) -> Iterator[KernelEvidence]:
    """Run the body with every gated delta rule on `path` ("torch" or "fla"); restores the modeling module afterwards.

    Raises KernelPathError when the path cannot run here: fla without a GPU, or fla that does not import.
    """
    if path not in PATHS:
        raise KernelPathError(f"kernel_path {path!r} is unknown; it is one of {', '.join(PATHS)}")
    module_name = _MODULES.get(model_type)
    evidence = KernelEvidence(path, hybrid=module_name is not None)
    if module_name is None:  # a full-attention target has no such kernels; both paths are the same
        yield evidence
        return
    if path == "fla" and device == "cpu":
        raise KernelPathError(
            'kernel_path "fla" needs a GPU, and the capture runs on a CPU; set capture.kernel_path = "torch"'
        )
    module = importlib.import_module(module_name)
    originals = {name: getattr(module, name) for name in (*DELTA_RULE, *CONVOLUTION) if hasattr(module, name)}
    if not set(DELTA_RULE) <= originals.keys():
        raise KernelPathError(
            f"{module_name} has no {' or '.join(DELTA_RULE)}; transformers 5.17 to 5.24 are supported"
        )
    try:
        for name, original in originals.items():
            setattr(module, name, _counted(name, _implementation(name, original, path), evidence))
        yield evidence
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


def _implementation(name: str, original: Callable[..., Any], path: str) -> Callable[..., Any]:
    if path == "fla" and name in DELTA_RULE:
        bound = _closure(original).get("implementation")
        if bound is None or not bound.__module__.startswith("fla."):
            raise KernelPathError(
                f"kernel_path is 'fla', but transformers bound {getattr(bound, '__module__', None)} to {name}; "
                "`python -c 'import fla.ops.gated_delta_rule'` shows why"
            )
        return original
    return _fallback(name, original)


def _fallback(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The PyTorch function itself, with the guard against packed sequences that its wrapper had."""
    plain = original.__wrapped__ if hasattr(original, "__wrapped__") else original

    @functools.wraps(plain)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None:
            raise KernelPathError(f"the PyTorch {name} cannot keep packed sequences apart; capture them one by one")
        return plain(*args, **kwargs)

    return guarded


def _counted(name: str, function: Callable[..., Any], evidence: KernelEvidence) -> Callable[..., Any]:
    bound = _closure(function).get("implementation")
    module = (bound or function).__module__

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        evidence.calls[name, module] += 1
        return function(*args, **kwargs)

    return counted


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if code else {}
