"""SSH host keys: only a key that the configured known_hosts file holds is accepted, and the error says how
to add one.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import paramiko

from taugate.errors import HostKeyError


def load_known_hosts(client: paramiko.SSHClient, path: Path) -> None:
    """Load `path` (plain or hashed entries); a missing file means that no host is known.

    Raises HostKeyError.
    """
    if not path.exists():
        return
    try:
        client.load_host_keys(str(path))
    except (OSError, paramiko.SSHException, paramiko.hostkeys.InvalidHostKey) as error:
        raise HostKeyError(f"the known_hosts file {path} cannot be read: {error}") from error


class StrictKeys(paramiko.RejectPolicy):
    """Rejects every unknown key, with the command that adds it."""

    def __init__(self, host: str, port: int, known_hosts: Path) -> None:
        self._host, self._port, self._file = host, port, known_hosts

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        raise HostKeyError(
            f"the SSH key of {self._host} port {self._port} ({describe(key)}) is not in {self._file}: after"
            " checking its"
            f" fingerprint on the host, add it with `{scan_command(self._host, self._port, self._file)}`"
        )


def changed_key(host: str, port: int, known_hosts: Path, key: paramiko.PKey) -> HostKeyError:
    """The error for a key that differs from the known one."""
    entry = host if port == 22 else f"[{host}]:{port}"
    forget = f"ssh-keygen -R {shlex.quote(entry)} -f {shlex.quote(str(known_hosts))}"
    return HostKeyError(
        f"the SSH key of {host} port {port} ({describe(key)}) is not the one in {known_hosts}, so this may"
        " be another"
        f" machine: after checking its fingerprint on the host, replace it with"
        f" `{forget} && {scan_command(host, port, known_hosts)}`"
    )


def scan_command(host: str, port: int, known_hosts: Path) -> str:
    return f"ssh-keyscan -p {port} {shlex.quote(host)} >> {shlex.quote(str(known_hosts))}"


def describe(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.fingerprint}"
