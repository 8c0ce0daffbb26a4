"""python -m taugate host …: looking at a host by hand, bringing its server back, giving a user rights on it."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from taugate.errors import ConfigError, TaugateError, WindowError
from taugate.host import install, status
from taugate.host.host import HostSettings, connect
from taugate.host.record import WindowSettings

OK, USAGE, NOT_SERVING, NO_WINDOWS = 0, 2, 4, 5
_ADDRESS = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?P<host>[^@:\s]+)(?::(?P<port>\d+))?")


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 it serves and windows may open, 2 usage or unreachable, 4 not serving, 5 no windows now."""
    given = _parser().parse_args(argv)
    try:
        settings, window, job_s = _settings(given)
        if given.command in ("install", "uninstall") and given.print:
            print(_script(given, settings))
            return OK
        with connect(settings) as host:
            if given.command == "restore":
                model = status.restore(host, given.deadline, given.force)
                print(f"{settings.service} on {host.name} serves {model} again; windows may be opened")
                return OK
            if given.command == "install":
                print(install.install(host, _login_user(given, settings)))
                return OK
            if given.command == "uninstall":
                print(install.uninstall(host))
                return OK
            found = status.look(host)
            print("\n".join(found.lines()))
            if given.command == "plan":
                print("\n".join(["", *status.plan(host, window, job_s)]))
            if not (found.active and found.ready):
                return NOT_SERVING
            return NO_WINDOWS if found.quarantine or found.lease or found.restoring else OK
    except WindowError as error:
        print(error, file=sys.stderr)
        return NOT_SERVING
    except TaugateError as error:
        print(error, file=sys.stderr)
        return USAGE


def _login_user(given: argparse.Namespace, settings: HostSettings) -> str:
    user = given.for_user or settings.user
    if not user:
        raise ConfigError("whose login is the helper for? name the user with --for USER")
    return user


def _script(given: argparse.Namespace, settings: HostSettings) -> str:
    if given.command == "uninstall":
        return install.uninstaller()
    return install.installer([settings.service], _login_user(given, settings), settings.work_dir)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m taugate", description=__doc__.splitlines()[0])
    groups = parser.add_subparsers(required=True, metavar="host")
    host = groups.add_parser("host", help="a host whose GPUs are borrowed")
    commands = host.add_subparsers(dest="command", required=True)
    texts = {
        "status": "is it serving, who has it, may a window be opened",
        "plan": "the exact commands of a window and the worst case; changes nothing",
        "restore": "start the server, prove that it serves, and let windows open again",
        "install": "let a login user who is not root open windows: a helper of root's, and one sudoers line for it",
        "uninstall": "remove what install has put there",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--profile", help="a profile of ./gate.toml; not needed with --host and --service")
        command.add_argument("--host", metavar="[USER@]HOST[:PORT]", help="instead of the profile's")
        command.add_argument("--service", help="the serving unit, such as sglang.service")
        command.add_argument("--port", type=int, help="where it serves on the host's loopback")
        command.add_argument("--key", type=Path, help="SSH key")
        command.add_argument("--known-hosts", type=Path, help="the known_hosts file to trust")
        command.add_argument("--work-dir", help="the directory of windows on the host")
        if name in ("install", "uninstall"):
            command.add_argument("--print", action="store_true", help="print the script that root would run there")
        if name == "install":
            command.add_argument("--for", dest="for_user", metavar="USER", help="the login user; default the profile's")
        if name == "restore":
            command.add_argument("--force", action="store_true", help="also while a window is open; its job is stopped")
            command.add_argument("--deadline", type=float, default=1800.0, help="seconds to wait for the server")
    return parser


def _settings(given: argparse.Namespace) -> tuple[HostSettings, WindowSettings, float]:
    values: dict[str, Any] = {}
    times: dict[str, float] = {}
    job_s = 1800.0
    if not (given.host and given.service):
        from taugate.config import resolve

        config = resolve(Path.cwd(), {"profile": given.profile} if given.profile else {}, os.environ).value
        if config.host.kind == "embedded":
            raise ConfigError(
                f"profile {config.profile} is the embedded host, which lives only as long as its test run: name a"
                " host with --profile, or with --host and --service"
            )
        profile = config.host
        told = {"host": profile.host, "port": profile.ssh_port, "user": profile.user, "key": profile.key,
                "known_hosts": profile.known_hosts, "service": profile.service, "serve_port": profile.port,
                "work_dir": profile.work_dir, "cgroup_root": profile.cgroup_root, "ssh_config": profile.ssh_config,
                "host_key_fingerprint": profile.host_key_fingerprint,
                "expected_model_id": profile.model_id}  # fmt: skip
        values = {"transport": profile.kind} | {key: value for key, value in told.items() if value is not None}
        shared = ("ttl", "stop_timeout", "free_timeout", "escalate_after", "start_timeout")
        times = {f"{name}_s": getattr(config.window, name) for name in shared} | {"drain_s": config.window.drain}
        job_s = config.window.job_timeout
    if given.host:
        found = _ADDRESS.fullmatch(given.host)
        if not found:
            raise ConfigError(f"--host {given.host} is not [USER@]HOST[:PORT]")
        values |= {"transport": "ssh", "host": found["host"]}
        values |= {"user": found["user"]} if found["user"] else {}
        values |= {"port": int(found["port"])} if found["port"] else {}
    own = {"service": given.service, "serve_port": given.port, "key": given.key, "work_dir": given.work_dir,
           "known_hosts": given.known_hosts}  # fmt: skip
    values |= {key: value for key, value in own.items() if value is not None}
    return HostSettings(**values), WindowSettings((1,), **times), job_s
