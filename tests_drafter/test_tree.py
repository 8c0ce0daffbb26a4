"""Draft trees by counting, against the published heap and against enumeration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taugate.drafter.tree import UNIT, best, expected_depth, scores
from taugate.drafter.treecount import pop_numbers

from . import oracles

settings.register_profile("trees", deadline=None, derandomize=True, max_examples=150)
settings.load_profile("trees")


@st.composite
def trees(draw, slots=4, vocabulary=4):
    """Descending integer scores [R, L, V] with many ties, and a path of ranks per row."""
    rows, depth, size = draw(st.integers(1, 3)), draw(st.integers(1, slots)), draw(st.integers(1, vocabulary))
    cost = st.integers(0, draw(st.sampled_from([2, 9, 10**12])))
    costs = draw(st.lists(cost, min_size=rows * depth * size, max_size=rows * depth * size))
    score = -np.sort(np.array(costs, dtype=np.int64).reshape(rows, depth, size), axis=2)
    path = np.array(draw(st.lists(st.integers(0, size - 1), min_size=rows * depth, max_size=rows * depth)))
    return score, path.reshape(rows, depth)


@given(trees(), st.integers(1, 40))
def test_pop_numbers_are_those_of_the_heap(tree, limit):
    score, path = tree
    found = pop_numbers(score, path, limit)[0]
    for row in range(len(score)):
        order = oracles.heap_order(score[row], limit)
        for depth in range(path.shape[1]):
            ranks = tuple(path[row, : depth + 1].tolist())
            assert found[row, depth] == (order.index(ranks) + 1 if ranks in order else limit + 1)


@given(trees())
def test_the_heap_pops_the_best_nodes_in_order(tree):
    for score in tree[0]:
        everything = sum(score.shape[1] ** depth for depth in range(1, len(score) + 1))
        assert oracles.heap_order(score, everything + 1) == oracles.best_nodes(score, everything)


@given(trees(), st.integers(1, 20))
def test_trees_are_nested_and_the_chain_is_in_a_large_enough_one(tree, budget):
    score, path = tree
    wide, narrow = pop_numbers(score, path, 400)[0], pop_numbers(score, path, budget)[0]
    assert ((narrow <= budget) == (wide <= budget)).all()
    assert (np.diff(wide, axis=1) > 0).all(), "a prefix is popped before what extends it"
    assert (pop_numbers(score, np.zeros_like(path), 400)[0] <= 400).all(), (
        "4 slots of 4 hold 340 nodes, the chain among them"
    )


@given(trees(), st.integers(1, 60))
def test_no_tree_goes_deeper_than_the_oracle_of_its_width(tree, budget):
    score, path = tree
    depth = (pop_numbers(score, path, budget)[0] <= budget).sum(1)
    # A tree of N nodes holds no rank ≥ N, so topk-N bounds it; and at depth d it has spent at least d nodes.
    bound = np.logical_and.accumulate(path < budget, axis=1).sum(1)
    assert (depth <= np.minimum(bound, budget)).all()


@given(trees())
def test_a_cut_block_has_the_tree_of_its_own_slots(tree):
    score, path = tree
    slots = 1 + path[:, 0] % score.shape[1]
    cut = scores(score * UNIT, slots)
    found = pop_numbers(cut, np.where(np.arange(path.shape[1]) < slots[:, None], path, -1), 400)[0]
    for row, count in enumerate(slots):
        alone = pop_numbers(score[row : row + 1, :count], path[row : row + 1, :count], 400)[0][0]
        assert found[row, :count].tolist() == alone.tolist()
        assert (found[row, count:] == 401).all()


@given(trees(), st.integers(1, 40))
def test_expected_depth_sums_the_chances_of_the_tree(tree, limit):
    score, _ = tree
    logprobs = score / 3.0
    budgets = sorted({1, (limit + 1) // 2, limit})
    found = expected_depth(logprobs, budgets)
    for row in range(len(score)):
        chances = sorted(
            (sum(logprobs[row, i, r] for i, r in enumerate(node)) for node in oracles.best_nodes(score[row], limit)),
            reverse=True,
        )
        wanted = [np.exp(chances[:budget]).sum() for budget in budgets]
        assert found[row] == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_every_budget_up_to_1024_from_one_ordering():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2.5, (6, 15, 3000))
    logprobs = best(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), 1024)
    score = scores(logprobs)
    path = rng.integers(0, 3, (6, 15))
    found = pop_numbers(score, path, 1024)[0]
    for row in range(6):
        order = {ranks: number for number, ranks in enumerate(oracles.heap_order(score[row], 1024), 1)}
        wanted = [order.get(tuple(path[row, : depth + 1].tolist()), 1025) for depth in range(15)]
        assert found[row].tolist() == wanted
    assert ((found > 8) & (found <= 1024)).any(), "nothing lay between the smallest and the largest budget"


@given(trees(slots=3, vocabulary=6), st.integers(1, 5), st.integers(1, 60))
def test_a_short_list_says_what_it_cannot_settle(tree, width, limit):
    score, path = tree
    width = min(width, score.shape[2])
    short, unknown = pop_numbers(score[..., :width], np.minimum(path, width), limit, score.shape[2])
    whole = pop_numbers(score, path, limit)[0]
    assert (short == whole)[~unknown].all()
    if width == score.shape[2]:
        assert (short == whole).all()
