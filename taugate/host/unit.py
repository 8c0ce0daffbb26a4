"""One systemd unit on the host, read only: its state by `systemctl show`, and the processes it holds."""

from __future__ import annotations

import json
import math
import posixpath
import re
from dataclasses import dataclass

from taugate.errors import HostError
from taugate.host.transport import Transport, last_line

_NAME = re.compile(r"[A-Za-z0-9:_.\\@-]+\.(service|scope|timer)")
_PROPERTIES = (
    "LoadState,ActiveState,SubState,MainPID,ControlGroup,Result,KillMode,TimeoutStopUSec,Restart,NRestarts,"
    "UnitFileState,InvocationID"
)
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zµ]*)")
_SPAN_SECONDS = {
    "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0, "h": 3600.0,
    "d": 86400.0, "w": 604800.0, "month": 2629800.0, "y": 31557600.0,
}  # fmt: skip
COMMAND_DEADLINE_S = 20.0
_READY = "The server is fired up and ready to roll"


@dataclass(frozen=True)
class UnitState:
    """What systemd says about a unit. main_pid 0 = none. timeout_stop_s: seconds, math.inf = no limit."""

    load: str
    active: str
    sub: str
    main_pid: int
    control_group: str
    result: str
    kill_mode: str
    timeout_stop_s: float
    restart: str
    n_restarts: int
    unit_file_state: str
    invocation_id: str

    @property
    def stopped(self) -> bool:
        """Also true after a stop that ended badly: SGLang under KillMode=control-group regularly ends
        `failed`.
        """
        return self.active in ("inactive", "failed")


class Unit:
    """A unit by name. cgroup_root: where the unified cgroup tree is mounted on the host."""

    def __init__(self, transport: Transport, name: str, cgroup_root: str = "/sys/fs/cgroup") -> None:
        self.name = valid_unit_name(name)
        self._transport = transport
        self._cgroup_root = cgroup_root.rstrip("/")

    def show(self) -> UnitState:
        """The unit's state now. An unknown unit has load "not-found".

        Raises HostError if systemd does not answer.
        """
        values = show_properties(self._transport, self.name, _PROPERTIES)
        if not values.get("LoadState") or not values.get("ActiveState"):
            raise HostError(f"systemctl on {self._transport.name} does not tell the state of {self.name}")
        return UnitState(
            load=values["LoadState"],
            active=values["ActiveState"],
            sub=values.get("SubState", ""),
            main_pid=_whole(values.get("MainPID", "0")),
            control_group=values.get("ControlGroup", ""),
            result=values.get("Result", ""),
            kill_mode=values.get("KillMode", ""),
            timeout_stop_s=parse_span(values.get("TimeoutStopUSec", "infinity")),
            restart=values.get("Restart", ""),
            n_restarts=_whole(values.get("NRestarts", "0")),
            unit_file_state=values.get("UnitFileState", ""),
            invocation_id=values.get("InvocationID", ""),
        )

    def last_start_s(self) -> float | None:
        """Seconds from its last start to SGLang's word that it is ready; None if the journal does not tell.

        Raises HostError.
        """
        argv = ["journalctl", "-q", "-b", "-u", self.name, "-o", "json", "-n", "1", "-g", _READY]
        done = self._transport.run(argv, deadline=COMMAND_DEADLINE_S)
        began = show_properties(self._transport, self.name, "ActiveEnterTimestampMonotonic")
        try:
            said = int(json.loads(last_line(done.stdout))["__MONOTONIC_TIMESTAMP"])
            seconds = (said - int(began["ActiveEnterTimestampMonotonic"])) / 1e6
        except (ValueError, KeyError, TypeError):
            return None  # another log, no rights to read this one, or an older journalctl
        return seconds if seconds > 0 else None  # what it said at an earlier start does not count

    def pids(self, control_group: str | None = None) -> frozenset[int]:
        """The processes in the unit's control group and below.

        control_group: as a UnitState told it (a stopped unit no longer tells it); None asks systemd. Raises
        HostError.
        """
        group = self.show().control_group if control_group is None else control_group
        if not group:
            return frozenset()
        if not group.startswith("/") or ".." in group.split("/") or group == "/":
            raise HostError(f"{self.name} on {self._transport.name} has the unusable control group {group!r}")
        path = posixpath.join(self._cgroup_root, group.lstrip("/"))
        argv = ["find", path, "-name", "cgroup.procs", "-exec", "cat", "{}", "+"]
        done = self._transport.run(argv, deadline=COMMAND_DEADLINE_S)
        if done.rc is None or (done.rc != 0 and "No such file" not in done.stderr):
            done.check(f"listing the processes of {self.name}")
        # A pid of 0 is a process of another pid namespace. It must never reach `kill`.
        return frozenset(pid for line in done.stdout.split() if (pid := _whole(line)) > 1)


def valid_unit_name(name: str) -> str:
    """Return `name` if it is a full unit name without shell or option characters. Raises HostError."""
    if name.startswith("-") or not _NAME.fullmatch(name):
        raise HostError(
            f"{name!r} is not a unit name: set `service` to a full name such as sglang-qwen.service"
            " (letters, digits, :_.\\@-)"
        )
    return name


def show_properties(transport: Transport, unit: str, properties: str) -> dict[str, str]:
    """`systemctl show -p properties unit` by key (systemd answers in its own order). Raises HostError."""
    done = transport.run(["systemctl", "show", "-p", properties, unit], deadline=COMMAND_DEADLINE_S)
    done.check(f"reading the state of {unit}")
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def parse_span(text: str) -> float:
    """Seconds of a systemd time span such as "1min 30s", "500ms" or "infinity". Raises HostError."""
    text = text.strip()
    if text == "infinity":
        return math.inf
    parts = _SPAN.findall(text)
    if not parts or _SPAN.sub("", text).strip() or any(unit not in _SPAN_SECONDS for _, unit in parts):
        raise HostError(f"{text!r} is not a systemd time span")
    return sum(float(number) * _SPAN_SECONDS[unit] for number, unit in parts)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return 0
