"""The interpreter that runs fla's kernels on a CPU: right in bfloat16, and loud when a release has changed under it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

numerics = pytest.mark.numerics


@pytest.fixture
def interpreted(kernels):
    if kernels.device != "cpu":
        pytest.skip("on a GPU the kernels are not interpreted")
    return kernels.worker("interpreted")


# Each case spoils one thing in a fresh process as a release of Triton or fla might; all of them run in one process.
SABOTAGE = """
import json
import numpy as np
import triton
from triton.runtime import interpreter as stock
from taugate.errors import KernelPathError
from taugate.numerics import interpreter

found = {}
def attempt(name, action):
    try:
        action()
        found[name] = "accepted"
    except KernelPathError as error:
        found[name] = str(error)

def with_attribute(owner, name, value, action):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        attempt(f"{getattr(owner, '__name__', 'module')}.{name}", action)
    finally:
        setattr(owner, name, before)

with_attribute(triton, "__version__", "3.6.0", interpreter.install)
with_attribute(stock.InterpreterBuilder, "create_dot", lambda self, a, b: None, interpreter.install)
with_attribute(stock, "_patch_lang", lambda fn, scope: None, interpreter.install)
with_attribute(interpreter.metadata, "version", lambda name: "0.7.0", interpreter.load_fla)
interpreter.install()
attempt("patched", interpreter.self_check)
truncate = lambda values: (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
with_attribute(interpreter, "encode", truncate, interpreter.self_check)
with_attribute(interpreter, "truncate_tf32", lambda values: values * np.float32(1.01), interpreter.self_check)
print(json.dumps(found))
"""


@numerics(level="interpreter")
def test_changed_releases_are_refused():
    """Wrong version, changed signatures, another fla; and arithmetic that is not what the patches are meant to give."""
    if _old_triton():
        pytest.skip("this Triton is too old for the interpreter, which is for machines without a GPU")
    done = subprocess.run(
        [sys.executable, "-c", SABOTAGE],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert "needs Triton 3.7 or later, not 3.6.0" in found["triton.__version__"]
    assert "has changed the interpreter's create_dot" in found["InterpreterBuilder.create_dot"]
    assert "has changed the interpreter's _patch_lang" in found["triton.runtime.interpreter._patch_lang"]
    assert "not 0.7.0" in found["importlib.metadata.version"]
    assert found["patched"] == "accepted"
    assert "computes wrongly" in found["taugate.numerics.interpreter.encode"]
    assert "cast to bfloat16" in found["taugate.numerics.interpreter.encode"]
    assert found["taugate.numerics.interpreter.truncate_tf32"] == "accepted", "the check compares with its own rounding"


def _old_triton():
    import triton

    return tuple(int(x) for x in triton.__version__.split(".")[:2]) < (3, 7)


@numerics(level="interpreter")
def test_rounding_is_to_nearest_even():
    """All 2^16 bit patterns come back as they were, and halves and their neighbours round as PyTorch rounds them."""
    import numpy as np
    import torch

    from taugate.numerics.bits import decode, encode, truncate_tf32

    every = np.arange(2**16, dtype=np.uint16)
    values = decode(every)
    assert np.array_equal(values, torch.from_numpy(every.view(np.int16)).view(torch.bfloat16).float().numpy(), True)
    finite = values[np.isfinite(values)]
    bits = finite.view(np.uint32)
    for low in (0x7FFF, 0x8000, 0x8001, 0x0001, 0xFFFF):  # around one half of the last place
        near = (bits | np.uint32(low)).view(np.float32)
        near = near[np.isfinite(near)]
        want = torch.from_numpy(near.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(encode(near), want)
    assert np.isnan(decode(encode(np.array([np.nan], np.float32)))).all()
    assert truncate_tf32(np.array([1 + 2**-10 + 2**-11], np.float32))[0] == np.float32(1 + 2**-10)


@numerics(level="interpreter")
def test_tf32_is_as_coarse_as_on_an_h200(interpreted, evidence):
    """An H200's chunk kernel in float32 was off by 1.47e-3 on inputs drawn like these; rounding would give 4e-4."""
    import torch

    from taugate.numerics.kernels import Inputs
    from taugate.numerics.measures import relative_error
    from taugate.numerics.reference import gated_delta_rule

    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 128, 1, 128, generator=draw) for _ in range(3))
    beta, g = torch.rand(1, 128, 1, generator=draw).sigmoid(), -0.1 * torch.rand(1, 128, 1, generator=draw)
    error = relative_error(
        interpreted.run("fla-chunk", Inputs(q, k, v, g, beta), tf32=True)[0], gated_delta_rule(q, k, v, g, beta)[0]
    )
    assert 1.2e-3 < error < 1.8e-3
    evidence.add(
        {"type": "agreement", "level": "interpreter", "what": "TF32 error, 1.47e-3 on an H200", "value": error}
    )


def test_a_failing_kernel_is_one_sentence(interpreted):
    """An error in the worker comes back as an error of the kernel path, and the worker goes on."""
    from dataclasses import replace

    from taugate.errors import KernelPathError
    from taugate.numerics.cases import Case

    inputs = Case("4 tokens", 4, value_heads=1, key_dim=16, value_dim=8).inputs("fp32", 0)
    with pytest.raises(KernelPathError, match="fla-chunk failed in the worker: "):
        interpreted.run("fla-chunk", replace(inputs, chunk_size=7))
    out, _ = interpreted.run("fla-recurrent", inputs)
    assert out.isfinite().all()


def test_a_worker_that_died_is_one_sentence():
    from taugate.errors import KernelPathError
    from taugate.numerics.cases import Case
    from taugate.numerics.kernels import Worker

    worker = Worker("interpreted")
    worker._process.kill()
    worker._process.wait()
    with pytest.raises(KernelPathError, match="ended with code -9"):
        worker.run("fla-chunk", Case("4 tokens", 4).inputs("fp32", 0))
    worker.close()


def test_this_process_is_not_changed(interpreted):
    """Triton here is as it was: interpreting happens elsewhere."""
    import triton

    assert not triton.knobs.runtime.interpret
    assert "TRITON_INTERPRET" not in os.environ
