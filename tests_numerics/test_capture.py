"""Are captured states what they claim to be: the right layers, from the right path, the same on the host and here?"""

from __future__ import annotations

import pytest

from fixtures.shipped import PAIR

numerics = pytest.mark.numerics


@pytest.fixture(scope="module")
def target():
    """The tiny target in fp32 with every state that transformers itself reports."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def reported(target, shipped_sequences):
    """hidden_states of one sequence as transformers gives them, and its token ids."""
    import torch

    from taugate.target.kernels import kernel_path

    ids = list(shipped_sequences[0].token_ids)
    with torch.inference_mode(), kernel_path("torch", "qwen3_5_text", "cpu"):
        out = target.model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return ids, [state[0] for state in out.hidden_states]


@pytest.fixture(scope="module")
def captured(reported):
    """All eight taps of the same sequence as our capture takes them."""
    from taugate.target.capture import Capture
    from taugate.target.kernels import kernel_path

    capture = Capture(str(PAIR / "target"), "torch", "float32", "cpu", list(range(8)))
    with kernel_path("torch", capture.model_type, "cpu"):
        return capture(reported[0])


@numerics(level="capture")
def test_tap_is_the_raw_output_of_its_layer(captured, reported, evidence):
    """tap.L is hidden_states[L + 1] except at the last layer, where transformers gives the normed state."""
    import torch

    from taugate.numerics.measures import relative_error

    states = reported[1]
    for layer in range(7):
        assert torch.equal(captured[f"tap.{layer}"], states[layer + 1].bfloat16()), f"tap.{layer}"
    assert torch.equal(captured["final_hidden"], states[8].bfloat16())
    apart = relative_error(captured["tap.7"], states[8])
    assert apart > 0.1, "the last layer's tap must not be the normed state"
    evidence.add(
        {
            "type": "agreement",
            "level": "capture",
            "what": "taps against hidden_states",
            "layers": 8,
            "error": 0.0,
        }
    )


@numerics(level="capture")
def test_norm_of_the_last_tap_is_final_hidden(target, captured):
    """Qwen3.5 norms multiply by 1 + w; applied once to the raw tap they give final_hidden, up to one rounding."""
    import torch

    from taugate.numerics.measures import in_roundings, relative_error

    with torch.inference_mode():
        normed = target.model.norm(captured["tap.7"].float())
    assert in_roundings(relative_error(captured["final_hidden"], normed)) < 1.6


@numerics(level="capture")
def test_final_hidden_predicts_the_completion(shipped, evidence):
    from taugate.pipeline.evaluate import fidelity

    found = fidelity(shipped, noise=0.005)
    evidence.add({"type": "agreement", "level": "capture", "what": "on-policy rate", "rate": found.rate})
    assert found.decided > 3000
    assert found.rate >= 0.999
    assert found.near_tie_share < 0.02


@numerics(level="capture")
def test_states_of_another_prompt_are_noticed(shipped):
    """The on-policy rate falls to nothing when states and completions do not belong together."""
    from taugate.gate.fidelity import on_policy
    from taugate.target.store import FINAL_HIDDEN

    pairs = list(shipped.sequences[:6])
    longest = max(pairs, key=lambda s: len(s.token_ids))
    others = [s for s in pairs if s is not longest]
    wrong = shipped.states(longest, [FINAL_HIDDEN])[FINAL_HIDDEN]
    found = on_policy(((s, wrong) for s in others), shipped.head().head, noise=0.005)
    assert found.rate < 0.3


@pytest.mark.gpu_window
@numerics(level="host capture")
def test_states_of_the_host_are_complete_and_agree(dataset, gate_config, judges, evidence):
    """Shapes, finiteness and kernel path of every state; on the embedded host also equal to states computed here."""
    import json

    import torch

    from taugate.numerics.measures import in_roundings, relative_error
    from taugate.target.store import FINAL_HIDDEN, tap_name

    taps = sorted({tap for config in judges.configs for tap in config.target_layer_ids})
    names = [*map(tap_name, taps), FINAL_HIDDEN]
    for sequence in dataset.sequences:
        states = dataset.states(sequence, names)
        for name in names:
            assert states[name].shape == (len(sequence.token_ids), dataset.target.hidden_size), name
            assert states[name].dtype == torch.bfloat16 and states[name].isfinite().all(), name
        meta = json.loads((dataset.store.directory(dataset.key(sequence)) / "meta.json").read_text())
        assert meta["provenance"][-1]["kernels"]["path"] == dataset.identity.kernel_path
    worst = 0.0
    if gate_config.host.kind == "embedded":
        worst = _worst_against_here(dataset, taps, names, relative_error)
        assert in_roundings(worst) < 0.5, "the same code on the same processor may differ by no rounding that shows"
    evidence.add(
        {
            "type": "agreement",
            "level": "host capture",
            "sequences": len(dataset.sequences),
            "worst_f": in_roundings(worst),
        }
    )


def _worst_against_here(dataset, taps, names, relative_error) -> float:
    from taugate.target.capture import Capture
    from taugate.target.kernels import kernel_path

    capture = Capture(str(PAIR / "target"), "torch", dataset.identity.dtype, "cpu", taps)
    worst = 0.0
    with kernel_path("torch", capture.model_type, "cpu") as ran:
        for sequence in dataset.sequences[:8]:
            here, there = capture(list(sequence.token_ids)), dataset.states(sequence, names)
            worst = max(worst, *(relative_error(there[name], here[name]) for name in names))
    ran.require()
    return worst
