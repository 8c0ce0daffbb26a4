"""SSH host keys: only a key that a known_hosts file holds, or that has a pinned fingerprint, is accepted, and the
error says how to add one.
"""

from __future__ import annotations

import base64
import fnmatch
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

import paramiko

from taugate.errors import HostKeyError
from taugate.host.sshconfig import Route

_PIN = re.compile(r"SHA256:[A-Za-z0-9+/]{43}=?")


def trust(client: paramiko.SSHClient, route: Route) -> None:
    """Let `client` accept the keys that `route` trusts and no others. Raises HostKeyError (unusable files, pins)."""
    for pin in route.pins:
        if not _PIN.fullmatch(pin):
            raise HostKeyError(
                f"{pin!r} is not a host key's fingerprint: set `host_key_fingerprint` to SHA256:… as"
                " `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` prints it on the host"
            )
    if route.pins:
        client.set_missing_host_key_policy(PinnedKeys(route))
        return
    for path in route.known_hosts:
        _load(client, path, entry_name(route))
    client.set_missing_host_key_policy(StrictKeys(route))


def _load(client: paramiko.SSHClient, path: Path, name: str) -> None:
    """Trust what `path` holds for the host that is called `name` there; a missing file knows no host.

    paramiko's own reader takes no wildcards, and no file with a line for certificates or revoked keys.
    """
    try:
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            entry = None if line.startswith(("#", "@")) else paramiko.hostkeys.HostKeyEntry.from_line(line, number)
            if entry and entry.key and _matches(name, entry.hostnames):
                client.get_host_keys().add(name, entry.key.get_name(), entry.key)
    except (OSError, paramiko.SSHException, paramiko.hostkeys.InvalidHostKey) as error:
        raise HostKeyError(f"the known_hosts file {path} cannot be read: {error}") from error


def _matches(name: str, patterns: Sequence[str]) -> bool:
    if any(pattern.startswith("!") and fnmatch.fnmatchcase(name, _glob(pattern[1:])) for pattern in patterns):
        return False
    return any(
        paramiko.HostKeys.hash_host(name, pattern) == pattern
        if pattern.startswith("|1|")
        else fnmatch.fnmatchcase(name, _glob(pattern))
        for pattern in patterns
    )


def _glob(pattern: str) -> str:
    return pattern.replace("[", "[[]")  # brackets are around the address of a host with a port


def entry_name(route: Route) -> str:
    """What known_hosts files call the host."""
    return route.key_name or (route.address if route.port == 22 else f"[{route.address}]:{route.port}")


class StrictKeys(paramiko.RejectPolicy):
    """Rejects every unknown key, with the command that adds it."""

    def __init__(self, route: Route) -> None:
        self._route = route

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        route = self._route
        raise HostKeyError(
            f"the SSH key of {_machine(route)} ({describe(key)}) is not in {_files(route)}: after checking its"
            f" fingerprint on the host, add it with `{add_command(route, key)}`"
        )


class PinnedKeys(paramiko.RejectPolicy):
    """Accepts the keys with the route's fingerprints and no others."""

    def __init__(self, route: Route) -> None:
        self._route = route

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        pins = [pin.rstrip("=") for pin in self._route.pins]
        if key.fingerprint.rstrip("=") not in pins:
            raise HostKeyError(
                f"the SSH key of {_machine(self._route)} is {describe(key)}, and `host_key_fingerprint` is"
                f" {', '.join(pins)}, so this may be another machine: after checking on the host with `ssh-keygen -lf"
                f" /etc/ssh/ssh_host_{_kind(key)}_key.pub`, correct the profile"
            )


def refuse_revoked(route: Route, key: paramiko.PKey) -> None:
    """Raise HostKeyError if a known_hosts file marks `key` as revoked, which paramiko passes over."""
    blob = key.get_base64()
    for path in route.known_hosts:
        if any(words[:1] == ["@revoked"] and blob in words for words in _lines(path)):
            raise HostKeyError(
                f"the SSH key of {_machine(route)} ({describe(key)}) is revoked in {path}: this may be another machine"
            )


def changed_key(route: Route, key: paramiko.PKey) -> HostKeyError:
    """The error for a key that differs from the known one."""
    forget = f"ssh-keygen -R {shlex.quote(entry_name(route))} -f {shlex.quote(str(route.known_hosts[0]))}"
    return HostKeyError(
        f"the SSH key of {_machine(route)} ({describe(key)}) is not the one in {_files(route)}, so this may be another"
        f" machine: after checking its fingerprint on the host, replace it with `{forget} && {add_command(route, key)}`"
    )


def add_command(route: Route, key: paramiko.PKey) -> str:
    """What adds the key to the first known_hosts file, once a person has checked it."""
    file = shlex.quote(str(route.known_hosts[0]))
    if not (route.key_name or route.jumps or route.command):
        return f"ssh-keyscan -p {route.port} {shlex.quote(route.address)} >> {file}"
    # ssh-keyscan knows neither an alias nor a jump host.
    return f"echo {shlex.quote(f'{entry_name(route)} {key.get_name()} {key.get_base64()}')} >> {file}"


def describe(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.fingerprint}"


def public_blobs(paths: Iterable[Path]) -> set[bytes]:
    """The public halves that lie beside private key files."""
    blobs = set()
    for path in paths:
        for words in _lines(path.with_name(f"{path.name}.pub")):
            if len(words) >= 2:
                blobs.add(base64.b64decode(words[1] + "=="))
    return blobs


def _machine(route: Route) -> str:
    return f"{route.address} port {route.port}"


def _files(route: Route) -> str:
    first, *others = route.known_hosts
    return " or ".join(map(str, [first, *(path for path in others if path.exists())]))


def _kind(key: paramiko.PKey) -> str:
    name = key.get_name()
    return "ed25519" if "ed25519" in name else "ecdsa" if "ecdsa" in name else "rsa"


def _lines(path: Path) -> list[list[str]]:
    try:
        return [line.split() for line in path.read_text(errors="replace").splitlines()]
    except OSError:
        return []
