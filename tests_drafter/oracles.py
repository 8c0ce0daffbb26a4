"""What the fast code is compared with: slow and obvious."""

from __future__ import annotations

import heapq
import itertools


def heap_order(score, budget):
    """Pop order of the published algorithm for one tree: rank tuples.

    score: [L][K] integers, descending along K.
    """
    heap, order = [(-int(score[0][0]), (0,))], []
    while heap and len(order) < budget:
        cost, ranks = heapq.heappop(heap)
        order.append(ranks)
        depth, rank = len(ranks), ranks[-1]
        if rank + 1 < len(score[depth - 1]):
            step = int(score[depth - 1][rank]) - int(score[depth - 1][rank + 1])
            heapq.heappush(heap, (cost + step, (*ranks[:-1], rank + 1)))
        if depth < len(score):
            heapq.heappush(heap, (cost - int(score[depth][0]), (*ranks, 0)))
    return order


def best_nodes(score, budget):
    """The best `budget` of all nodes, by enumeration."""
    nodes = [
        ranks
        for depth in range(1, len(score) + 1)
        for ranks in itertools.product(*(range(len(s)) for s in score[:depth]))
    ]
    return sorted(nodes, key=lambda ranks: (-sum(int(score[i][r]) for i, r in enumerate(ranks)), ranks))[:budget]


def depth_in(nodes, path):
    """How deep `path` lies in a prefix-closed set of nodes."""
    nodes = set(nodes)
    return next((d for d in range(len(path)) if tuple(path[: d + 1]) not in nodes), len(path))
