"""A serving host in memory: it answers the commands that taugate sends, on a clock of its own, with faults
on demand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from taugate.errors import HostError
from taugate.host.host import Host, HostSettings
from taugate.host.transport import Completed

SERVICE = "sglang-fake.service"
SERVER_PID, LEFTOVER_PID = 100, 101
LOADED_MIB, IDLE_MIB, TOTAL_MIB = 47004, 4, 49140


class World:
    """The host's state.

    Faults: step number -> what goes wrong at that command, request or pause (see `step`).
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.active = "active"
        self.changes_at = 0.0  # when activating or deactivating ends
        self.ready_at = 0.0
        self.timer: tuple[str, float, float] | None = None  # description, deadline, ttl
        self.leftover = False  # a process that outlives the stop and keeps its memory
        self.killable = True
        self.served_since_start = 0
        self.model_path = "/models/m"
        self.starts_fail = False
        self.late: tuple[float, Callable[[], object]] | None = (
            None  # a command that the host gets round to later
        )
        self.quarantine = ""
        self.requests = 0
        self.sizes = 9
        self.info: dict[str, object] = {"tokenizer_path": "/models/m", "architectures": ["A"]}
        self.prompts: list[list[int]] = []
        self.faults: dict[int, str] = {}
        self.names: list[str] = []
        self.log: list[str] = []
        self.violations: list[str] = []

    # What the tests ask for

    @property
    def steps(self) -> int:
        return len(self.names)

    @property
    def serving(self) -> bool:
        self.settle()
        return self.active == "active"

    @property
    def armed(self) -> bool:
        self.settle()
        return self.timer is not None

    # Time

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.step("sleep", lambda: self.advance(seconds))

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1)
            self.settle()

    def settle(self) -> None:
        if self.timer and self.now >= self.timer[1]:
            self.timer = None
            self.log.append("dead-man fired")
            self.start()
        if self.late and self.now >= self.late[0]:
            (_, action), self.late = self.late, None
            action()
        if self.active in ("activating", "deactivating") and self.now >= self.changes_at:
            self.active = {"activating": "active", "deactivating": "inactive"}[self.active]
            if self.active == "active" and self.starts_fail:
                self.active = "failed"

    def step(self, name: str, action: Callable[[], object]) -> object:
        """Count a step and do it, unless a fault is due: KIND or KIND-after (the host acts, the client
        fails).
        """
        number = self.steps
        self.names.append(name)
        fault = self.faults.get(number, "")
        if name == "sleep" and not fault.startswith(("ctrl-c", "exit")):  # nothing else can go wrong there
            fault = ""
        if fault.endswith("-after"):
            action()
        if fault.startswith("ctrl-c-late"):
            self.late = (self.now + float(fault.removeprefix("ctrl-c-late-")), action)
        if fault.startswith("ctrl-c"):
            raise KeyboardInterrupt
        if fault.startswith("exit"):
            raise SystemExit(3)
        if fault.startswith("host-error"):
            raise HostError(f"injected at {name}")
        if fault.startswith("bug"):
            raise RuntimeError(f"injected at {name}")
        if fault:  # lost, rc1: values, where there is one
            return fault
        return action()

    # systemd

    def stop(self) -> None:
        self.log.append("stop")
        if not self.timer:
            self.violations.append("stop without an armed lease")
        if self.active in ("active", "activating"):
            self.active, self.changes_at = "deactivating", self.now + 3

    def start(self) -> None:
        self.log.append("start")
        if self.active in ("inactive", "failed"):
            self.active, self.changes_at, self.ready_at = "activating", self.now + 1, self.now + 8
            self.served_since_start = 0
        elif self.active == "deactivating":
            self.active, self.changes_at, self.ready_at = (
                "activating",
                self.changes_at + 1,
                self.changes_at + 8,
            )
            self.served_since_start = 0

    def pids(self) -> list[int]:
        alive = [SERVER_PID] if self.active in ("active", "activating", "deactivating") else []
        return alive + ([LEFTOVER_PID] if self.leftover else [])

    def used_mib(self) -> int:
        return LOADED_MIB if self.pids() else IDLE_MIB

    def command(self, argv: list[str]) -> tuple[int, str]:
        """Exit status and stdout of a command."""
        self.advance(0.01)
        return self.execute(argv)

    def execute(self, argv: list[str]) -> tuple[int, str]:
        if "taugate-host" in argv:
            return self.helper(*argv[argv.index("taugate-host") + 1 :])
        line = " ".join(argv)
        if line == "true":
            return 0, ""
        if line.startswith("systemctl show") and argv[-1] == SERVICE:
            return 0, (
                f"LoadState=loaded\nActiveState={self.active}\nSubState=x\nMainPID=0\nResult=success\n"
                f"ControlGroup=/system.slice/{SERVICE}\nKillMode=mixed\nTimeoutStopUSec=1min"
                " 30s\nRestart=always\n"
                "NRestarts=0\nUnitFileState=enabled\nInvocationID=a\n"
            )
        if argv[0] == "sh":  # the unit's files
            return 0, f"[Service]\n--- environment\n{'a' * 64}  /etc/default/sglang\n"
        if argv[0] == "find":
            return 0, "".join(f"{pid}\n" for pid in self.pids())
        if argv[0] == "cat":
            found = re.findall(r"/proc/(\d+)/stat", line)
            return 0, "".join(f"{pid} (x) S {' '.join(['0'] * 18)} 77 0\n" for pid in found)
        if line.startswith("nvidia-smi --query-gpu"):
            return 0, f"0, GPU-a, Fake, {self.used_mib()}, {TOTAL_MIB}, [N/A]\n"
        if line.startswith("nvidia-smi --query-compute"):
            return 0, "".join(f"{pid}, GPU-a, {LOADED_MIB - IDLE_MIB}, s\n" for pid in self.pids()[-1:])
        raise AssertionError(f"the fake host does not know: {line}")

    def helper(self, command: str, *args: str) -> tuple[int, str]:
        """What helper.py's script does, told in its own words."""
        mine = (
            self.timer is not None and self.timer[0].startswith(f"taugate window {args[0]} ") if args else 0
        )
        if command in ("held", "renew", "stop", "job", "kill", "kill-pid", "disarm") and not mine:
            return 75, ""
        if command in ("job", "kill", "kill-pid") and self.active not in ("inactive", "failed"):
            return 76, ""
        match command:
            case "arm":
                if self.timer:
                    return (0, "") if mine else (78, self.timer[0])
                ttl = float(args[1])
                self.timer = (f"taugate window {args[0]} {args[5]}", self.now + ttl, ttl)
                self.log.append("arm")
            case "holder":
                return 0, f"{self.timer[0]}\n" if self.timer else ""
            case "renew":
                self.timer = (self.timer[0], self.now + self.timer[2], self.timer[2])
            case "stop":
                self.stop()
            case "start":
                if self.timer and not mine:
                    return 78, ""
                self.start()
            case "job":
                self.log.append("job")
                if self.pids():
                    self.violations.append("job beside the server")
                return 0, "done\n"
            case "kill":
                self.log.append("kill")
                self.leftover = self.leftover and not self.killable
            case "kill-pid":
                self.log.append(f"kill -KILL {args[2]}")
            case "disarm":
                if args[1:] and self.active != "active":
                    return 76, ""
                self.timer = None
                self.log.append("disarm")
                if self.active != "active" or ("stop" in self.log and self.served_since_start < 2):
                    self.violations.append("disarm before the server serves")
            case "quarantine":
                self.quarantine = args[2]
        return 0, ""

    # SGLang

    def http(self, method: str, path: str, body: str = "") -> tuple[int, object]:
        self.advance(0.01)
        if self.now < self.ready_at:
            return 503, None
        if path == "/generate":
            self.served_since_start += 1
            self.prompts.append(json.loads(body)["input_ids"])
            meta = {"finish_reason": {"type": "length", "length": 2}, "prompt_tokens": 3, "cached_tokens": 0}
            return 200, {"output_ids": [1, 2], "meta_info": meta}
        bodies = {
            "/ready": None,
            "/v1/loads": {"loads": [{"num_running_reqs": self.requests, "num_waiting_reqs": 0}]},
            "/v1/models": {"data": [{"id": "m"}]},
            "/model_info": self.info | {"model_path": self.model_path},
            "/server_info": {"launch_command": "run", "version": "1", "random_seed": self.now,
                             "max_total_num_tokens": self.sizes, "internal_states": [{}]},
        }
        return (200, bodies[path]) if path in bodies else (404, None)


