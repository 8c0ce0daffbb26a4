"""The shipped pair can be made again: every stage of its training runs, and what comes out is what the gate reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "RAYON_NUM_THREADS": "1",
       "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip


def run(*argv):
    done = subprocess.run([sys.executable, *map(str, argv)], cwd=ROOT, env=ENV, capture_output=True, text=True,
                          timeout=600, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("shape", [[], ["--full-attention"]])
def test_a_pair_is_trained_and_averaged(tmp_path, shape):
    import torch

    from taugate.drafter.checkpoint import read_config, read_tensors
    from taugate.target.checkpoint import read_target
    from taugate.target.layout import open_layout

    said = run("tools/train_pair.py", tmp_path, "--smoke", *shape)
    assert said.rstrip().endswith("done")
    target, layout = read_target(tmp_path / "target"), open_layout(tmp_path / "target")
    assert target.num_layers == (10 if shape else 8) and len(layout.layer_tensors(0)) > 5
    assert (tmp_path / "corpus.tsv").read_text().count("\n") > 5
    assert "chained tau" in (tmp_path / "training.log").read_text()
    snapshots = [tmp_path / "snapshots" / name for name in ("0.90", "1.00")]
    run("tools/average.py", tmp_path / "mean", *snapshots)
    paths = (*snapshots, tmp_path / "mean")
    configs = [read_config(path) for path in paths]
    assert configs[0] == configs[2] and (configs[0].hidden_size, configs[0].block_size) == (target.hidden_size, 8)
    first, last, mean = ({key: value.float() for key, value in read_tensors(path, config).items()}
                         for path, config in zip(paths, configs, strict=True))  # fmt: skip
    assert any(not torch.equal(first[key], last[key]) for key in first), "the drafter learned something"
    assert all(torch.allclose(mean[key], (first[key] + last[key]) / 2, atol=1e-2) for key in mean)
