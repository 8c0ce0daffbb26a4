"""Fused kernels compute in the modules' order of roundings, and are believed only where they have proved equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taugate.target.fused import Fused, fused_modules
from taugate.target.kernels import kernel_path, modeling_module

# The kernels by Triton's interpreter in one process, against the same arithmetic written out in PyTorch. Only the
# functions of CUDA's library are replaced, by what they approximate: float64's, rounded once.
INTERPRETED = """
import json
from types import SimpleNamespace
import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle
from taugate.numerics import interpreter
interpreter.install()
from taugate.target import fused_attention, fused_kernels as kernels

def once(function):
    def rounded(x):
        values = function(x.handle.data.astype(np.float64)).astype(np.float32)
        return tl.tensor(TensorHandle(values, tl.float32), x.type)
    return rounded

np.seterr(all="ignore")
kernels.libdevice = fused_attention.libdevice = SimpleNamespace(exp=once(np.exp), log1p=once(np.log1p))
torch.manual_seed(0)
found = {}

def compare(name, got, want):
    same = all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, want, strict=True))
    found[name] = found.get(name, True) and same

def exp(x):
    return x.double().exp().float()

def silu(x):
    return x.float() / (1 + exp(-x.float()))

def factor(x, order, eps):
    # rsqrt(mean of squares + eps) [R, 1]: 32 lanes, each with four sums over the row; then a tree over the lanes.
    side_by_side, farthest_first = order
    squares = x.float() ** 2
    groups = x.shape[-1] // 128
    parts = squares.view(-1, groups, 32, 4) if side_by_side else squares.view(-1, groups, 4, 32).transpose(2, 3)
    sums = torch.zeros(len(x), 32, 4)
    for group in range(groups):
        sums = sums + parts[:, group]
    lanes = ((sums[..., 0] + sums[..., 1]) + sums[..., 2]) + sums[..., 3]
    while (half := lanes.shape[1] // 2):
        pairs = (lanes[:, :half], lanes[:, half:]) if farthest_first else (lanes[:, 0::2], lanes[:, 1::2])
        lanes = pairs[0] + pairs[1]
    return torch.rsqrt(lanes * (1 / x.shape[-1]) + eps)

def draw(rows, width):
    # Rows of the same values, and an eps that takes away their mean: what is left is how each sum was rounded.
    values = (torch.randn(width) * torch.rand(width).mul(6).exp2()).bfloat16()
    shuffled = torch.stack([values[torch.randperm(width)] for _ in range(rows)])
    return shuffled, float(values.double().square().mean()) * (2**-17 - 1)

distinct = set()
for width, rows in ((128, 48), (256, 33), (1152, 17)):
    weight = (torch.randn(width) * 0.1).bfloat16()
    plain, cancelling = draw(rows, width)
    x = torch.cat([plain, plain[:, :16]], 1)[None, :, :width]
    for order in kernels.ORDERS:
        for eps in (1e-6, cancelling):
            want = (x[0].float() * factor(x[0], order, eps) * (1 + weight.float())).bfloat16()
            compare(f"norm {order}", kernels.rms_norm(x, weight, eps, order), want[None])
        distinct.add((width, want.float().numpy().tobytes()))

(x, eps), gate = draw(60, 128), torch.randn(20, 960).bfloat16()[:, 256:640]  # three heads
for dtype in (torch.float32, torch.bfloat16):
    weight = torch.rand(128).to(dtype)
    for order in kernels.ORDERS:
        want = weight * (x.float() * factor(x, order, eps)).bfloat16()
        want = (want.float() * silu(gate.reshape(60, 128))).bfloat16()
        compare(f"gated norm, {dtype}", kernels.rms_norm(x, weight, eps, order, gate), want)
        distinct.add((dtype, want.float().numpy().tobytes()))
found["orders differ"] = len(distinct) == 5 * len(kernels.ORDERS)

gate, up = torch.randn(1, 9, 2 * 1040).bfloat16().chunk(2, -1)
want = (silu(gate).bfloat16().float() * up.float()).bfloat16()
compare("silu product", kernels.silu_product(gate, up), want)

for tokens in (16, 17, 31, 32, 70):
    x, weight = torch.randn(tokens, 656).bfloat16()[:, :592], torch.randn(592, 4).bfloat16()
    padded, total = torch.cat([torch.zeros(3, 592), x.float()]), torch.zeros(tokens, 592)
    for tap in range(4):
        total = total + padded[tap : tap + tokens] * weight[:, tap].float()
    want = silu(total.bfloat16()).bfloat16()
    split = want.split([256, 256, 80], 1)
    got = kernels.convolution(x, weight, 256)
    compare("convolution in three", got, split)
    found["contiguous"] = found.get("contiguous", True) and all(part.is_contiguous() for part in got)
    compare("convolution unsplit", kernels.convolution(x, weight)[2:], [want])

a, b = (30 * torch.randn(1, 37, 96)).bfloat16().split(48, -1)  # as they lie in one product
a[0, 0, :2] = torch.tensor([20.125, 100])
for dtype in (torch.float32, torch.bfloat16):
    a_log, dt_bias = (torch.rand(48) * 2).to(dtype), torch.randn(48).to(dtype)
    dt_bias[:2] = 0
    step = a.float() + dt_bias.float()
    softplus = torch.where(step > 20, step, torch.log1p(exp(step).double()).float())
    decay = -exp(a_log.float()) * softplus
    compare(f"gates, {dtype}", kernels.gates(a, b, a_log, dt_bias), (decay, (1 / (1 + exp(-b.float()))).bfloat16()))

q = torch.randn(1, 20, 3, 256).bfloat16().transpose(1, 2)
for turned in (64, 256):
    cos, sin = torch.randn(2, 1, 20, turned).bfloat16()
    first, second = q[..., : turned // 2], q[..., turned // 2 : turned]
    want = q[..., :turned] * cos + torch.cat([-second, first], -1) * sin
    got = fused_attention.rotary(q, cos, sin)
    compare(f"rotary {turned}", got, torch.cat([want, q[..., turned:]], -1))

gate = torch.randn(1, 20, 3, 512).bfloat16()[..., 256:]  # beside the queries, as it lies in one product
for out in (q, q.contiguous()):
    want = out.transpose(1, 2).float() * (1 / (1 + exp(-gate.float()))).bfloat16().float()
    compare("gated", fused_attention.gated(out, gate), want.bfloat16())
found["gated contiguous"] = fused_attention.gated(q, gate).is_contiguous()
print(json.dumps(found))
"""


@pytest.mark.numerics(level="interpreter")
def test_kernels_give_the_bits_of_the_arithmetic_written_out(evidence):
    """Every kernel, with spaced rows and sizes that no block divides; norms in each order in which PyTorch sums."""
    import triton

    if tuple(int(x) for x in triton.__version__.split(".")[:2]) < (3, 7):
        pytest.skip("this Triton is too old for the interpreter, which is for machines without a GPU")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [name for name, same in found.items() if not same] == []
    assert len(found) == 4 + 1 + 2 + 1 + 3 + 2 + 2 + 2
    what = "fused kernels, the arithmetic written out"
    evidence.add({"type": "agreement", "level": "interpreter", "what": what, "error": 0.0})


@pytest.fixture
def recording(monkeypatch):
    """Whether a graph is being recorded, as CUDA tells; recording["now"] = True to say so."""
    import torch

    state = {"now": False}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["now"])
    return state


class Module:
    """A module and its fused stand-in, of which each way adds its own number; counts what ran."""

    def __init__(self, *ways):
        self.ways, self.ran = ways, []

    def own(self, x):
        self.ran.append("own")
        return x + 1

    def call(self, fused, x, kind="norm", key=None):
        def there(way):
            self.ran.append(way)
            return x + way

        return fused.call(kind, key or tuple(x.shape), there, lambda: self.own(x), self.ways)


def test_the_way_that_equals_the_module_is_found_and_used_alone(recording):
    import torch

    fused, module, x = Fused(), Module(3, 2, 1, 0), torch.arange(4.0)
    assert torch.equal(module.call(fused, x), x + 1)
    assert module.ran == ["own", 3, 2, 1, 1], "what equals is tried once more"
    assert torch.equal(module.call(fused, 2 * x), 2 * x + 1)
    assert module.ran == ["own", 3, 2, 1, 1, 1], "the module itself is not needed again"
    assert torch.equal(module.call(fused, x[:2]), x[:2] + 1)
    assert module.ran[6:] == ["own", 3, 2, 1, 1], "another shape has to prove itself"
    assert fused.facts() == {"used": ["norm"]}


def test_at_a_difference_a_shape_is_given_up_for_good(recording):
    import torch

    fused, module, x = Fused(), Module(1), torch.arange(4.0)
    module.call(fused, x)
    module.ways = (2, 3)
    for _ in range(2):
        assert torch.equal(module.call(fused, x[:3]), x[:3] + 1)
    assert module.ran == ["own", 1, 1, "own", 2, 3, "own"]
    assert torch.equal(module.call(fused, x), x + 1)
    assert module.ran[-1] == 1, "what had proved equal stays in use"
    assert fused.facts() == {"used": ["norm"], "refused": {"norm": "1 shapes, first: other bits for (3,)"}}


def test_what_is_not_repeatable_does_not_pass_by_luck(recording):
    import torch

    fused, x, results = Fused(), torch.arange(4.0), iter([1, 2])
    fused.call("norm", 4, lambda _: x + next(results), lambda: x + 1, (None,))
    assert fused.facts()["refused"].keys() == {"norm"} and not fused.facts()["used"]


def test_a_kernel_that_fails_is_refused_and_the_capture_goes_on(recording):
    """As one does that another release of Triton cannot compile; want of memory is no such failure."""
    import torch

    def fails(error):
        raise error

    fused, x = Fused(), torch.arange(4.0)
    for _ in range(2):
        found = fused.call("norm", 4, lambda _: fails(RuntimeError("no such intrinsic\nmore")), lambda: x + 1, (1, 2))
        assert torch.equal(found, x + 1)
    refused = {"norm": "1 shapes, first: RuntimeError (no such intrinsic) for 4"}
    assert fused.facts() == {"used": [], "refused": refused}
    with pytest.raises(torch.OutOfMemoryError):
        fused.call("MLP", 4, lambda _: fails(torch.OutOfMemoryError("full")), lambda: x + 1, (1,))
    fused.call("rotary", 4, lambda way: fails(KeyError()) if way else x + 1, lambda: x + 1, (1, 0))
    assert fused.facts()["used"] == ["rotary"]


def test_nothing_unproved_is_used_while_a_graph_is_recorded(recording):
    import torch

    fused, module, x = Fused(), Module(1), torch.arange(4.0)
    recording["now"] = True
    for _ in range(2):
        assert torch.equal(module.call(fused, x), x + 1)
    assert module.ran == ["own", "own"] and fused.facts() == {"used": []}
    recording["now"] = False
    module.call(fused, x)
    recording["now"] = True
    module.call(fused, x)
    assert module.ran == ["own", "own", "own", 1, 1, 1]


def test_every_tensor_of_a_result_has_to_be_equal_and_laid_out_alike(recording):
    """Queries and keys: attention chooses its kernel by their layout."""
    import torch

    fused, x = Fused(), torch.randn(3, 4)
    fused.call("another key", 1, lambda _: (x, x + 1), lambda: (x, x), (None,))
    fused.call("another layout", 1, lambda _: (x, x.T.contiguous().T), lambda: (x, x), (None,))
    fused.call("rotary", 1, lambda _: (x, x.clone()), lambda: (x, x), (None,))
    assert fused.facts()["used"] == ["rotary"]
    assert fused.facts()["refused"].keys() == {"another key", "another layout"}


@settings(deadline=None, max_examples=200)
@given(
    calls=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 4), st.booleans()), max_size=20),
    right=st.dictionaries(st.tuples(st.sampled_from("ab"), st.integers(1, 4)), st.sampled_from([(1,), (2, 1), (2,)])),
)
def test_whatever_is_called_the_result_is_the_modules(calls, right):
    """Kinds and shapes in any order, recorded or not: right says which ways there are, of which 1 is the module's."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        fused = Fused()
        for kind, size, recorded in calls:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda recorded=recorded: recorded)
            x = torch.randn(size)
            module = Module(*right.get((kind, size), (1,)))
            assert torch.equal(module.call(fused, x, kind), x + 1)


def test_kernels_that_cannot_be_imported_are_no_error(monkeypatch):
    fused = Fused()
    monkeypatch.setitem(sys.modules, "taugate.target.fused_forwards", None)
    with kernel_path("torch", "qwen3_5", "cpu"), fused_modules(fused, "qwen3_5"):
        pass
    assert "ModuleNotFoundError" in fused.facts()["refused"]["all"]


FAMILIES = ("qwen3_5_text", "qwen3_5_moe", "qwen3_next")


def functions(model_type):
    """Everything callable of the modeling module and its classes, by name."""
    module = modeling_module(model_type)
    found = {name: value for name, value in vars(module).items() if callable(value)}
    for name, cls in list(found.items()):
        if isinstance(cls, type):
            found |= {f"{name}.{attribute}": value for attribute, value in vars(cls).items() if callable(value)}
    return found


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_class_and_function_is_restored(model_type):
    """Within the body each kind of the family is replaced; afterwards all is as it was, also after an exception."""
    before = functions(model_type)
    with kernel_path("torch", model_type, "cpu"):
        on_path = functions(model_type)
        for fails in (False, True):
            try:
                with fused_modules(Fused(), model_type):
                    within = functions(model_type)
                    if fails:
                        raise KeyError
            except KeyError:
                pass
            assert functions(model_type) == on_path
    assert functions(model_type) == before
    changed = {name.removesuffix(".forward") for name in within if within[name] is not on_path[name]}
    kinds = ("RMSNorm", "RMSNormGated", "MLP", "GatedDeltaNet", "Attention", "causal_conv1d_fn", "apply_rotary_pos_emb")
    for ending in kinds:
        assert sum(name.endswith(ending) for name in changed) == 1, ending
    assert len(changed) == 7, "nothing of the vision part"


def test_a_target_without_such_layers_is_left_alone():
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    with fused_modules(Fused(), "llama"):
        assert dict(vars(modeling_llama)) == before


def test_on_a_cpu_every_module_runs_its_own_forward():
    """A model in bfloat16 whose sizes all fit, so that the device alone decides."""
    import torch

    from taugate.target.random_model import FULL, LINEAR, random_model

    sizes = {
        "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "layer_types": [LINEAR, FULL],
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 128, "linear_num_key_heads": 1,
        "linear_num_value_heads": 1, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }  # fmt: skip
    model = random_model(sizes, dtype="bfloat16").model
    ids, fused = torch.arange(40)[None], Fused()
    with kernel_path("torch", "qwen3_5_text", "cpu") as alone:
        expected = model(ids, use_cache=False).last_hidden_state
    with kernel_path("torch", "qwen3_5_text", "cpu") as ran, fused_modules(fused, "qwen3_5_text"):
        assert torch.equal(model(ids, use_cache=False).last_hidden_state, expected)
    assert fused.facts() == {"used": []}
    assert ran.calls == alone.calls, "and nothing ran twice"
