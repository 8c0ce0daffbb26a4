"""fla's Triton kernels on a CPU: Triton's interpreter, put right where it is silently wrong, and checked.

Imported only by the worker process (`taugate.numerics.worker`), which sets TRITON_INTERPRET=1 first. What Triton 3.7
to 3.9 get wrong for these kernels, and what `install` does about it:

- bfloat16 tensors are kept as uint16; dots and arithmetic work on those bit patterns (triton #11584): operands are
  decoded to float32, results rounded to nearest even. What is not decoded here raises instead of being wrong.
- casts to bfloat16 truncate: they round to nearest even, like the hardware.
- dots ignore `input_precision`: with `EMULATION.tf32`, operands of a TF32 dot lose their low 13 bits. An H200 truncates
  too: its fla chunk kernel in float32 is off by 1.47e-3 on inputs on which truncation gives 1.475e-3, rounding 4.3e-4.
- the autotuner needs a GPU to choose: it gets one configuration, the largest tiles.
- `range` yields Python ints, of which one kernel asks `.to(…)`: it yields ints that have that method.
- every call of a device function patches the language anew, which takes most of the time: it is patched once.
"""

from __future__ import annotations

import builtins
import importlib.util
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

from taugate.errors import KernelPathError
from taugate.numerics.bits import decode, encode, truncate_tf32

MINIMUM_TRITON = (3, 7)
FLA = "0.6."
_BUILDER = interpreter.InterpreterBuilder
_Handle = interpreter.TensorHandle

# What is replaced, with the parameters that the replacement counts on.
_PATCHED: dict[str, tuple[object, tuple[str, ...]]] = {
    "binary_op": (_BUILDER, ("self", "lhs", "rhs", "op")),
    "unary_op": (_BUILDER, ("self", "arg", "op")),
    "cast_impl": (_BUILDER, ("self", "src", "dst_type")),
    "create_fp_to_fp": (_BUILDER, ("self", "src", "dst_type", "rounding_mode")),
    "create_dot": (_BUILDER, ("self", "a", "b", "d", "input_precision", "max_num_imprecise_acc")),
    "_patch_lang": (interpreter, ("fn",)),
}
# These still work on bit patterns of bfloat16; fla's forward kernels use none of them on it.
_REFUSED = ("create_fma", "create_erf", "create_rsqrt", "create_clampf", "create_idiv", "create_atomic_rmw")


@dataclass
class Emulation:
    """tf32: TF32 dots lose bits as on a GPU (off: IEEE). launches: kernels run so far, by name."""

    tf32: bool
    launches: Counter[str]


EMULATION = Emulation(tf32=False, launches=Counter())


def install() -> None:
    """Patch this process's interpreter, before fla is imported. Raises KernelPathError where it does not fit."""
    if not triton.knobs.runtime.interpret:
        raise KernelPathError("the interpreter's worker was started without TRITON_INTERPRET=1")
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < MINIMUM_TRITON:
        wanted = ".".join(map(str, MINIMUM_TRITON))
        raise KernelPathError(f"interpreting fla's kernels needs Triton {wanted} or later, not {triton.__version__}")
    for name, (owner, parameters) in _PATCHED.items():
        function = getattr(owner, name, None)
        if function is None or tuple(inspect.signature(function).parameters) != parameters:
            raise KernelPathError(
                f"Triton {triton.__version__} has changed the interpreter's {name}, which taugate replaces; "
                "install a supported release (3.7 to 3.9)"
            )
    _patch_arithmetic()
    _patch_autotuner()
    _patch_executor()


def load_fla() -> Any:
    """fla's package of gated delta rule operations with its kernels patched. Raises KernelPathError for another fla."""
    version = metadata.version("fla-core")
    if not version.startswith(FLA):
        raise KernelPathError(f"the interpreter is checked with fla {FLA}x, not {version}; install that one")
    for name in ("fla", "fla.ops"):  # bare packages: what these two import takes longer than all the kernels
        spec = importlib.util.find_spec(name)
        assert spec and spec.submodule_search_locations
        package = sys.modules[name] = importlib.util.module_from_spec(spec)
        package.__version__ = version  # type: ignore[attr-defined]
    ops = importlib.import_module("fla.ops.gated_delta_rule")
    for name, needed in (
        ("fla.ops.common.chunk_delta_h", "i_t.to("),
        ("fla.ops.gated_delta_rule.chunk_fwd", "SOLVE_TRIL_DOT_PRECISION"),
    ):
        module = importlib.import_module(name)
        if needed not in inspect.getsource(module):
            raise KernelPathError(f"fla {version} has no {needed!r} in {name}; the interpreter must be adapted")
        module.range = _range  # type: ignore[attr-defined]
        if hasattr(module, "SOLVE_TRIL_DOT_PRECISION"):  # "ieee" without a GPU; what a GPU uses is emulated, or not
            module.SOLVE_TRIL_DOT_PRECISION = tl.constexpr("tf32")
    return ops


def _is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16


def _values(handle: Any) -> np.ndarray:
    return decode(handle.data) if _is_bf16(handle) else handle.data


