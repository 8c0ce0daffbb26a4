"""Walk and table mode give the same cycles, and both give those of drafting one block at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from taugate.drafter.judge import Drafts, judge
from taugate.drafter.replay import Verifier, anchor_table, walk, walk_together
from taugate.drafter.tree import scores
from taugate.drafter.treecount import pop_numbers
from taugate.errors import EvidenceError

from . import oracles, tiny

MIXED = ("sliding_attention", "full_attention")
VERIFIERS = [Verifier.parse(name) for name in ("chain", "ddtree-3", "ddtree-8", "ddtree-40", "topk-2", "topk-8")]
KINDS = {
    "full": tiny.raw_config(),
    "mixed": tiny.raw_config(MIXED),
    "dflash2": tiny.raw_config(MIXED, is_causal=False, nested=tiny.DFLASH2),
}


def made(kind, seed, lengths, ends):
    """A drafter, its target's tables, and texts of several lengths with their states."""
    model = tiny.drafter(KINDS[kind], seed)
    embedding, head = tiny.tables(model.config, seed)
    generator, items = torch.Generator().manual_seed(seed), []
    for prompt, end in zip(lengths, ends, strict=True):
        taps = torch.randn(prompt + 24, 2 * tiny.HIDDEN, generator=generator)
        items.append((tiny.text(model, prompt, 24, taps, embedding, head, generator, end), taps))
    return model, embedding, head, items


@settings(deadline=None, derandomize=True, max_examples=8, phases=[Phase.generate])
@given(st.sampled_from(sorted(KINDS)), st.integers(0, 99), st.data())
def test_walk_and_table_give_the_cycles_of_single_blocks(kind, seed, data):
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    ends = [data.draw(st.none() | st.integers(0, 30)) for _ in lengths]
    model, embedding, head, items = made(kind, seed, lengths, ends)
    batch = data.draw(st.integers(1, 5))
    tables = [anchor_table(model, s, taps, embedding, head, VERIFIERS, batch) for s, taps in items]
    for verifier in VERIFIERS:
        together = list(walk_together(model, iter(items), embedding, head, verifier, batch))
        assert [sequence for sequence, _ in together] == [sequence for sequence, _ in items]
        assert [cycles for _, cycles in together] == [walk(table, verifier.name) for table in tables]
    for table, (sequence, taps) in zip(tables, items, strict=True):
        wanted = tiny.slow_chain(model, sequence, taps, embedding, head)
        assert [cycle.emitted for cycle in walk(table, "chain")] == wanted
        assert sum(wanted) == len(sequence.token_ids) - sequence.prompt_length - 1


@pytest.mark.parametrize("kind", ["full", "mixed"])
def test_every_anchor_is_judged_as_brute_force_judges_it(kind):
    model, embedding, head, items = made(kind, 5, [9, 20], [None, 17])
    seen = set()
    for sequence, taps in items:
        table = anchor_table(model, sequence, taps, embedding, head, VERIFIERS, 7)
        for row, anchor in enumerate(sequence.anchors()):
            size = sequence.block_size(anchor, model.config.block_size)
            logits, drafted = tiny.draft(model, sequence.token_ids, taps, anchor, size, embedding, head)
            truth = sequence.token_ids[anchor + 1 : anchor + size]
            order = logits.sort(dim=-1, descending=True, stable=True).indices.tolist()
            ranks = [slot.index(token) for slot, token in zip(order, truth, strict=False)]
            heap = oracles.heap_order(scores(np.sort(logits.double().log_softmax(-1).numpy())[None, :, ::-1])[0], 60)
            for verifier in VERIFIERS:
                if verifier.kind == "ddtree":
                    wanted = oracles.depth_in(heap[: verifier.size], ranks)
                else:
                    wanted = next((d for d, rank in enumerate(ranks) if rank >= verifier.size), len(ranks))
                assert table.accepted[verifier.name][row] == wanted, (anchor, verifier.name)
            seen.add(table.accepted["chain"][row])
            # The oracle ordering of the design holds at every anchor.
            depth = {name: table.accepted[name][row] for name in table.accepted}
            assert depth["ddtree-3"] <= depth["ddtree-8"] <= depth["ddtree-40"]
            assert depth["topk-8"] >= depth["ddtree-8"] and depth["topk-8"] >= depth["topk-2"] >= depth["chain"]
            assert depth["chain"] <= table.depth("ddtree-1024", anchor), "a tree that wide holds the whole chain here"
    assert {0, 5} <= seen and len(seen) >= 5, "runs of every kind were meant to occur"


