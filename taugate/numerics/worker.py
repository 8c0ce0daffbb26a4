"""python -m taugate.numerics.worker interpreted|ieee|tf32: run fla's kernels for another process.

The other side is `taugate.numerics.kernels.Worker`. Messages come in on stdin and go out on what was stdout; anything
that is printed goes to stderr.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from typing import Any

from taugate.errors import TaugateError
from taugate.numerics.kernels import Inputs, call, receive, send


def main(way: str) -> int:
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # fla warns that there is no GPU
    try:
        run = _interpreted() if way == "interpreted" else _on_gpu(way)
        failure = None
    except TaugateError as error:
        failure = str(error)
    except Exception as error:  # of any kind: an incompatible release shows itself in many ways
        failure = f"fla's kernels cannot be run here: {type(error).__name__}: {error}"
    while True:
        try:
            message = receive(stdin)
        except EOFError:
            return 0
        if failure:
            answer: dict[str, Any] = {"error": failure}
        else:
            tf32, path = message.pop("tf32"), message.pop("path")
            try:
                answer = run(path, Inputs(**message), tf32)
            except Exception as error:  # of any kind: the other side must hear of it
                answer = {"error": f"{path} failed in the worker: {type(error).__name__}: {error}"}
        send(stdout, answer)


def _interpreted() -> Any:
    import torch

    torch.set_num_threads(1)
    from taugate.numerics import interpreter

    interpreter.install()
    interpreter.self_check()
    interpreter.load_fla()
    interpreter.EMULATION.launches.clear()

    def run(path: str, inputs: Inputs, tf32: bool) -> dict[str, Any]:
        interpreter.EMULATION.tf32 = tf32
        out, state = call(path, inputs)
        return {"out": out, "state": state, "launches": dict(interpreter.EMULATION.launches)}

    return run


def _on_gpu(way: str) -> Any:
    """Triton takes its default for float32 dots from the environment; the one that fla sets itself is set here."""
    import importlib

    import triton.language as tl
    from triton.runtime.autotuner import Autotuner

    stock = Autotuner.__init__

    def one_config(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, fn, arg_names, configs[len(configs) // 2 :][:1], *args, **kwargs)

    Autotuner.__init__ = one_config
    module = importlib.import_module("fla.ops.gated_delta_rule.chunk_fwd")
    module.SOLVE_TRIL_DOT_PRECISION = tl.constexpr(way)  # type: ignore[attr-defined]
    calls: Counter[str] = Counter()

    def run(path: str, inputs: Inputs, tf32: bool) -> dict[str, Any]:
        calls[path] += 1
        out, state = call(path, inputs.to("cuda"))
        return {"out": out.cpu(), "state": state.cpu(), "launches": dict(calls)}

    return run


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
