"""Two captures of the same prompts compared in units of f: by hand, and from the directories that captures leave."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from taugate.errors import EvidenceError, StoreError
from taugate.target.compare import compare, main, source
from taugate.target.results import Results
from taugate.target.store import StateIdentity, StateStore

F = 1.66e-3


def states(seed, tokens=50, scale=1.0):
    made = torch.Generator().manual_seed(seed)
    names = ("tap.2", "tap.10", "final_hidden")
    return {name: scale * torch.randn(tokens, 16, generator=made).double() for name in names}


def test_a_known_distance_comes_out_in_roundings():
    """B plus noise of 3 f everywhere, and one token that is off by as much as it is large."""
    pairs = []
    for number in range(4):
        reference = states(number, scale=10.0**number)  # how large a state is does not matter
        noise = {name: torch.randn(value.shape, generator=torch.Generator().manual_seed(9)).double()
                 for name, value in reference.items()}  # fmt: skip
        ours = {n: v + noise[n] * (3 * F * v.norm() / noise[n].norm()) for n, v in reference.items()}
        pairs.append((str(number), ours, reference))
    pairs[2][1]["tap.2"][7] = 2 * pairs[2][2]["tap.2"][7]
    rows = {row.name: row for row in compare(pairs)}
    assert list(rows) == ["tap.2", "tap.10", "final_hidden"], "layers in their order, the final state last"
    assert (rows["tap.10"].pooled_f, rows["tap.10"].worst_f) == pytest.approx((3, 3), rel=1e-6)
    assert rows["tap.2"].worst_sequence == "2" and rows["tap.2"].token_index == 7
    assert rows["tap.2"].token_f == pytest.approx(1 / F, rel=0.4)
    assert (rows["tap.10"].sequences, rows["tap.10"].tokens, rows["tap.10"].equal) == (4, 200, 0)


def test_equal_bits_are_zero_and_said_to_be_equal():
    rows = compare([("a", states(0), states(0)), ("b", states(1), {n: v + 1e-6 for n, v in states(1).items()})])
    assert all(row.equal == 0.5 and 0 < row.pooled_f < 0.01 for row in rows)


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ({"tap.1": torch.ones(3, 2)}, "cannot be compared"),
        ({"tap.1": torch.full((2, 2), float("nan"))}, "not finite"),
        ({"tap.9": torch.ones(2, 2)}, "no tensor in common"),
    ],
)
def test_what_cannot_be_compared_is_no_agreement(ours, said):
    with pytest.raises(EvidenceError, match=said):
        compare([("a", ours, {"tap.1": torch.ones(2, 2)})])
    with pytest.raises(EvidenceError, match="no sequence in common"):
        compare([])


def rounded(seed, noise):
    return {name: (value + noise * value.roll(1, 0)).bfloat16() for name, value in states(seed).items()}


@pytest.fixture
def outputs(tmp_path):
    """Two output directories that share two of three sequences."""
    facts = {"kernels": {}, "engine": {}, "device": "cpu"}
    for name, noise, ids in (("a", 0.004, (0, 1)), ("b", 0.0, (0, 1, 2))):
        (tmp_path / name).mkdir()
        for number in ids:
            Results(tmp_path / name).write(f"{name}{number}", [number] * 50, rounded(number, noise), facts)
    return tmp_path / "a", tmp_path / "b"


def test_the_command_matches_by_tokens_and_prints_a_table_and_json(outputs, capsys):
    a, b = map(str, outputs)
    assert main([a, b, "--max-f", "10"]) == 0
    out = capsys.readouterr().out
    said = json.loads(out.splitlines()[-1])
    assert (said["only_a"], said["only_b"], said["above"]) == (0, 1, [])
    assert [row["sequences"] for row in said["rows"]] == [2, 2, 2]
    assert all(2 < row["pooled_f"] < 4 for row in said["rows"]) and "final_hidden" in out
    assert main([a, b, "--max-f", "1"]) == 1
    assert "above 1 f: tap.2, tap.10, final_hidden" in capsys.readouterr().out
    assert main([a, a, "--max-f", "0"]) == 0
    assert main([a, str(outputs[0].parent / "nothing")]) == 1
    assert "is no directory of states" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["flip", "remove", "cut json", "no text"])
def test_damaged_results_are_one_sentence_that_names_the_file(outputs, capsys, damage):
    """A flipped bit would otherwise come out as a difference of the engines."""
    file, told = outputs[0] / "a1.safetensors", outputs[0] / "a1.json"
    data = file.read_bytes()
    if damage == "flip":
        file.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    elif damage == "remove":
        file.unlink()
    else:
        told.write_bytes(b"{" if damage == "cut json" else b"\xff")
    assert main([*map(str, outputs)]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and not said.out
    assert str(file if damage in ("flip", "remove") else told) in said.err


def test_two_paths_in_one_store_are_told_apart(tmp_path, capsys):
    store = StateStore(tmp_path, "tiny")
    for path, noise in (("torch", 0.0), ("fla", 0.004)):
        who = StateIdentity("tiny", "w" * 64, "t" * 64, "bfloat16", path, "cpu", {}, "c" * 64)
        save_file(rounded(0, noise), tmp_path / "made.safetensors")
        store.adopt(who.key([0] * 50), tmp_path / "made.safetensors", who.fields([0] * 50), {})
    with pytest.raises(StoreError, match="they differ in kernel_path; choose one with .*@kernel_path="):
        source(str(store.root))
    with pytest.raises(StoreError, match="holds no states with kernel_path=hub"):
        source(f"{store.root}@kernel_path=hub")
    assert main([f"{store.root}@kernel_path=fla", f"{store.root}@kernel_path=torch"]) == 0
    assert 2 < json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]["pooled_f"] < 4
