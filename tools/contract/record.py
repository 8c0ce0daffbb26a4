"""Asking a server over time, and writing down what it answers."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fixtures.testhost.host import PORT, SERVICE, SystemdHost, serving_pids
from taugate.polling import poll

REFUSED, SILENT = 0, -1  # in place of a status: nobody listens; no answer, or one that breaks off
POLLED = ("/health", "/ready", "/v1/models", "/model_info", "/server_info", "/v1/loads")
_EVERY_S = 0.2
_SECRET = re.compile(r"(^|_)(api_key|token|password|secret)$|keyfile")


def exchange(host: SystemdHost, method: str, path: str, body: Any = None, timeout: float = 60) -> dict[str, Any]:
    """One request to the host's server: {"status", "body"}; body: JSON value, None if the answer is empty."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT)
    try:
        connection.sock = host.dial(PORT, timeout)
    except OSError:
        return {"status": REFUSED, "body": None}
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json", "Connection": "close"})
        answer = connection.getresponse()
        text = answer.read()
        return {"status": answer.status, "body": json.loads(text) if text else None}
    except (OSError, http.client.HTTPException):
        return {"status": SILENT, "body": None}
    finally:
        connection.close()


class Timeline:
    """The statuses of several GETs from when it is entered until it is left: every change, with its second."""

    def __init__(self, host: SystemdHost, paths: tuple[str, ...] = POLLED) -> None:
        self._host, self._paths = host, paths
        self._end, self._lock = threading.Event(), threading.Lock()
        self.changes: list[dict[str, Any]] = []
        self.now: dict[str, int] = {}

    def __enter__(self) -> Timeline:
        self._begun = time.monotonic()
        self._threads = [threading.Thread(target=self._poll, args=(path,)) for path in self._paths]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        self.changes.sort(key=lambda change: change["seconds"])

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._begun, 2)

    def _poll(self, path: str) -> None:
        while not self._end.is_set():
            status = exchange(self._host, "GET", path, timeout=30)["status"]
            if self.now.get(path) != status:
                with self._lock:
                    self.now[path] = status
                    self.changes.append({"seconds": self.seconds, "path": path, "status": status})
            self._end.wait(_EVERY_S)


def start(host: SystemdHost, deadline: float = 400) -> list[dict[str, Any]]:
    """Start the unit and wait until everything is answered with 200; the timeline of that.

    It is enabled first: of a unit that nothing wants, systemd forgets how it ended.
    """
    host.inside("systemctl", "enable", SERVICE)
    with Timeline(host) as timeline:
        host.inside("systemctl", "start", SERVICE)
        poll(
            lambda: [timeline.now.get(path) for path in POLLED] == [200] * len(POLLED),
            deadline=deadline, what="the start of the real server", interval=0.1,
        )  # fmt: skip
    return timeline.changes


class Request(threading.Thread):
    """A generation of `tokens` tokens that runs meanwhile; `answer` and `seconds` when it has ended."""

    def __init__(self, host: SystemdHost, tokens: int) -> None:
        super().__init__(daemon=True)
        self._host, self.tokens = host, tokens
        self.answer: dict[str, Any] = {}
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        begun = time.monotonic()
        params = {"temperature": 0, "max_new_tokens": self.tokens, "ignore_eos": True}
        self.answer = exchange(self._host, "POST", "/generate", {"input_ids": [72, 101], "sampling_params": params})
        self.seconds = round(time.monotonic() - begun, 2)


@contextmanager
def in_flight(host: SystemdHost, tokens: int) -> Iterator[Request]:
    """Until it is left a generation runs; entered once the server counts it."""
    request = Request(host, tokens)

    def runs() -> bool:
        body = exchange(host, "GET", "/v1/loads")["body"]
        return bool(body) and body["loads"][0]["num_running_reqs"] > 0

    poll(runs, deadline=20, what="a running request", interval=0.05)
    yield request
    request.join(60)


def names(host: SystemdHost) -> list[str]:
    """What the unit's processes are called."""
    pids = serving_pids(host)
    listed = host.inside("ps", "-o", "comm=", "-p", ",".join(map(str, pids))).stdout if pids else ""
    return sorted(line.strip() for line in listed.splitlines())


def ended(host: SystemdHost) -> dict[str, str]:
    """How systemd says that the unit ended."""
    return host.show(SERVICE, "ActiveState", "SubState", "Result", "ExecMainCode", "ExecMainStatus")


def set_kill_mode(host: SystemdHost, kill_mode: str) -> None:
    """From the next stop on."""
    file = f"/run/systemd/system/{SERVICE}.d/zz-kill-mode.conf"
    host.inside("mkdir", "-p", file.rsplit("/", 1)[0])
    host.inside("tee", file, input=f"[Service]\nKillMode={kill_mode}\n")
    host.inside("systemctl", "daemon-reload")


def wait_ended(host: SystemdHost, deadline: float = 120) -> None:
    poll(
        lambda: ended(host)["ActiveState"] in ("inactive", "failed"),
        deadline=deadline, what="the end of the real server", interval=0.05,
    )  # fmt: skip


def clean(value: Any, replace: Callable[[str], str]) -> Any:
    """A copy without secrets and, by `replace`, without the names of this machine."""
    if isinstance(value, dict):
        return {
            key: "(removed)" if part and isinstance(part, str) and _SECRET.search(key) else clean(part, replace)
            for key, part in value.items()
        }
    if isinstance(value, list):
        return [clean(part, replace) for part in value]
    return replace(value) if isinstance(value, str) else value
