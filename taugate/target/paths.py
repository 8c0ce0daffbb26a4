"""A model on a path of the numerics tests: its gated delta rule swapped for `taugate.numerics.kernels`, and put back.

"fla": fla's chunk kernel for prefill and its recurrent kernel for single tokens, on a GPU, or on a CPU in the
interpreter's process. "torch": the fallbacks of transformers. Unlike `taugate.target.kernels`, which captures with what
production runs, this can run fla without a GPU, and float32 on a GPU without TF32.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from taugate.errors import KernelPathError
from taugate.numerics.kernels import Inputs, Kernels

PATHS = ("torch", "fla")
RULES = {"torch_chunk_gated_delta_rule": "chunk", "torch_recurrent_gated_delta_rule": "recurrent"}
_CONVOLUTION = ("causal_conv1d_fn", "causal_conv1d_update")
Swap = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def on_path(
    model: Any, path: str, kernels: Kernels, dtype: str | None = None, swaps: dict[str, Swap] | None = None
) -> Iterator[Counter[str]]:
    """Run the body with every gated delta rule of `model` on `path`; yields the calls by kernel, "fla-chunk": n.

    dtype: "fp32", "tf32" or "bf16", as `Kernels.run`. swaps: by name of a function of the modeling module, what is put
    around it (a fault to inject). A model without Gated DeltaNet runs as it is. Raises KernelPathError.
    """
    if path not in PATHS:
        raise KernelPathError(f"path {path!r} is unknown; it is one of {', '.join(PATHS)}")
    module = sys.modules[type(getattr(model, "model", model)).__module__]
    names = [name for name in (*RULES, *_CONVOLUTION, *(swaps or ())) if hasattr(module, name)]
    originals = {name: getattr(module, name) for name in dict.fromkeys(names)}
    calls: Counter[str] = Counter()
    try:
        for name, original in originals.items():
            # What transformers wraps around a fallback would call fla wherever that imports.
            function = inspect.unwrap(original)
            if name in RULES:
                rule = f"{path}-{RULES[name]}"
                function = _counted(rule, function, calls) if path == "torch" else _fla(rule, kernels, dtype, calls)
            setattr(module, name, swaps[name](function) if swaps and name in swaps else function)
        yield calls
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


def _counted(name: str, function: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    def rule(*args: Any, **given: Any) -> Any:
        calls[name] += 1
        return function(*args, **given)

    return rule


def _fla(name: str, kernels: Kernels, dtype: str | None, calls: Counter[str]) -> Callable[..., Any]:
    """A function with the signature of transformers' that runs fla's kernel `name`."""

    def rule(query: Any, key: Any, value: Any, g: Any, beta: Any, **given: Any) -> Any:
        if given.get("cu_seqlens") is not None:
            raise KernelPathError("packed sequences are not compared at model level; run them one by one")
        calls[name] += 1
        normalised = bool(given.get("use_qk_l2norm_in_kernel"))
        inputs = Inputs(query, key, value, g, beta, given.get("initial_state"), l2norm=normalised)
        out, state = kernels.run(name, inputs, dtype)
        return out, state if given.get("output_final_state") else None

    return rule
