"""The draft tree of DDTree: best-first over the slot marginals (Ringel & Romano, arXiv 2604.12989, algorithm 1).

A drafter's pass gives one distribution per slot. A node at depth d is a choice of one token for each of the slots
1…d; its score is the sum of their log-probabilities. The N best nodes (root excluded) form a prefix-closed tree.
Trees are nested: the tree of N nodes is the first N of the pop order, whatever N is. So a true continuation is
accepted to the depth at which its own node is popped within the budget, and no target forward is needed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def pop_order(logprobs: Sequence[Sequence[float]], budget: int) -> list[tuple[int, ...]]:
    """The first `budget` nodes in pop order, each as its ranks per depth.

    logprobs: per slot, log-probabilities sorted in descending order, `min(budget, V)` of them. Equal scores are
    popped in the order of their rank tuples, as the published implementation does.
    """
    if not logprobs or budget < 1:
        return []
    heap = [(-logprobs[0][0], (0,))]
    order: list[tuple[int, ...]] = []
    while heap and len(order) < budget:
        score, ranks = heapq.heappop(heap)
        order.append(ranks)
        depth, rank = len(ranks), ranks[-1]
        slot = logprobs[depth - 1]
        if rank + 1 < len(slot):
            heapq.heappush(heap, (score + slot[rank] - slot[rank + 1], (*ranks[:-1], rank + 1)))
        if depth < len(logprobs):
            heapq.heappush(heap, (score - logprobs[depth][0], (*ranks, 0)))
    return order


def accepted_depths(logprobs: Sequence[Sequence[float]], path: Sequence[int], budgets: Sequence[int]) -> list[int]:
    """How deep the true path lies in the tree of each budget.

    path: rank of the true token in each slot, cut where the truth ends (a rank beyond the given log-probabilities
    can be in no tree of these budgets). Returns one depth, 0…len(path), per budget.
    """
    order = pop_order(logprobs, max(budgets))
    popped = {ranks: number for number, ranks in enumerate(order)}
    arrival = []
    for depth in range(1, len(path) + 1):
        number = popped.get(tuple(path[:depth]))
        if number is None:
            break
        arrival.append(number)
    return [sum(number < budget for number in arrival) for budget in budgets]
