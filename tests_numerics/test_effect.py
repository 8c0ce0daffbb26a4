"""Are the hidden states to blame? Δτ between the paths on the shipped pair, beside their divergence layer by layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fixtures.shipped import PAIR, drafter_path

numerics = pytest.mark.numerics


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def drafters():
    from taugate.drafter.checkpoint import identity, read_config
    from taugate.pipeline.evaluate import Judged

    found = [(name, drafter_path(name)) for name in ("candidate", "reference")]
    return [Judged(name, path, identity(path), read_config(path)) for name, path in found]


@pytest.fixture(scope="module")
def short_sequences(shipped_sequences):
    """The two shortest prompts, cut so that each fits one chunk of 64."""
    shortest = sorted(shipped_sequences, key=lambda s: s.prompt_length)[:2]
    return [replace(s, token_ids=s.token_ids[:64], cap=min(s.cap, 64)) for s in shortest]


def check(found, budgets, evidence, prompts):
    """Every level of both paths within budget, and Δτ recorded for every drafter, verifier and source of states."""
    from taugate.target.agreement import judge_ratio, limits

    torch_path, fla = found.divergences
    assert (torch_path.path, fla.path) == ("torch", "fla")
    agreements = judge_ratio(fla, torch_path, budgets, found.target)
    for divergence in found.divergences:
        limit = limits(divergence.dtype, f"{divergence.path}, shipped target", budgets)
        record = divergence.record(found.target, limit)
        assert max(record["mixer"]) <= limit["mixer"] and max(record["propagated"]) <= limit["propagated"]
        assert divergence.top.flips == 0
        evidence.add(record)
    for agreement in agreements:
        evidence.add(agreement.record())
    assert not [str(agreement) for agreement in agreements if not agreement.ok]
    effects = found.records()
    for record in effects:
        evidence.add(record)
        assert record["low"] <= record["difference"] <= record["high"]
        assert record["prompts"] == prompts
    assert len(effects) == 2 * 2 * 3  # sources other than the fallback, drafters, verifiers
    return effects


@numerics(level="propagated")
def test_effect_on_a_few_prompts(drafters, short_sequences, kernels, budgets, evidence):
    """With fla's real kernels, interpreted where there is no GPU."""
    from taugate.pipeline.effect import effect

    found = effect(PAIR / "target", drafters, short_sequences, kernels)
    check(found, budgets, evidence, prompts=2)
    if kernels.device == "cpu":
        assert kernels.launches.total() >= 7 * 6 * 2, "seven kernels in six layers of two sequences"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@numerics(level="propagated")
def test_effect_on_all_prompts(drafters, shipped_sequences, kernels, budgets, evidence):
    """The states of one path are as good as those of the other: |Δτ| below a hundredth of τ."""
    from taugate.pipeline.effect import effect

    found = effect(PAIR / "target", drafters, shipped_sequences, kernels, layers_alone=4)
    for record in check(found, budgets, evidence, prompts=72):
        assert abs(record["difference"]) < 0.03, record


def test_wrong_states_show_in_tau(drafters, shipped_sequences, kernels):
    """The other half of the answer: states that are wrong cost τ at once, far more than the paths differ."""
    import torch

    from taugate.drafter.replay import Verifier
    from taugate.gate.tau import Bootstrap
    from taugate.pipeline.effect import EXACT, _Replay
    from taugate.target.reference import Reference

    reference = Reference.from_checkpoint(PAIR / "target")
    replay = _Replay(PAIR / "target", drafters[:1], [Verifier.parse("chain")], "cpu")
    for sequence in sorted(shipped_sequences, key=lambda s: len(s.token_ids))[:6]:
        exact = reference([list(sequence.token_ids)], head=False)
        replay.add(EXACT, sequence, exact)
        replay.add("one layer early", sequence, replace(exact, outputs=exact.inputs))
        noise = torch.Generator().manual_seed(0)
        shaken = [x + 0.5 * x.std() * torch.randn(x.shape, generator=noise).to(x) for x in exact.outputs]
        replay.add("noise of half their size", sequence, replace(exact, outputs=tuple(shaken)))
    taus = {source: found.tau for (source, *_), found in replay.measured(Bootstrap()).items()}
    assert taus["one layer early"] < taus[EXACT] - 0.1, taus
    assert taus["noise of half their size"] < taus[EXACT] - 0.1, taus


@pytest.mark.parametrize("missing", ["--target", "--drafter", "--prompts", "--completions"])
def test_what_is_not_there_is_one_sentence(missing, capsys, tmp_path):
    from taugate.__main__ import main

    given = {"--target": PAIR / "target", "--drafter": drafter_path("candidate")}
    given |= {"--prompts": PAIR.parent / "prompts.jsonl", "--completions": PAIR.parent / "completions.jsonl"}
    options = [str(part) for option in (given | {missing: tmp_path / "nowhere"}).items() for part in option]
    assert main(["numerics", "effect", *options, "--limit", "1", "--device", "cpu"]) == 1
    said = capsys.readouterr().err.strip()
    assert "nowhere" in said and "\n" not in said
