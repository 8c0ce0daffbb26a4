"""The GPU's own kernels, run by Triton's interpreter: the same numbers as slow code and as the host's way to them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import numpy as np, torch
from taugate.drafter.popkernel import expected_depth_there, pop_numbers_there, scores_there
from taugate.drafter.rowstats import row_stats, top_values
from taugate.drafter.tree import expected_depth, scores
from taugate.drafter.treecount import pop_numbers
generator, random = torch.Generator().manual_seed(0), np.random.default_rng(0)

for vocabulary, dtype in ((5, torch.float32), (4096, torch.float32), (9000, torch.bfloat16), (300, torch.float32)):
    logits = (torch.randn(12, vocabulary, generator=generator) * 4).to(dtype)
    logits[3] = logits[3].round()  # ties
    logits[5, : vocabulary // 2] = float("-inf")  # a pruned vocabulary
    logits[6], logits[7, 1:] = 0, float("-inf")  # all alike; a single token
    logits[8] = -logits[8].abs()
    logits[9, 5::4096], logits[9, 4::4096] = 30, 29  # the best lie in few of the groups
    logits[10, ::3], logits[10, -2:] = 31, 32  # more than any list, all alike, and better ones behind them
    logits[11, :2] = torch.tensor([0.0, -0.0])
    truth = torch.randint(0, vocabulary, (12,), generator=generator)
    truth[2], truth[4] = -1, int(logits[4].argmax())
    ranks, totals, peaks = row_stats(logits, truth)
    order = logits.float().sort(dim=-1, descending=True, stable=True)
    wanted = (order.indices == truth[:, None]).int().argmax(-1)
    wanted[2] = -1
    assert ranks.tolist() == wanted.tolist(), (vocabulary, ranks.tolist(), wanted.tolist())
    assert ((totals - logits.float().logsumexp(-1)).abs() < 1e-5).all()
    for count in (8, 1024):
        assert torch.equal(top_values(logits, peaks, count), order.values[:, :count]), (vocabulary, count)
logits[0, 7] = float("nan")
ranks, totals, _ = row_stats(logits, torch.zeros(12, dtype=torch.long))
assert totals[0].isnan() and totals[1:].isfinite().all()
logits[1, 0] = float("nan")
assert row_stats(logits, torch.zeros(12, dtype=torch.long))[0][1] >= 64, "what is not a number is no right answer"

seen = set()
shapes = (6, 4, 4, 40, True), (6, 5, 60, 40, True), (4, 7, 130, 100, False), (5, 3, 8, 16, False)
for rows, levels, vocabulary, limit, ties in shapes:
    size = rows, levels, vocabulary
    costs = random.integers(0, 3, size).astype(float) if ties else random.exponential(1.5, size)
    logprobs = -np.sort(costs, axis=2)
    slots = random.integers(max(1, levels - 2), levels + 1, rows)
    path = np.minimum(random.geometric(0.5, (rows, levels)) - 1, vocabulary - 1)
    path[0, -1] = vocabulary - 1
    path[np.arange(levels) >= slots[:, None]] = -1
    wanted = pop_numbers(scores(logprobs, slots), path, limit)[0]
    there = scores_there(torch.from_numpy(logprobs[..., :limit].copy()), torch.from_numpy(slots))
    found = pop_numbers_there(there, torch.from_numpy(path), limit)
    assert found.tolist() == wanted.tolist(), (rows, levels)
    seen |= set(wanted.ravel().tolist())
    logprobs[0, 0, 1:] = -np.inf  # a pruned vocabulary
    budgets = [1, 3, limit // 2, limit]
    wanted = expected_depth(logprobs[..., :limit], budgets, slots)
    found = expected_depth_there(torch.from_numpy(logprobs), budgets, torch.from_numpy(slots))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12)
assert len(seen) > 15, seen
"""


@pytest.mark.drafter
def test_kernels_give_what_slow_code_gives():
    pytest.importorskip("triton", reason="Triton comes with PyTorch for GPUs")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
