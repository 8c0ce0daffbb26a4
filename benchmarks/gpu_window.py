"""One real window on this machine's own GPU, through the local transport. Needs torch and transformers, not systemd.

    python -m benchmarks.gpu_window [--gib 44] [--leftover] [--simulated]

systemd is the embedded host's; the GPU, nvidia-smi, the processes and the job are real: a server that holds GIB GiB
of CUDA memory is stopped, its memory is seen to be free, the capture job runs on the GPU, and the server comes back
and proves itself. --leftover: a process of the server outlives the stop and must be ended by force. --simulated: the
same over simulated GPUs, and the job on the CPU. The last line is JSON: seconds per phase, MiB at each of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fixtures.embedded.launch import EmbeddedHost  # noqa: E402
from taugate.errors import TaugateError  # noqa: E402
from taugate.host.host import Host, HostSettings, connect  # noqa: E402
from taugate.host.preflight import expect_downtime, preflight  # noqa: E402
from taugate.host.record import PhaseEvent, WindowSettings  # noqa: E402
from taugate.host.window import Window  # noqa: E402
from taugate.pipeline.remote import install  # noqa: E402

PAIR = Path(__file__).resolve().parents[1] / "fixtures/embedded/pair"
_SEQUENCES = [[(7 * n + 3 * i) % 250 for i in range(48 + 16 * n)] for n in range(6)]
_TAPS = [0, 2]


@contextlib.contextmanager
def this_machine(directory: Path, gib: int, leftover: bool, simulated: bool) -> Iterator[Host]:
    """This machine as a host: the embedded host's systemd is first on the PATH while the context lasts."""
    embedded = EmbeddedHost(
        directory, PAIR, faults=["memory-stays"] if leftover else [], engine="stub", ssh=False,
        cuda_gib=0 if simulated else gib, deadline=60,
    )  # fmt: skip
    path = os.environ["PATH"]
    with embedded:
        info = embedded.info
        settings = HostSettings(
            service=info.service, serve_port=info.serve_port, transport="local", remote_python=sys.executable,
            work_dir=info.work_dir, cgroup_root=info.cgroup_root,
        )  # fmt: skip
        os.environ["PATH"] = f"{info.dir}/bin:{path}"
        try:
            embedded.wait_ready(120)
            with connect(settings) as host:
                yield host
        finally:
            os.environ["PATH"] = path


def borrow(host: Host, scratch: Path, device: str) -> dict[str, Any]:
    """One window with a capture in it. Raises TaugateError; the server is back in any case."""
    seen: list[dict[str, Any]] = []

    def on_event(event: PhaseEvent) -> None:
        begun = time.monotonic()
        used = [gpu.used_mib for gpu in host.gpus().gpus]
        look = round(time.monotonic() - begun, 2)  # is in the downtime, and would not be without this benchmark
        seen.append({"phase": event.phase.value, "s": round(event.seconds, 2), "used_mib": used, "look_s": look})
        print(f"{event.seconds:7.2f} s  {event.phase.value:9} {used!s:16} {event.detail}", flush=True)

    package = install(host, scratch)
    model = str(PAIR / "target")
    probe = package.run(
        "target.probe", "--model-path", model, "--memo", f"{host.work_dir}/hashes.json", deadline=120, what="the probe"
    )
    print(f"host       {json.dumps(probe['versions'])} {probe['cuda']}", flush=True)
    for check in preflight(host, downtime=expect_downtime(host, stop_s=5, job_s=60, last_start_s=30), budget_s=600):
        print(f"{'ok ' if check.ok else 'RED'}  {check}", flush=True)
    keys = [f"state-{number}" for number in range(len(_SEQUENCES))]
    spec = {
        "model_path": model, "kernel_path": "torch", "dtype": "bfloat16", "device": device, "taps": _TAPS,
        "sequences": [{"key": key, "token_ids": ids} for key, ids in zip(keys, _SEQUENCES, strict=True)],
    }  # fmt: skip
    run = f"{host.work_dir}/capture"
    (scratch / "spec.json").write_text(json.dumps(spec))
    host.transport.put(scratch / "spec.json", f"{run}/spec.json")
    canary = tuple(range(1, 17))
    settings = WindowSettings(canary, ttl_s=120, escalate_after_s=3, free_timeout_s=60, start_timeout_s=120, poll_s=0.2)
    job: dict[str, Any] = {}
    window = Window(host, settings, on_event)
    with window:
        begun = time.monotonic()
        done = package.job(
            window, "target.capture", "--spec", f"{run}/spec.json", "--out", f"{run}/out", deadline_s=120,
            on_event=lambda event: job.setdefault(event["event"], round(time.monotonic() - begun, 2)),
        )  # fmt: skip
        job["all"] = round(time.monotonic() - begun, 2)
    for key in keys:
        there = done["files"][key]["sha256"]
        if host.transport.get(f"{run}/out/{key}.safetensors", scratch / f"{key}.safetensors") != there:
            raise TaugateError(f"the state {key} changed on its way")
    record = window.record
    return {
        "outcome": record.outcome, "downtime_s": round(record.downtime_s, 2), "start_s": round(record.start_s, 2),
        "job_s": job, "device": done["device"], "states": len(keys),
        "kernels": done["files"][keys[0]]["kernels"]["path"],
        "same_identity": not record.identity_after.differs_from(record.identity_before),
        "same_canary": record.canary["same"], "escalations": record.escalations, "notes": record.notes,
        "before_mib": list(record.gpus_before_mib.values()), "after_mib": list(record.gpus_after_mib.values()),
        "phases": seen,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_window", description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=int, default=44, help="what the server holds")
    parser.add_argument("--leftover", action="store_true", help="a process of the server outlives the stop")
    parser.add_argument("--simulated", action="store_true", help="simulated GPUs, and the job on the CPU")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through every `with`: the server comes back, files go
    try:
        with tempfile.TemporaryDirectory(prefix="taugate-window-") as folder:
            place = Path(folder)
            (place / "scratch").mkdir()
            with this_machine(place / "host", given.gib, given.leftover, given.simulated) as host:
                result = borrow(host, place / "scratch", "cpu" if given.simulated else "cuda")
    except TaugateError as error:
        print(f"gpu_window: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"gib": given.gib, "leftover": given.leftover, "simulated": given.simulated, **result}))
    return 0 if result["outcome"] == "restored" and result["same_identity"] else 1


if __name__ == "__main__":
    sys.exit(main())
