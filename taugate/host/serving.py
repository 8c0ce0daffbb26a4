"""Preflight's questions to the server itself: is it ready, is it the right one, does anything outlive its stop."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from taugate.host.check import Check
from taugate.host.host import Host
from taugate.host.record import WindowSettings
from taugate.host.sglang import ServerIdentity
from taugate.host.unit import COMMAND_DEADLINE_S

# [s]: the shell that runs pgrep has this text in its own command line.
_WEIGHT_CACHE = "[s]glang.srt.weight_cache"


def serving_checks(host: Host, window: WindowSettings) -> Iterator[Check]:
    """Read-only. Raises HostError."""
    ready = host.server.ready()
    yield Check(
        "server ready", ready, f"{host.server.where} is {'ready' if ready else 'not ready'}", "wait until it is"
    )
    if not ready:
        return
    identity = host.server.identity()
    expected = host.settings.expected_model_id
    yield Check(
        "model",
        expected in (None, identity.model_id),
        f"it serves {identity.model_id} from {identity.model_path}, SGLang {identity.version}",
        f"{expected} is expected: correct `model_id` or the server",
    )
    argv = _words(identity.launch_command)
    yield _weights(identity, argv)
    saver = "--enable-memory-saver" in argv
    yield Check(
        "memory saver",
        True,
        "off" if not saver else "on: whoever releases and resumes this server's memory (a trainer?) finds it stopped"
        " during the window, and its memory before may not be all of it",
        warn=saver,
    )
    yield _weight_cache(host, argv)
    load = host.server.loads()
    busy = load.running + load.waiting if load else 0
    then = "stopped all the same" if window.on_busy == "stop" else "left alone"
    yield Check(
        "requests in flight",
        True,
        (f"{load.running} running, {load.waiting} waiting" if load else "the server does not tell")
        + (f"; a window waits {window.drain_s:g} s for their end, then the server is {then}" if busy else ""),
        warn=busy > 0,
    )


def _weights(identity: ServerIdentity, argv: list[str]) -> Check:
    version = json.loads(dict(identity.info).get("weight_version", "null"))
    started = version in (None, "default") or "--weight-version" in argv
    return Check(
        "weights are those on disk",
        started,
        f"weight_version is {version}" if version else "as started",
        "they were replaced in memory, and a restart would serve those on disk: save them and restart it yourself",
    )


def _weight_cache(host: Host, argv: list[str]) -> Check:
    """A daemon of SGLang's that keeps weights on the GPU across restarts of the server."""
    mode = next((word for word in argv if word.startswith("--weight-cache-mode")), "")
    mode = argv[argv.index(mode) + 1] if mode in argv[:-1] and "=" not in mode else mode.partition("=")[2]
    found = [f"{app.name} (pid {app.pid})" for app in host.gpus().apps if "weight_cache" in app.name]
    listed = host.transport.run(["pgrep", "-a", "-f", _WEIGHT_CACHE], deadline=COMMAND_DEADLINE_S)
    found += [f"pid {line}" for line in listed.stdout.splitlines()] if listed.rc == 0 else []
    detail = "; ".join([*([f"--weight-cache-mode {mode}"] if mode == "client" else []), *found])
    return Check(
        "no weight cache",
        not detail,
        detail or "none",
        "it holds the weights in GPU memory while the server is stopped: end it, and start the server without it",
    )


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()