def test_any_budget_can_be_read_from_one_table():
    model, embedding, head, items = made("full", 5, [9], [None])
    ((sequence, taps),) = items
    one = anchor_table(model, sequence, taps, embedding, head, [Verifier.parse("ddtree-1")])
    names = [f"ddtree-{n}" for n in (2, 5, 13, 100, 1024)]
    all_of_them = anchor_table(model, sequence, taps, embedding, head, [Verifier.parse(n) for n in names])
    for name in names:
        assert walk(one, name) == walk(all_of_them, name)
    with pytest.raises(EvidenceError, match="made without topk-3"):
        walk(one, "topk-3")


def test_memory_is_bounded_by_the_batch_not_by_the_prompts():
    model, embedding, head, items = made("full", 1, [5] * 7, [None] * 7)
    alive = []

    def stream():
        for number, item in enumerate(items):
            alive.append(number)
            yield item

    walked = walk_together(model, stream(), embedding, head, VERIFIERS[0], prompts_per_batch=2)
    next(walked)
    assert len(alive) == 2, "states are read only for the batch at work"
    assert len(list(walked)) == 6


def test_a_sequence_that_the_prefill_ended_has_no_cycle():
    model, embedding, head, items = made("full", 1, [5, 5], [0, 3])
    (sequence, taps), other = items
    short = type(sequence)("short", sequence.token_ids[:6], 5, sequence.cap)
    walked = dict(
        (s.prompt_id, cycles)
        for s, cycles in walk_together(model, [(short, taps), other], embedding, head, VERIFIERS[0])
    )
    assert walked["short"] == [] and walked["text"]


@pytest.mark.parametrize("name", ["tree-8", "ddtree-0", "topk", "ddtree-1025"])
def test_an_unknown_verifier_is_refused(name):
    with pytest.raises(EvidenceError, match=name):
        Verifier.parse(name)


def test_damaged_logits_are_an_error_and_no_number():
    model, embedding, head, items = made("full", 1, [5], [None])
    ((sequence, taps),) = items
    with pytest.raises(EvidenceError, match="not finite"):
        anchor_table(model, sequence, taps * float("nan"), embedding, head, VERIFIERS)


