"""The GPU's one pass over the logits, run by Triton's interpreter: ranks, totals and lists are those of slow code."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, torch
from taugate.drafter.rowstats import row_stats, top_values
generator = torch.Generator().manual_seed(0)
worst = 0.0
for vocabulary, dtype in ((4096, torch.float32), (9000, torch.bfloat16), (300, torch.float32), (64, torch.bfloat16)):
    logits = (torch.randn(12, vocabulary, generator=generator) * 4).to(dtype)
    logits[3] = logits[3].round()  # ties
    logits[5, : vocabulary // 2] = float("-inf")  # a pruned vocabulary
    truth = torch.randint(0, vocabulary, (12,), generator=generator)
    truth[2], truth[4] = -1, int(logits[4].argmax())
    ranks, totals, maxima = row_stats(logits, truth)
    order = logits.float().sort(dim=-1, descending=True, stable=True)
    wanted = (order.indices == truth[:, None]).int().argmax(-1)
    wanted[2] = -1
    assert ranks.tolist() == wanted.tolist(), (vocabulary, ranks.tolist(), wanted.tolist())
    assert totals.isfinite().all()
    worst = max(worst, (totals - logits.float().logsumexp(-1)).abs().max().item())
    for count in (8, 128):
        assert torch.equal(top_values(logits, maxima, count), order.values[:, :count])
logits[0, 7] = float("nan")
ranks, totals, _ = row_stats(logits, torch.zeros(12, dtype=torch.long))
assert totals[0].isnan() and totals[1:].isfinite().all()
logits[1, 0] = float("nan")
assert row_stats(logits, torch.zeros(12, dtype=torch.long))[0][1] >= 64, "what is not a number is no right answer"
print(json.dumps(worst))
"""


@pytest.mark.drafter
def test_one_pass_gives_ranks_totals_and_lists():
    pytest.importorskip("triton", reason="Triton comes with PyTorch for GPUs")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads(ran.stdout) < 1e-5