def _patch_arithmetic() -> None:
    stock = {name: getattr(_BUILDER, name) for name in _PATCHED if hasattr(_BUILDER, name)}

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        if not (_is_bf16(lhs) or _is_bf16(rhs)):
            return stock["binary_op"](self, lhs, rhs, op)
        out = op(_values(lhs), _values(rhs))
        return _Handle(out, tl.int1) if out.dtype == np.bool_ else _Handle(encode(out), tl.bfloat16)

    def unary_op(self: Any, arg: Any, op: Callable[..., Any]) -> Any:
        if not _is_bf16(arg):
            return stock["unary_op"](self, arg, op)
        return _Handle(encode(op(decode(arg.data))), tl.bfloat16)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        target = dst_type.scalar
        if target == tl.bfloat16:
            return src if _is_bf16(src) else _Handle(encode(src.data.astype(np.float32)), target)
        if _is_bf16(src):
            return _Handle(decode(src.data).astype(interpreter._get_np_dtype(target)), target)
        return stock["cast_impl"](self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if _is_bf16(src) or dst_type.scalar == tl.bfloat16:
            return cast_impl(self, src, dst_type)
        return stock["create_fp_to_fp"](self, src, dst_type, rounding_mode)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right = _values(a), _values(b)
        wide = left.dtype == np.float32 and not _is_bf16(a)
        if EMULATION.tf32 and wide and str(input_precision).upper().endswith("TF32"):
            left, right = truncate_tf32(left), truncate_tf32(right)
        return _Handle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    for function in (binary_op, unary_op, cast_impl, create_fp_to_fp, create_dot):
        setattr(_BUILDER, function.__name__, function)
    for name in _REFUSED:
        setattr(_BUILDER, name, _refuse_bf16(name, getattr(_BUILDER, name)))
    interpreter.ReduceScanOpInterface.check_tensor = _refuse_bf16(
        "a reduction", interpreter.ReduceScanOpInterface.check_tensor
    )


def _refuse_bf16(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def refusing(*args: Any, **kwargs: Any) -> Any:
        flat = [x for arg in args for x in (arg if isinstance(arg, tuple) else (arg,))]
        if any(getattr(getattr(x, "dtype", None), "scalar", None) == tl.bfloat16 for x in flat):
            raise NotImplementedError(f"{what} of bfloat16 is not emulated")
        return function(*args, **kwargs)

    return refusing


def _patch_autotuner() -> None:
    stock = Autotuner.__init__

    def one_config(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        largest = max(configs, key=lambda config: math.prod(config.kwargs.values())) if configs else None
        stock(self, fn, arg_names, [largest] if largest else configs, *args, **kwargs)

    Autotuner.__init__ = one_config


def _patch_executor() -> None:
    """Count launches, and patch the language once instead of in every launch and every device function."""
    stock_call, patch_lang = interpreter.GridExecutor.__call__, interpreter._patch_lang

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        EMULATION.launches[self.fn.__name__] += 1
        return stock_call(self, *args, **kwargs)

    class Scope:
        def restore(self) -> None: ...

    interpreter.GridExecutor.__call__ = counted
    patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))  # all that it looks at in a function
    interpreter._patch_lang = lambda fn: Scope()


class _Int(int):
    def to(self, *_: Any) -> _Int:
        return self


def _range(*bounds: Any) -> Iterator[_Int]:
    """`range` for kernels that call `.to(tl.int64)` on its numbers, which Triton's own ints have."""
    for i in builtins.range(*(int(b) for b in bounds)):
        yield _Int(i)


@triton.jit
def _probe(a, b, dot, product, cast, N: tl.constexpr):  # noqa: N803
    i = tl.arange(0, N)
    x = tl.load(a + i[:, None] * N + i[None, :])
    y = tl.load(b + i[:, None] * N + i[None, :])
    tl.store(dot + i[:, None] * N + i[None, :], tl.dot(x, y))
    tl.store(product + i[:, None] * N + i[None, :], x * y)
    tl.store(cast + i[:, None] * N + i[None, :], (x.to(tl.float32) * 1.005859375).to(tl.bfloat16))


def self_check() -> None:
    """Run a small kernel and compare with PyTorch, bit for bit where rounding is defined. Raises KernelPathError."""
    import torch

    size = 16
    a, b = torch.randn(2, size, size, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = {
        "bfloat16 product": (a.float() * b.float()).bfloat16(),
        "cast to bfloat16": (a.float() * 1.005859375).bfloat16(),
    }
    dot = torch.empty(size, size)
    product, cast = torch.empty_like(a), torch.empty_like(a)
    _probe[(1,)](a, b, dot, product, cast, N=size)
    wrong = [
        name
        for (name, want), got in zip(exact.items(), (product, cast), strict=True)
        if not torch.equal(got.view(torch.int16), want.view(torch.int16))
    ]
    if not torch.allclose(dot, a.float() @ b.float(), rtol=1e-5, atol=1e-5):
        wrong.append("bfloat16 dot")
    wide = torch.randn(2, size, size, generator=torch.Generator().manual_seed(1))
    for tf32 in (False, True):
        before, EMULATION.tf32 = EMULATION.tf32, tf32
        _probe[(1,)](*wide, dot, torch.empty_like(wide[0]), cast, N=size)
        EMULATION.tf32 = before
        x, y = (torch.from_numpy(truncate_tf32(w.numpy())) if tf32 else w for w in wide)
        if not torch.allclose(dot, x @ y, rtol=1e-5, atol=1e-5):
            wrong.append("TF32 dot" if tf32 else "float32 dot")
    if wrong:
        raise KernelPathError(
            f"Triton {triton.__version__}'s interpreter computes wrongly after taugate's patches: {', '.join(wrong)}; "
            "install a supported release (3.7 to 3.9)"
        )