class FakeTransport:
    """The `Transport` of a World."""

    name = "fake"

    def __init__(self, world: World) -> None:
        self.world = world

    def run(self, argv, *, deadline, input=None, on_line=None):
        argv = list(argv)
        name = argv[argv.index("taugate-host") :] if "taugate-host" in argv else argv
        answer = self.world.step(" ".join(name), lambda: self.world.command(argv))
        if isinstance(answer, str):
            answer = (None if answer.startswith("lost") else 1, "")
        return Completed(tuple(argv), answer[0], answer[1], "", 0.0, self.name)

    def open_tcp(self, port, timeout):
        self.world.settle()
        if self.world.active != "active" or self.world.now < self.world.ready_at - 4:
            raise ConnectionRefusedError
        return _Connection(self.world)

    def close(self):
        pass


class _Connection:
    def __init__(self, world: World) -> None:
        self.world, self.request, self.answer = world, b"", None

    def settimeout(self, seconds):
        pass

    def sendall(self, data):
        self.request += bytes(data)

    def recv(self, size):
        if self.answer is None:
            head, _, text = self.request.decode().partition("\r\n\r\n")
            method, path, _ = head.split(" ", 2)
            done = self.world.step(path, lambda: self.world.http(method, path, text))
            if isinstance(done, str):
                raise ConnectionResetError("injected")
            body = b"" if done[1] is None else json.dumps(done[1]).encode()
            self.answer = f"HTTP/1.1 {done[0]} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        data, self.answer = self.answer[:size], self.answer[size:]
        return data

    def close(self):
        pass


def fake_host(world: World) -> Host:
    return Host(HostSettings(SERVICE, host="fake", user="root"), FakeTransport(world))
