"""On a GPU the replay takes other kernels, and the host looks on one step late: cycles are those of the CPU."""

from __future__ import annotations

import pytest
import torch

from taugate.drafter.judge import Drafts, judge
from taugate.drafter.replay import Verifier, anchor_table, walk, walk_together

from . import tiny
from .test_replay import KINDS, VERIFIERS, made

pytestmark = [pytest.mark.gpu, pytest.mark.drafter]


@pytest.fixture(autouse=True)
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU on this machine")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_cycles_and_tables_are_those_of_the_cpu(kind):
    model, embedding, head, items = made(kind, 5, [9, 30, 20, 3, 14], [None, 17, 5, None, 11])
    tables = [anchor_table(model, s, taps, embedding, head, VERIFIERS, 8, predict=True) for s, taps in items]
    there = [part.cuda() for part in (tiny.drafter(KINDS[kind], 5), embedding, head)]
    for mine, (sequence, taps) in zip(tables, items, strict=True):
        found = anchor_table(there[0], sequence, taps, *there[1:], VERIFIERS, 8, predict=True)
        assert found.accepted == mine.accepted and found.arrivals == mine.arrivals
        assert found.predicted.keys() == mine.predicted.keys() and len(mine.predicted) > 1
        for name, expected in mine.predicted.items():
            assert found.predicted[name] == pytest.approx(expected, rel=1e-3)
    for verifier in VERIFIERS:
        walked = walk_together(there[0], iter(items), *there[1:], verifier, 3)
        assert [cycles for _, cycles in walked] == [walk(table, verifier.name) for table in tables]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_vocabulary_is_judged_as_on_the_cpu(dtype):
    """Ranks, lists and second looks of 50,000 logits, ties included."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(40, 6, 50_001, generator=generator) * 4).to(dtype)
    truth = logits.float().div(0.8).softmax(-1).flatten(0, 1).multinomial(1, generator=generator).view(40, 6)
    truth[::3, 4:] = -1
    slots = torch.where(torch.arange(40) % 3 == 0, 4, 6)
    names = ("chain", "topk-8", "topk-500", "ddtree-8", "ddtree-100", "ddtree-1024")
    verifiers = [Verifier.parse(name) for name in names]
    mine = judge(Drafts(logits, truth, slots), verifiers)
    found = judge(Drafts(logits.cuda(), truth.cuda(), slots.cuda()), verifiers)
    for name in names:
        assert found.accepted[name].tolist() == mine.accepted[name].tolist(), name
    assert len(set(mine.accepted["ddtree-1024"].tolist())) >= 4
