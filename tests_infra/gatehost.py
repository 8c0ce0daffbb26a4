"""An embedded host with the stub engine for tests of the gate's behaviour, and ways to run the gate on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fixtures.embedded.launch import EmbeddedHost, HostInfo
from fixtures.host import PAIR, _settings
from taugate.config import resolve
from taugate.config_schema import GateConfig
from taugate.host.host import connect
from taugate.pipeline.dataset import Dataset
from taugate.pipeline.evaluate import read_drafters
from taugate.pipeline.states import acquire
from taugate.pipeline.survey import Record

ROOT = Path(__file__).resolve().parent.parent
GATE = ("tests_infra/test_window.py", "tests_drafter/test_tau.py")


@contextmanager
def stub_host(directory: Path, **kwargs: object) -> Iterator[EmbeddedHost]:
    """A host that is up in a second: everything is as in the embedded host, but its tokens are arithmetic."""
    with EmbeddedHost(directory, PAIR, engine="stub", **kwargs) as host:
        host.wait_ready(30)
        yield host


def configured(store: Path, *settings: str) -> GateConfig:
    """gate.toml with a store of its own and `key=value` settings."""
    cli = dict(setting.split("=", 1) for setting in settings)
    return resolve(ROOT, {"store.path": str(store), "completions.limit": "3", **cli}, {}).value


def acquired(config: GateConfig, info: HostInfo, armed: bool = True, record: Record = lambda _: None) -> Dataset:
    """What the gate's fixtures do, without pytest: connect, survey, and open a window if one is needed."""
    candidates, reference = read_drafters(config)
    drafters = [judged.config for judged in [*candidates, *([reference] if reference else [])]]
    with connect(_settings(config.host, info)) as host:
        return acquire(host, config, drafters, lambda text: None, record, armed=armed)


def gate_command(host: EmbeddedHost, store: Path, *args: str, tests: Sequence[str] = GATE) -> list[str]:
    """Command line of `pytest -m gpu_window` on that running host."""
    settings = [f"host.attach={host.directory}", f"store.path={store}", f"report.dir={store / 'reports'}"]
    settings += ["completions.limit=3", "completions.max_new_tokens=16"]
    sets = [part for setting in settings for part in ("--set", setting)]
    return [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu_window",
        "-p",
        "no:cacheprovider",
        *sets,
        *args,
        *tests,
    ]


def run_gate(host: EmbeddedHost, store: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        gate_command(host, store, *args), cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
