"""A window on this machine itself: the local transport, without SSH and without what only SSH needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROJECT = Path(__file__).resolve().parents[1]
_WINDOW = """
import json, sys
from pathlib import Path
from benchmarks.gpu_window import this_machine
from taugate.host.record import WindowSettings
from taugate.host.window import Window

with this_machine(Path(sys.argv[1]), gib=0, leftover=False, simulated=True) as host:
    window = Window(host, WindowSettings((1, 2, 3), poll_s=0.1))
    with window:
        held = [gpu.used_mib for gpu in host.gpus().gpus]
        done = window.run_job(["sh", "-c", "pwd; exit 3"], deadline_s=30)
    print(json.dumps({"held": held, "rc": done.rc, "said": done.stdout.strip(), **window.record.to_json()}))
    assert not {"paramiko", "asyncssh", "pydantic", "torch"} & {name for name, module in sys.modules.items() if module}
"""


def run(*argv, **env):
    done = subprocess.run(
        [sys.executable, *argv], cwd=_PROJECT, env=os.environ | env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_window_on_this_machine_needs_no_ssh_library(tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for name in ("paramiko", "asyncssh", "pydantic"):
        (hidden / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')\n")
    record = run("-c", _WINDOW, str(tmp_path / "host"), PYTHONPATH=str(hidden))
    assert record["outcome"] == "restored" and record["canary"]["same"]
    assert record["held"] == [4, 4] and set(record["gpus_before_mib"].values()) == {47004}
    assert record["gpus_after_mib"] == record["gpus_before_mib"]
    assert (record["rc"], record["said"]) == (3, str(tmp_path / "host/work"))
    at = [event["phase"] for event in record["phases"]]
    assert at == ["serving", "leased", "stopped", "free", "held", "starting", "serving"]


def no_gpu() -> bool:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=60).returncode != 0
    except OSError:
        return True


@pytest.mark.gpu
@pytest.mark.skipif(no_gpu(), reason="nvidia-smi shows no GPU on this machine")
@pytest.mark.parametrize("leftover", [False, True])
def test_a_real_gpu_is_borrowed_and_given_back(leftover):
    """A server that holds 44 GiB of it is stopped, states are captured on it, and the server comes back."""
    result = run("-m", "benchmarks.gpu_window", *(["--leftover"] if leftover else []))
    assert result["outcome"] == "restored" and result["same_identity"] and result["same_canary"]
    assert result["device"] == "cuda" and result["states"] == 6 and bool(result["escalations"]) == leftover
    used = {event["phase"]: max(event["used_mib"]) for event in result["phases"]}
    assert max(result["before_mib"]) > 44 * 1024 and used["free"] < 4400
    assert abs(max(result["after_mib"]) - max(result["before_mib"])) <= 0.05 * max(result["before_mib"])
