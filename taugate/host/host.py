"""A host as one object: how to reach it, its serving unit, its GPUs, its server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from taugate.errors import HostError
from taugate.host import gpus
from taugate.host.helper import Helper
from taugate.host.local import LocalTransport
from taugate.host.sglang import SGLangClient
from taugate.host.transport import Transport
from taugate.host.unit import Unit, valid_unit_name

# Used only when neither an earlier window nor the server itself tells how long a start takes.
DEFAULT_START_S = 300.0


@dataclass(frozen=True)
class HostSettings:
    """What a profile of gate.toml says about a host. Paths without a note are on the host; port numbers are
    TCP.

    key, known_hosts, ssh_config: files on this machine. What of port, user, key and known_hosts is None is as the
    OpenSSH configuration says (ssh_config; None: the user's own). host_key_fingerprint: SHA256:… of the only host keys
    that are trusted, in place of known_hosts. expected_model_id None: whatever is served is accepted. sudo: changes
    are made through the installed helper; None: unless the login user is root.
    """

    service: str
    serve_port: int = 30000
    transport: Literal["ssh", "local"] = "ssh"
    host: str = ""
    port: int | None = None
    user: str | None = None
    key: Path | None = None
    known_hosts: Path | None = None
    host_key_fingerprint: tuple[str, ...] = ()
    ssh_config: Path | None = None
    connect_timeout: float = 15.0
    remote_python: str = "python3"
    work_dir: str = "/var/tmp/taugate"
    cgroup_root: str = "/sys/fs/cgroup"
    expected_model_id: str | None = None
    sudo: bool | None = None


class Host:
    """A host that serves a model. Use as a context manager, or call close()."""

    def __init__(self, settings: HostSettings, transport: Transport) -> None:
        self.settings = settings
        self.transport = transport
        self.unit = Unit(transport, settings.service, settings.cgroup_root)
        self.server = SGLangClient(transport, settings.serve_port)

    @property
    def name(self) -> str:
        return self.transport.name

    @property
    def work_dir(self) -> str:
        return self.settings.work_dir

    @property
    def helper(self) -> Helper:
        """What makes changes there."""
        return Helper(self.transport, bool(self.settings.sudo))

    @property
    def remote_python(self) -> str:
        return self.settings.remote_python

    def gpus(self) -> gpus.GpuSnapshot:
        """All GPUs and their processes now. Raises HostError."""
        return gpus.query(self.transport)

    def start_estimate(self, last_start_s: float | None = None) -> tuple[float, str]:
        """(seconds, source) that a start of the server is expected to take.

        last_start_s: seconds measured by an earlier window, if known. Otherwise what the host's journal says of
        the last start, otherwise the server's own account of it (which leaves out what was before its first weight),
        otherwise DEFAULT_START_S. Raises HostError if the server does not answer.
        """
        if last_start_s:
            return last_start_s, "measured by the last window"
        if seen := self.unit.last_start_s():
            return seen, "the host's journal of the last start"
        told = self.server.startup_seconds()
        return (told, "the server's own last start") if told else (DEFAULT_START_S, "assumed, nothing is known")

    def by_hand(self, command: str) -> str:
        """The line a person types on this machine to run `command` on the host, as root."""
        settings = self.settings
        command = f"sudo {command}" if settings.sudo else command
        if settings.transport == "local":
            return command
        port = f"-p {settings.port} " if settings.port not in (None, 22) else ""
        user = f"{settings.user}@" if settings.user else ""
        return f"ssh {port}{user}{settings.host} {command}"

    def close(self) -> None:
        self.transport.close()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def connect(settings: HostSettings) -> Host:
    """Reach the host and run one command there.

    Raises HostKeyError, HostError (unreachable, not let in, unusable settings) with one sentence.
    """
    valid_unit_name(settings.service)
    transport: Transport
    if settings.transport == "local":
        transport = LocalTransport()
    else:
        if not settings.host:
            raise HostError('the profile names no host: set `host`, or transport = "local" for this machine')
        from taugate.host.ssh import SshTransport  # paramiko takes a while to import

        transport = SshTransport(
            settings.host,
            settings.port,
            settings.user,
            settings.key,
            settings.known_hosts,
            settings.connect_timeout,
            fingerprints=settings.host_key_fingerprint,
            config=settings.ssh_config,
        )
    try:
        user = transport.run(["id", "-u"], deadline=30.0).check("a first command").stdout.strip()
    except BaseException:
        transport.close()
        raise
    return Host(settings if settings.sudo is not None else replace(settings, sudo=user != "0"), transport)
