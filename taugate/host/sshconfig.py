"""Where an SSH host is and who gets in there: what the profile says, and for the rest the user's OpenSSH configuration.

OpenSSH's own client is asked (`ssh -G`), because paramiko 5.1 reads `Include` as an unknown word and goes on without
what is included. Without that client, paramiko's reader serves for files that do not use it.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import paramiko

from taugate.errors import HostError

DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_USER_CONFIG, _SYSTEM_CONFIG = "~/.ssh/config", "/etc/ssh/ssh_config"
_KNOWN_HOSTS = {
    "userknownhostsfile": "~/.ssh/known_hosts ~/.ssh/known_hosts2",
    "globalknownhostsfile": "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2",
}
_JUMP = re.compile(r"(?:ssh://)?(?:(?P<user>[^@\s]+)@)?(?P<host>\[[^\]]+\]|[^\s:@]+)(?::(?P<port>\d+))?/?")
_UNREADABLE = re.compile(r"^\s*(include\b|match\b.*\bexec\b)", re.IGNORECASE | re.MULTILINE)
_MAX_JUMPS = 8
_Told = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Route:
    """How one machine is reached. host: as the user calls it; address, port: where it is.

    keys: private keys to try. only_keys: no other key of the agent. agent: its socket, "" = none is asked.
    known_hosts: files of trusted host keys, looked up as key_name (HostKeyAlias) if that is set. pins: trusted
    fingerprints, in place of those files. command: a ProxyCommand. jumps: the machines in between, first to last.
    """

    host: str
    address: str
    port: int
    user: str
    keys: tuple[Path, ...] = ()
    only_keys: bool = False
    agent: str = ""
    known_hosts: tuple[Path, ...] = ()
    key_name: str = ""
    pins: tuple[str, ...] = ()
    command: str = ""
    jumps: tuple[Route, ...] = ()

    def __str__(self) -> str:
        return f"{self.address} port {self.port} as user {self.user}"


def resolve(
    host: str,
    *,
    port: int | None = None,
    user: str | None = None,
    key: Path | None = None,
    known_hosts: Path | None = None,
    pins: Sequence[str] = (),
    config: Path | None = None,
) -> Route:
    """The route to `host`. What is given here wins over the configuration; known_hosts holds for jump hosts, too.

    config: an OpenSSH configuration in place of the user's and the system's. Raises HostError.
    """
    return _resolve(host, port, user, key, known_hosts, tuple(pins), config, _MAX_JUMPS)


def _resolve(
    host: str,
    port: int | None,
    user: str | None,
    key: Path | None,
    known_hosts: Path | None,
    pins: tuple[str, ...],
    config: Path | None,
    depth: int,
) -> Route:
    if not host or host.startswith("-") or any(char.isspace() for char in host):
        raise HostError(f"{host!r} is not the name of an SSH host: correct `host`")
    if depth < 0:
        raise HostError(f"more than {_MAX_JUMPS} jump hosts in the SSH configuration: {host} jumps in a circle")
    told = _ask(host, port, user, config)
    one = {name: values[0] for name, values in told.items() if values}
    only = key is not None or one.get("identitiesonly", "no") == "yes"
    route = Route(
        host=host,
        address=one.get("hostname", host),
        port=port or int(one.get("port", 22)),
        user=user or one.get("user") or getpass.getuser(),
        only_keys=only,
        key_name=one.get("hostkeyalias", ""),
        pins=pins,
    )
    files = [file for name, usual in _KNOWN_HOSTS.items() for file in shlex.split(one.get(name, usual))]
    trusted = [known_hosts] if known_hosts else [_path(file, route) for file in files if file != "none"]
    agent = os.path.expandvars(_words(one, "identityagent"))
    if one.get("identityagent", "SSH_AUTH_SOCK") == "SSH_AUTH_SOCK":
        agent = os.environ.get("SSH_AUTH_SOCK", "")
    names = told.get("identityfile") or DEFAULT_KEYS
    keys = (key.expanduser(),) if key else tuple(path for name in names if (path := _path(name, route)).is_file())
    jumps: tuple[Route, ...] = ()
    for step in _words(one, "proxyjump").split(",") if _words(one, "proxyjump") else ():
        found = _JUMP.fullmatch(step.strip())
        if not found:
            raise HostError(f"the SSH configuration of {host} names the unusable jump host {step!r}")
        hop = _resolve(
            found["host"].strip("[]"), int(found["port"]) if found["port"] else None, found["user"], None, known_hosts,
            (), config, depth - 1,
        )  # fmt: skip
        # As with OpenSSH, only the first one is reached as its own configuration says.
        jumps = (*jumps, replace(hop, jumps=(), command="")) if jumps else (*hop.jumps, replace(hop, jumps=()))
    command = "" if jumps else _tokens(_words(one, "proxycommand"), route)
    agent = str(_path(agent, route)) if agent else ""
    return replace(route, keys=keys, agent=agent, known_hosts=tuple(trusted), jumps=jumps, command=command)


def _words(one: Mapping[str, str], name: str) -> str:
    value = one.get(name) or ""
    return "" if value.lower() == "none" else value


def _ask(host: str, port: int | None, user: str | None, config: Path | None) -> _Told:
    """Every option of `host` by its name in lower case, with its values."""
    program = shutil.which("ssh")
    if not program:
        return _read(host, config)
    argv = [program, "-T", "-G", *(["-F", str(config)] if config else [])]
    argv += [*(["-p", str(port)] if port else []), *(["-l", user] if user else []), "--", host]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(f"`ssh -G {host}` did not tell how {host} is reached: {error}") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[0]
        raise HostError(f"the SSH configuration cannot be read: {said}")
    told: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        told.setdefault(name.lower(), []).append(value)
    return told


def _read(host: str, config: Path | None) -> _Told:
    """The same by paramiko's reader. Raises HostError for what that would overlook."""
    parsed = paramiko.SSHConfig()
    for path in [config] if config else [Path(_USER_CONFIG).expanduser(), Path(_SYSTEM_CONFIG)]:
        try:
            text = path.read_text()
            if not _UNREADABLE.search(text):
                parsed.parse(text.splitlines())
            elif config or path != Path(_SYSTEM_CONFIG):  # Debian's own includes an empty folder
                raise HostError(
                    f"{path} uses Include or Match exec, which only OpenSSH's client reads: install it (`ssh`), or set"
                    " `ssh_config` to a file without them"
                )
        except FileNotFoundError:
            continue
        except (OSError, paramiko.ssh_exception.ConfigParseError) as error:
            raise HostError(f"the SSH configuration {path} cannot be read: {error}") from error
    found = parsed.lookup(host)
    return {name: value if isinstance(value, list) else [value] for name, value in found.items() if value}


def _path(text: str, route: Route) -> Path:
    return Path(_tokens(text.strip('"'), route)).expanduser()


def _tokens(text: str, route: Route) -> str:
    """Replace OpenSSH's %-tokens."""
    local = socket.gethostname()
    values = {
        "%": "%", "d": os.path.expanduser("~"), "h": route.address, "i": str(os.getuid()), "k": route.key_name,
        "L": local.partition(".")[0], "l": local, "n": route.host, "p": str(route.port), "r": route.user,
        "u": getpass.getuser(),
    }  # fmt: skip
    return re.sub(r"%(.)", lambda found: values.get(found[1], found[0]), text)
