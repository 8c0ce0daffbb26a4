"""The suite touches the host it was pointed at and nothing else, and there only the directories it was given."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests_infra.gatehost import ROOT, gate_command, stub_host

SPY = """
import os, sys
LOG = {log!r}
CHANGES = "os.mkdir os.remove os.rmdir os.truncate os.chmod os.chown os.symlink os.link os.rename".split()
def hook(event, args):
    path = None
    if event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
        mode, flags = args[1], args[2]
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
        if writes or (isinstance(mode, str) and set(mode) & set("wax+")):
            path = args[0]
    elif event in CHANGES:
        path = args[1] if event in ("os.rename", "os.link", "os.symlink") else args[0]
    if path is not None and not isinstance(path, int):
        fd = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if os.fsdecode(path) != LOG else None
        if fd is not None:
            os.write(fd, (event + "\\t" + os.path.abspath(os.fsdecode(path)) + "\\n").encode())
            os.close(fd)
sys.addaudithook(hook)
"""


def spying_python(directory: Path, python: str, log: Path) -> Path:
    """A remote Python that writes down every file that it opens for writing, creates, renames or removes."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(SPY.format(log=str(log)))
    wrapper = directory / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="{directory}${{PYTHONPATH:+:$PYTHONPATH}}" exec {python} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


def contents(root: Path, skip: tuple[str, ...]) -> dict[str, str]:
    """Hash of every file below `root`, except in the directories that are the host's own business."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.relative_to(root).parts[0] not in skip
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One whole gate (window, capture, replay) with spies on both sides."""
    tmp = tmp_path_factory.mktemp("scope")
    log, contacted = tmp / "written.tsv", tmp / "contacted.json"
    with stub_host(tmp / "host") as host:
        own = ("work", "log", "cgroup", "dev", "run", "units", "host.log", "gpu")
        before = contents(host.directory, own)
        python = spying_python(tmp / "spy", host.info.remote_python, log)
        command = gate_command(host, tmp / "store", "--set", f"host.remote_python={python}")
        command[1:3] = [str(ROOT / "tests_infra" / "scopespy.py"), str(contacted)]
        done = subprocess.run(
            [sys.executable, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
        )
        after = contents(host.directory, own)
        yield {
            "info": host.info,
            "output": done.stdout + done.stderr,
            "contacted": [json.loads(line) for line in json.loads(contacted.read_text())],
            "written": [line.split("\t") for line in log.read_text().splitlines()],
            "before": before,
            "after": after,
        }


def test_a_window_was_opened_and_states_were_captured(run):
    """Otherwise the spies saw nothing worth seeing."""
    assert "restored" in run["output"], run["output"][-3000:]
    assert any(event == "os.rename" and path.endswith(".safetensors") for event, path in run["written"])


def test_only_the_configured_host_is_contacted(run):
    ours = [run["info"].address, run["info"].port]
    assert ours in run["contacted"]
    others = [address for address in run["contacted"] if address[:2] != ours]
    assert others == []


def test_jobs_write_below_work_dir_only(run):
    work = run["info"].work_dir
    outside = {path for _, path in run["written"] if not f"{path}/".startswith(f"{work}/") and path != "/dev/null"}
    assert outside == set()


def test_nothing_else_on_the_host_changes(run):
    assert run["after"] == run["before"]