def test_equal_logits_are_ranked_by_token():
    """As argmax and a stable sort do; most logits here have equals, also beyond the lists looked at."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 3, (60, 4, 300), generator=generator).float()
    truth = torch.randint(0, 300, (60, 4), generator=generator)
    truth[::2, 0] = logits[::2, 0].argmax(-1)
    names = ("chain", "topk-50", "topk-120", "topk-250", "ddtree-90", "ddtree-700")
    found = judge(Drafts(logits, truth, torch.full((60,), 4)), [Verifier.parse(name) for name in names]).accepted
    order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = (order.indices == truth[..., None]).int().argmax(-1).numpy()
    for name in names[:4]:
        size = Verifier.parse(name).size
        assert found[name].tolist() == np.logical_and.accumulate(ranks < size, axis=1).sum(1).tolist(), name
    listed = scores((order.values - logits.logsumexp(-1, keepdim=True)).double().numpy())
    for row in range(60):
        heap = oracles.heap_order(listed[row], 700)
        for size in (90, 700):
            assert found[f"ddtree-{size}"][row] == oracles.depth_in(heap[:size], ranks[row].tolist())
    assert len(set(found["ddtree-700"].tolist())) > 1


@settings(deadline=None, derandomize=True, max_examples=40, phases=[Phase.generate])
@given(st.integers(0, 999), st.sampled_from([20, 128, 300, 2000]), st.sampled_from([0.5, 3.0, 9.0]), st.booleans())
def test_trees_from_logits_are_those_of_complete_lists(seed, vocabulary, spread, pruned):
    """Sharp and flat slots, cut blocks, ties, truths that a pruned vocabulary does not have."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(12, 4, vocabulary, generator=generator) * spread).mul(4).round().div(4)
    if pruned:
        logits[..., vocabulary // 3 :] = float("-inf")
    order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.empty(12, 4).exponential_(0.3, generator=generator).long().clamp(max=vocabulary - 1)
    ranks[::3, 1] = torch.randint(0, vocabulary, (4,), generator=generator)
    slots = torch.randint(2, 5, (12,), generator=generator)
    ranks[torch.arange(4) >= slots[:, None]] = -1
    truth = torch.where(ranks < 0, -1, order.indices.gather(-1, ranks.clamp(min=0)[..., None])[..., 0])
    names = ("chain", "topk-8", "ddtree-8")
    found = judge(Drafts(logits, truth, slots), [Verifier.parse(name) for name in names])
    total = order.values[..., :1] - logits.softmax(-1).amax(-1, keepdim=True).log()
    listed = scores((order.values.double() - total.double()).numpy(), slots.numpy())
    assert found.arrivals.tolist() == pop_numbers(listed, ranks.numpy(), 1024)[0].tolist()
    for name, size in (("chain", 1), ("topk-8", 8)):
        ok = ((ranks >= 0) & (ranks < size)).numpy()
        assert found.accepted[name].tolist() == np.logical_and.accumulate(ok, axis=1).sum(1).tolist()


@settings(deadline=None, derandomize=True, max_examples=40, phases=[Phase.generate])
@given(st.integers(0, 999), st.sampled_from([20, 128, 300]), st.sampled_from([1, 4, 16]))
def test_the_ranks_that_no_tree_asks_for_are_exact(seed, vocabulary, ties):
    """Flat slots, in which every tree ends early while the oracles of a wide beam go on; most logits have equals."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(10, 6, vocabulary, generator=generator).mul(ties).round().div(ties)
    logits[::2, 3] = float("-inf")  # a pruned vocabulary, down to a few tokens
    logits[::2, 3, 5:9] = 0.0
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    ranks = torch.randint(0, min(vocabulary, 90), (10, 6), generator=generator)
    truth = order.gather(-1, ranks[..., None])[..., 0]
    names = ("chain", "topk-8", "topk-60", "topk-85", "ddtree-8")
    found = judge(Drafts(logits, truth, torch.full((10,), 6)), [Verifier.parse(name) for name in names]).accepted
    for name, size in (("chain", 1), ("topk-8", 8), ("topk-60", 60), ("topk-85", 85)):
        wanted = np.logical_and.accumulate(ranks.numpy() < size, axis=1).sum(1)
        assert found[name].tolist() == wanted.tolist(), name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("vocabulary", [130, 256])
def test_one_logit_that_is_not_finite_is_an_error(value, vocabulary):
    """In any slot, also one that no candidate reaches."""
    for token in (0, vocabulary - 1):
        logits = torch.zeros(3, 4, vocabulary)
        logits[2, 3, token] = value
        truth = torch.full((3, 4), vocabulary - 2)
        with pytest.raises(EvidenceError, match="not finite"):
            judge(Drafts(logits, truth, torch.full((3,), 4)), VERIFIERS)


def test_anchors_may_only_grow():
    """Blocks are written over context that no later anchor sees: to go back would read them as context."""
    model = tiny.drafter(KINDS["mixed"])
    embedding, _ = tiny.tables(model.config)
    context = model.context(torch.randn(1, 60, 2 * tiny.HIDDEN))

    def draft(anchor):
        where = torch.tensor([[anchor]])
        return model(context, where * 0, where, where * 0 + 6, embedding, (anchor, anchor))

    with torch.inference_mode():
        draft(20), draft(40), draft(40)
        with pytest.raises(ValueError, match="overwritten"):
            draft(39)
