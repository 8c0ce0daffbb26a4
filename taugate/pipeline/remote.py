"""Our own code on the host: the package travels as one zip, and runs with the host's configured Python."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import taugate
from taugate.errors import HostError, JobError
from taugate.files import sha256_file, sha256_files
from taugate.host.host import Host
from taugate.host.transport import Completed, last_line
from taugate.host.window import Window

PACKAGE = Path(taugate.__file__).resolve().parent
# Exit statuses that stand for signals.
_KILLED = {137: "by the kernel for want of memory, or by somebody; `journalctl -k` there tells", 139: "it crashed",
           143: "somebody stopped it", 134: "it aborted"}  # fmt: skip
OFFLINE = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "TRANSFORMERS_VERBOSITY": "error"}


@dataclass(frozen=True)
class RemotePackage:
    """The zip on the host; everything of ours that runs there imports from it and from nowhere else."""

    host: Host
    path: str

    def argv(self, module: str, *args: str) -> list[str]:
        """Command line that runs `module` of the package."""
        return [self.host.remote_python, "-m", f"taugate.{module}", *args]

    def env(self) -> Mapping[str, str]:
        """Environment of our processes there. Caches and temporary files of the libraries stay in work_dir, too."""
        work = self.host.work_dir
        caches = {
            "TMPDIR": "tmp",
            "TRITON_CACHE_DIR": "triton",
            "TORCHINDUCTOR_CACHE_DIR": "inductor",
            "HF_HOME": "hf",
        }
        return {
            **OFFLINE,
            **{name: f"{work}/{part}" for name, part in caches.items()},
            "PYTHONPATH": self.path,
        }

    def run(
        self,
        module: str,
        *args: str,
        deadline: float,
        what: str,
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    ) -> dict[str, Any]:
        """Run a module that needs no GPU; every JSON line goes to `on_event`, the last one is returned.

        Raises HostError with the module's own last line when it fails.
        """
        prefix = ["env", *(f"{name}={value}" for name, value in self.env().items())]

        def line(text: str) -> None:
            if text.startswith("{"):
                on_event(_json(text, what))

        done = self.host.transport.run([*prefix, *self.argv(module, *args)], deadline=deadline, on_line=line)
        if done.rc != 0:
            said = last_line(done.stderr) or last_line(done.stdout) or f"exit status {done.rc}"
            raise HostError(f"{what} on {self.host.name} failed: {said}")
        return _json(last_line(done.stdout), what)

    def job(
        self,
        window: Window,
        module: str,
        *args: str,
        deadline_s: float,
        on_event: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        """Run a module as the window's GPU job; every JSON line goes to `on_event`, the last one is returned.

        Raises JobError with the job's own sentence when it fails.
        """
        events: list[dict[str, Any]] = []

        def line(text: str) -> None:
            if text.startswith("{"):
                events.append(_json(text, module))
                on_event(events[-1])

        done: Completed = window.run_job(self.argv(module, *args), deadline_s=deadline_s, env=self.env(), on_line=line)
        if done.rc != 0:
            own = [event["sentence"] for event in events if event.get("event") == "error"]
            said = own[-1] if own else _killed(done, events)
            raise JobError(f"{module} on {self.host.name} failed: {said}")
        if not events or events[-1].get("event") != "done":
            raise JobError(f"{module} on {self.host.name} ended without saying that it was done")
        return events[-1]


def _killed(done: Completed, events: list[dict[str, Any]]) -> str:
    """What to say of a job that ended without a sentence of its own."""
    last = next((event for event in reversed(events) if "done" in event and "of" in event), None)
    kept = f"; {last['done']} of {last['of']} sequences stay there, and the next run goes on from them" if last else ""
    if done.rc in _KILLED:
        return f"it was killed ({_KILLED[done.rc]}){kept}"
    return f"{last_line(done.stderr) or f'exit status {done.rc}'}{kept}"


def install(host: Host, scratch: Path) -> RemotePackage:
    """Put the package's zip into the host's work_dir unless the same content is there already."""
    sources = sorted(path for path in PACKAGE.rglob("*.py"))
    digest = sha256_files(sources, PACKAGE)
    remote = f"{host.work_dir}/taugate-{digest[:16]}.zip"
    scratch.mkdir(parents=True, exist_ok=True)
    local = scratch / f"taugate-{digest[:16]}.zip"
    local.write_bytes(_zip(sources))
    host.transport.run(["mkdir", "-p", f"{host.work_dir}/tmp"], deadline=30).check(f"creating work_dir {host.work_dir}")
    there = host.transport.run(["sha256sum", remote], deadline=60)
    if there.rc != 0 or there.stdout.split()[:1] != [sha256_file(local)]:
        host.transport.put(local, remote)
    return RemotePackage(host, remote)


def _zip(sources: list[Path]) -> bytes:
    """A zip whose bytes depend on the contents only: fixed order, fixed times."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sources:
            entry = zipfile.ZipInfo(f"taugate/{path.relative_to(PACKAGE).as_posix()}", (2020, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
    return buffer.getvalue()


def _json(text: str, what: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise HostError(f"{what} gave {text[:120]!r} where a JSON line was expected") from None
