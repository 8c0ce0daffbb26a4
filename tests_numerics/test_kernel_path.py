"""The kernel path is chosen, proved and put back, whatever transformers has bound."""

from __future__ import annotations

import functools
import importlib
import os
import types

import pytest

from fixtures.shipped import PAIR
from taugate.errors import KernelPathError
from taugate.target.kernels import DELTA_RULE, PATHS, KernelEvidence, kernel_path

MODELING = "transformers.models.qwen3_5.modeling_qwen3_5"
CHUNK = DELTA_RULE[0]


@pytest.fixture
def modeling():
    return importlib.import_module(MODELING)


@pytest.fixture
def fla_bound(modeling, monkeypatch):
    """transformers as it is with fla installed: its wrapper calls a function of fla, which crashes without a GPU."""

    def chunk_gated_delta_rule(q, k, v, g, beta, initial_state=None, **kwargs):
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    implementation = types.FunctionType(
        chunk_gated_delta_rule.__code__, {"RuntimeError": RuntimeError}, "chunk_gated_delta_rule",
        chunk_gated_delta_rule.__defaults__,
    )  # fmt: skip
    implementation.__module__ = "fla.ops.gated_delta_rule.chunk"
    plain = getattr(modeling, CHUNK)
    plain = getattr(plain, "__wrapped__", plain)

    @functools.wraps(plain)
    def wrapped(*args, **kwargs):
        return implementation(*args, **kwargs)

    monkeypatch.setattr(modeling, CHUNK, wrapped)
    return wrapped


def run_target():
    """The tiny target over a few tokens, as transformers has it."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32, local_files_only=True).eval()
    with torch.inference_mode():
        return model.model(torch.tensor([[5, 6, 7]]), use_cache=False).last_hidden_state


def test_fla_bound_on_a_cpu_is_found_before_it_crashes(fla_bound):
    """Left to transformers the forward crashes; asked for, the path is refused; on the path "torch" it runs."""
    from taugate.target.implementations import bound_module

    assert bound_module(fla_bound) == "fla.ops.gated_delta_rule.chunk"
    with pytest.raises(RuntimeError, match="0 active drivers"):
        run_target()
    with (
        pytest.raises(KernelPathError, match=r'needs a GPU.*set capture\.kernel_path = "torch"'),
        kernel_path("fla", "qwen3_5_text", "cpu"),
    ):
        run_target()
    with kernel_path("torch", "qwen3_5_text", "cpu") as ran:
        assert run_target().isfinite().all()
    assert set(ran.require()["layers"]) >= {f"{CHUNK} <- {MODELING}"}


def test_evidence_names_implementation_and_layers():
    from taugate.target.capture import Capture

    for engine in ("resident", "streamed"):
        capture = Capture(str(PAIR / "target"), "torch", "float32", "cpu", [1], engine=engine)
        with kernel_path("torch", capture.model_type, "cpu") as ran:
            capture([5, 6, 7])
        found = ran.require()
        assert found["path"] == "torch"
        assert found["layers"][f"{CHUNK} <- {MODELING}"] == [0, 1, 2, 4, 5, 6], "the Gated DeltaNet layers of the pair"
        assert found["calls"][f"{CHUNK} <- {MODELING}"] == 6


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("torch", "fla.ops.gated_delta_rule.chunk"),
        ("fla", MODELING),
        ("fla", "fla.ops.gated_delta_rule.backends.flash_qla"),
        ("flash_qla", "fla.ops.gated_delta_rule.chunk"),
        ("hub", "fla.ops.gated_delta_rule.chunk"),
        ("hub", MODELING),
    ],
)
def test_another_implementation_than_asked_for_is_refused(path, module):
    """The proof is what ran, not what was configured; FlashQLA in the place of fla counts as another."""
    evidence = KernelEvidence(path, hybrid=True)
    evidence.calls[2, CHUNK, module] = 6
    with pytest.raises(KernelPathError, match=rf"kernel_path is '{path}', but {module} ran in layers \[2\]"):
        evidence.require()


def test_no_implementation_at_all_is_refused():
    with pytest.raises(KernelPathError, match="no gated delta rule was seen"):
        KernelEvidence("torch", hybrid=True).require()
    assert KernelEvidence("torch", hybrid=False).require()["calls"] == {}, "a full-attention target has none"


@pytest.mark.parametrize("path", [path for path in PATHS if path != "torch"])
def test_kernels_that_are_not_there_are_refused(path, modeling):
    """Asked for and not to be had: one sentence, and the modeling module as it was."""
    before = {name: getattr(modeling, name) for name in DELTA_RULE}
    said = {"hub": "cannot be loaded", "flash_qla": "flash_qla is not installed|transformers bound"}.get(path, "bound")
    if path == "fla" and importlib.util.find_spec("fla"):
        pytest.skip("fla is installed here, so the path can be taken")
    with pytest.raises(KernelPathError, match=said), kernel_path(path, "qwen3_5_text", "cuda"):
        pass
    assert {name: getattr(modeling, name) for name in DELTA_RULE} == before


def test_everything_is_put_back_after_an_error(modeling, monkeypatch):
    """Functions of the modeling module, and the switch of fla's FlashQLA backend, which is off on every other path."""
    before = getattr(modeling, CHUNK)
    monkeypatch.setenv("FLA_FLASH_QLA", "yes")
    with pytest.raises(ZeroDivisionError), kernel_path("torch", "qwen3_5_text", "cpu"):
        assert os.environ["FLA_FLASH_QLA"] == "0"
        assert getattr(modeling, CHUNK) is not before
        raise ZeroDivisionError
    assert getattr(modeling, CHUNK) is before
    assert os.environ["FLA_FLASH_QLA"] == "yes"
    monkeypatch.delenv("FLA_FLASH_QLA")
    with kernel_path("torch", "qwen3_5_text", "cpu"):
        pass
    assert "FLA_FLASH_QLA" not in os.environ


@pytest.mark.parametrize("argument", ["cu_seqlens", "seq_idx"])
def test_packed_sequences_are_refused_on_the_torch_path(modeling, argument):
    """The fallback would ignore the boundaries without a word, once its wrapper is gone."""
    with kernel_path("torch", "qwen3_5_text", "cpu"), pytest.raises(KernelPathError, match="one by one"):
        getattr(modeling, CHUNK)(None, None, None, None, None, **{argument: [0, 1]})


def test_an_unknown_path_and_an_old_transformers_are_refused(modeling, monkeypatch):
    with pytest.raises(KernelPathError, match="one of torch, fla, hub, flash_qla"), kernel_path("x", "llama", "cpu"):
        pass
    monkeypatch.delattr(modeling, CHUNK)
    with (
        pytest.raises(KernelPathError, match=r"has no .*transformers 5\.17 and later"),
        kernel_path("torch", "qwen3_5", "cpu"),
    ):
        pass
