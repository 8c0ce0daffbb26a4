"""What a person wants to know about a borrowed host, and the way back when nothing else brought it."""

from __future__ import annotations

from dataclasses import dataclass

from taugate.errors import HostError, WindowError
from taugate.host.host import Host
from taugate.host.record import WindowSettings

_PROOF_IDS = (1, 2, 3)
_PROOFS = 3


@dataclass(frozen=True)
class Status:
    """lease: who holds it, "" if nobody does. quarantine: why no window may be opened, "" if one may."""

    unit: str
    active: bool
    server: str
    ready: bool
    gpus: str
    lease: str
    restoring: bool
    quarantine: str
    jobs: tuple[str, ...]

    def lines(self) -> list[str]:
        """One line per fact, as `host status` prints them."""
        facts = {
            "unit": self.unit,
            "server": self.server,
            "GPUs": self.gpus,
            "window": self.lease or "none",
            "restore": "running on the host" if self.restoring else "",
            "jobs": ", ".join(self.jobs),
            "quarantine": self.quarantine,
        }
        return [f"{name:<11}{text}" for name, text in facts.items() if text]


@dataclass(frozen=True)
class LeaseState:
    """What the helper tells of windows on its host; see Status for the fields."""

    lease: str
    restoring: bool
    quarantine: str
    jobs: tuple[str, ...]

    @property
    def holder(self) -> str:
        """Who has the host now; "" if nobody has."""
        return self.lease or ("the restore after an earlier window" if self.restoring else "")


def lease_state(host: Host) -> LeaseState:
    """Ask the helper. Raises HostError."""
    told = host.helper.call("status", host.work_dir).check("reading the state of the lease").stdout
    facts = [line.partition("=")[::2] for line in told.splitlines()]
    single = dict(facts)
    return LeaseState(
        lease=single.get("lease", ""),
        restoring=single.get("restoring") == "yes",
        quarantine=single.get("quarantine", ""),
        jobs=tuple(value for key, value in facts if key == "job"),
    )


def look(host: Host) -> Status:
    """Everything at once, changing nothing. Raises HostError."""
    unit, windows = host.unit.show(), lease_state(host)
    ready = host.server.ready()
    server = "not ready"
    if ready:
        identity, load = host.server.identity(), host.server.loads()
        busy = f", {load.running} requests running and {load.waiting} waiting" if load else ""
        server = f"ready, serves {identity.model_id}{busy}"
    return Status(
        unit=f"{host.unit.name} is {unit.active} ({unit.sub}), KillMode={unit.kill_mode}, {unit.n_restarts} restarts",
        active=unit.active == "active",
        server=server,
        ready=ready,
        gpus=host.gpus().describe(),
        lease=windows.lease,
        restoring=windows.restoring,
        quarantine=windows.quarantine,
        jobs=windows.jobs,
    )


def restore(host: Host, deadline_s: float, force: bool = False) -> str:
    """Start the server, see it answer real requests, and let windows open again; returns what it serves.

    force: also while a window is open, whose jobs are stopped. Raises WindowError (in use, not serving), HostError.
    """
    helper = host.helper
    holder = helper.call("holder").check("reading the lease").stdout.strip()
    if holder and not force:
        raise WindowError(
            f"{host.name} is in use by `{holder}`: wait for its end, or repeat with --force to stop its job and start"
            f" {host.unit.name} now"
        )
    args = (host.unit.name, str(host.server.port), host.work_dir)
    helper.call("restore", *args, deadline=deadline_s).check(f"restoring {host.unit.name}")
    model = host.server.identity().model_id
    expected = host.settings.expected_model_id
    if expected not in (None, model):
        raise WindowError(f"{host.server.where} serves {model}, {expected} is expected: the quarantine stays")
    try:
        for _ in range(_PROOFS):
            host.server.generate(_PROOF_IDS, 4, deadline=60)
    except HostError as error:
        raise WindowError(f"{host.unit.name} runs but does not serve ({error}): the quarantine stays") from error
    helper.call("release", host.work_dir).check("ending the quarantine")
    return model


def plan(host: Host, settings: WindowSettings, job_s: float) -> list[str]:
    """The commands of a window in order, and the worst case. Raises HostError."""
    name, ident = host.unit.name, settings.window_id
    unit = host.unit.show()
    stop_s = settings.stop_timeout_s or unit.timeout_stop_s + 30
    then = "stop it all the same" if settings.on_busy == "stop" else "give up"
    worst = stop_s + settings.free_timeout_s + job_s + settings.start_timeout_s
    by = [f"rights   each of these is given to `{' '.join(host.helper.argv('…'))}`"] if host.settings.sudo else []
    return [
        *by,
        f"arm      systemd-run --unit=taugate-window --on-active={settings.ttl_s:.0f}s … restore {name}",
        f"         (and every {settings.ttl_s / 3:.0f} s: systemctl restart taugate-window.timer)",
        f"drain    GET /v1/loads until it is idle; after {settings.drain_s:.0f} s {then}",
        f"stop     systemctl stop --no-block {name}   (KillMode={unit.kill_mode}, at most {stop_s:.0f} s)",
        f"free     nvidia-smi until its memory is free; after {settings.escalate_after_s:.0f} s"
        f" systemctl kill --signal=SIGKILL {name}; at most {settings.free_timeout_s:.0f} s",
        f"job      systemd-run --unit=taugate-job-{ident}-1 --property=Conflicts={name}"
        f" --property=RuntimeMaxSec={job_s:.0f} …",
        f"start    systemctl reset-failed {name}; systemctl start --no-block {name}   (at most"
        f" {settings.start_timeout_s:.0f} s)",
        "disarm   systemctl stop taugate-window.timer, once the same model has answered real requests",
        f"worst    {worst:.0f} s without the server; if this machine dies, the host starts it {settings.ttl_s:.0f} s"
        " later",
    ]
