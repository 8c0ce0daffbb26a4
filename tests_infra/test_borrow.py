"""What comes back from the host is taken only if it is what the job says it wrote."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from taugate.config import resolve
from taugate.drafter.replay import CachedSequence
from taugate.errors import JobError, WindowError
from taugate.files import sha256_file
from taugate.host.beside import Ceiling
from taugate.host.record import Phase, PhaseEvent, WindowRecord
from taugate.host.transport import Completed
from taugate.pipeline.borrow import Borrower
from taugate.pipeline.dataset import Dataset
from taugate.pipeline.results import HostResults
from taugate.target.checkpoint import TargetInfo
from taugate.target.head import HeadStore
from taugate.target.results import Results
from taugate.target.store import StateIdentity, StateStore

TARGET = TargetInfo("tiny", "qwen3_5_text", 8, 4, 16, (0,), True, "w" * 64, "t" * 64)
IDENTITY = StateIdentity("tiny", "w" * 64, "t" * 64, "float32", "torch", "cpu", {}, "c" * 64)
SEQUENCE = CachedSequence("one", (1, 2, 3), 1, 3)


class Host:
    """A host whose files are a directory here; `tamper` changes them on their way."""

    name = "host"
    work_dir = "/work_dir"

    def __init__(self, directory: Path, tamper: bool) -> None:
        self.directory, self.tamper = directory, tamper
        self.transport = self

    def get(self, remote: str, local: Path) -> str:
        data = (self.directory / Path(remote).name).read_bytes()
        local.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if self.tamper else data)
        return sha256_file(local)

    def run(self, argv, *, deadline):
        for path in argv[2:] if argv[0] == "rm" else ():
            (self.directory / Path(path).name).unlink()
        return Completed(tuple(argv), 0, "", "", 0.0)


def captured(tmp_path, tamper):
    """A data set without states, what surveyed it, and the results of a capture that lie on the host."""
    there, cache = tmp_path / "there", tmp_path / "cache"
    there.mkdir()
    cache.mkdir()
    key = IDENTITY.key(SEQUENCE.token_ids)
    facts = {"kernels": {}, "engine": {}, "device": "cpu"}
    states = {"final_hidden": torch.ones(3, 4).bfloat16()}
    files = {key: Results(there).write(key, SEQUENCE.token_ids, states, facts)}
    data = Dataset(TARGET, (SEQUENCE,), IDENTITY, StateStore(tmp_path, "tiny"), HeadStore(tmp_path))
    survey = SimpleNamespace(host=Host(there, tamper), config=None, cache=cache, say=lambda text: None)
    return data, survey, files, there


@pytest.mark.parametrize("tamper", [False, True])
def test_a_state_that_changed_on_its_way_is_refused(tmp_path, tamper):
    data, survey, files, there = captured(tmp_path, tamper)
    (key,) = files
    results = HostResults(survey, data)
    if tamper:
        with pytest.raises(JobError, match="'one' changed on its way from host"):
            results.fetch([SEQUENCE], files, "id")
        assert data.store.names(key) == set(), "nothing of it was kept"
        assert Results(there).file(key).is_file(), "and what is on the host stays"
    else:
        results.fetch([SEQUENCE], files, "id")
        assert data.store.names(key) == {"final_hidden"}
        assert not list(there.iterdir()), "what was fetched is removed from the host"


class BrokenWindow:
    """A window whose job ends well, and after which the server does not come back."""

    record = WindowRecord("w1", "host", "a.service", outcome="broken")

    def __enter__(self):
        self.record.phases.append(PhaseEvent(Phase.BROKEN, "", 1.0, ""))

    def __exit__(self, *_):
        raise WindowError("a.service was not restored")


@pytest.mark.parametrize("tamper", [False, True])
def test_what_was_captured_is_kept_when_the_server_does_not_come_back(tmp_path, tamper, monkeypatch):
    data, survey, files, there = captured(tmp_path, tamper)
    (key,), records = files, []
    survey.config = SimpleNamespace(window=SimpleNamespace(job_timeout=1.0))
    survey.package = SimpleNamespace(job=lambda *_, **__: {"files": files})
    borrower = Borrower(survey, data, records.append)
    monkeypatch.setattr(borrower, "wait", lambda: None)
    monkeypatch.setattr(borrower, "_checks", lambda *_: [])
    monkeypatch.setattr(borrower, "_window", lambda _: (BrokenWindow(), "spec"))
    with pytest.raises(WindowError, match="was not restored") as caught:
        borrower.capture([SEQUENCE])
    assert [record["outcome"] for record in records] == ["broken"]
    if tamper:
        assert "wait in /work_dir/captures for the next run" in caught.value.__notes__[0]
    else:
        assert "the 1 captured states are in" in caught.value.__notes__[0]
        assert data.store.names(key) == {"final_hidden"}


def test_what_gate_toml_says_of_windows_reaches_them(tmp_path):
    data, survey, *_ = captured(tmp_path, False)
    cli = {"window.drain": "90s", "window.on_busy": "give_up", "window.verify_requests": "7",
           "window.notify": "tell,me", "window.webhook": "https://x.example/hook", "capture.beside": "true",
           "capture.max_gpu_memory": "3GiB"}  # fmt: skip
    survey.config = resolve(tmp_path, cli, {}).value
    borrower = Borrower(survey, data, print)
    settings = borrower._settings((1, 2))
    assert (settings.drain_s, settings.on_busy, settings.verify_requests) == (90, "give up", 7)
    assert (settings.notify, settings.webhook) == (("tell", "me"), "https://x.example/hook")
    assert borrower._ceiling() == Ceiling(mib=3072)
    survey.config = borrower.config = resolve(tmp_path, {}, {}).value
    assert borrower._ceiling() is None and borrower._settings((1,)).on_busy == "stop"
