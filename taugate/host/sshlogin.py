"""Opening an SSH connection, through jump hosts if need be: one clear sentence for each way in which that can fail."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import paramiko

from taugate.errors import HostError
from taugate.host.hostkeys import changed_key, public_blobs, refuse_revoked, trust
from taugate.host.pulse import Pulse
from taugate.host.sshconfig import Route

# Without a handler, paramiko's reader thread prints tracebacks on stderr for errors that we report ourselves.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

# Data that the other machine does not acknowledge for so long ends the connection, in the kernel.
TCP_USER_TIMEOUT_MS = 15_000
LOST = (paramiko.SSHException, EOFError, OSError)
_Below = tuple[Route, paramiko.SSHClient]


class Login:
    """An authenticated connection and those to the jump hosts below it."""

    def __init__(self, clients: list[paramiko.SSHClient]) -> None:
        self._clients = clients
        transport = clients[-1].get_transport()
        assert transport is not None
        self.transport: paramiko.Transport = transport
        self._pulse = Pulse(transport)
        self._opening = threading.Lock()

    @property
    def active(self) -> bool:
        return self.transport.is_active()

    def session(self, timeout: float) -> paramiko.Channel:
        """A new session. Raises ChannelException (refused) and others of LOST."""
        with self._opening:  # paramiko keeps one error per connection: of two refusals, one thread would get both
            return self.transport.open_session(timeout=timeout)

    def tcp(self, port: int, timeout: float) -> paramiko.Channel:
        """A connection to 127.0.0.1:`port` there. Raises as `session`."""
        with self._opening:
            return self.transport.open_channel("direct-tcpip", ("127.0.0.1", port), ("127.0.0.1", 0), timeout=timeout)

    def close(self) -> None:
        """End it; a second call does nothing."""
        self._pulse.stop()
        for client in reversed(self._clients):
            client.close()


def open_login(route: Route, timeout: float) -> Login:
    """Log in along `route`; timeout in seconds, for all of it.

    Raises HostKeyError (unknown, changed or revoked key) and HostError (refused, no answer, unknown name, not let in).
    """
    end = time.monotonic() + timeout
    opened: list[paramiko.SSHClient] = []
    try:
        for number, step in enumerate(steps := (*route.jumps, route)):
            below = (steps[number - 1], opened[-1]) if number else None
            opened.append(_log_in(step, below, end, timeout))
        return Login(opened)
    except BaseException:
        for client in reversed(opened):
            client.close()
        raise


def _log_in(step: Route, below: _Below | None, end: float, timeout: float) -> paramiko.SSHClient:
    for key in step.keys:
        if step.only_keys and not key.is_file():
            raise HostError(f"the SSH key {key} for {step} does not exist: set the profile's `key`")
    client = paramiko.SSHClient()
    keys = _Keys(step)
    try:
        trust(client, step)
        with _closed_at(end, sock := _socket(step, below, _left(end))):
            client.connect(
                step.key_name or step.address,
                port=22 if step.key_name else step.port,
                username=step.user,
                sock=sock,
                auth_strategy=keys,
                timeout=_left(end),
                banner_timeout=_left(end),
                auth_timeout=_left(end),
                channel_timeout=_left(end),
            )
        return client
    except paramiko.BadHostKeyException as error:
        client.close()
        raise changed_key(step, error.key) from None
    except LOST as error:
        client.close()
        raise HostError(_sentence(error, step, keys, end, timeout)) from error
    except BaseException:
        client.close()
        raise


def _left(end: float) -> float:
    return max(0.01, end - time.monotonic())


@contextlib.contextmanager
def _closed_at(end: float, sock: socket.socket | paramiko.Channel) -> Iterator[None]:
    """Close `sock` at `end` if the body is not over by then: paramiko's own limits are for one step each."""
    guard = threading.Timer(_left(end), sock.close)
    guard.daemon = True
    guard.start()
    try:
        yield
    finally:
        guard.cancel()


def _socket(step: Route, below: _Below | None, left: float) -> socket.socket | paramiko.Channel:
    """What the session is spoken over: TCP, a channel of the jump host before, or a ProxyCommand."""
    if below is not None:
        jump, client = below
        transport = client.get_transport()
        assert transport is not None
        try:
            return transport.open_channel("direct-tcpip", (step.address, step.port), ("127.0.0.1", 0), timeout=left)
        except paramiko.ChannelException as error:
            raise HostError(
                f"the jump host {jump.host} does not connect to {step} ({error.text}): check that sshd runs there, and"
                " AllowTcpForwarding in the jump host's sshd"
            ) from error
    if step.command:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(["/bin/sh", "-c", f"exec {step.command}"], stdin=theirs, stdout=theirs)
        threading.Thread(target=process.wait, daemon=True).start()  # it ends with the socket, and is reaped then
        return ours
    made = socket.create_connection((step.address, step.port), left)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)
    return made


class _Keys:
    """Authentication by public key, in OpenSSH's order: agent keys that are configured, other agent keys, files."""

    def __init__(self, step: Route) -> None:
        self._step = step
        self.locked: list[str] = []
        self.refused: list[str] = []

    def authenticate(self, transport: paramiko.Transport) -> None:
        """Called by paramiko once the host's key is accepted. Raises AuthenticationException."""
        refuse_revoked(self._step, transport.get_remote_server_key())
        for name, key in self._candidates():
            try:
                if not transport.auth_publickey(self._step.user, key):
                    return
                self.refused.append(f"{name} (alone: it wants a second factor)")
            except paramiko.AuthenticationException:
                self.refused.append(name)
        raise paramiko.AuthenticationException("no key was accepted")

    def _candidates(self) -> Iterator[tuple[str, paramiko.PKey]]:
        step = self._step
        if step.agent:
            configured = public_blobs(step.keys)
            with contextlib.suppress(paramiko.SSHException, OSError), contextlib.closing(_Agent(step.agent)) as agent:
                first = [key for key in agent.get_keys() if key.asbytes() in configured]
                others = [] if step.only_keys else [key for key in agent.get_keys() if key not in first]
                for key in (*first, *others):
                    yield f"the agent's key {key.fingerprint}", key
        for path in step.keys:
            try:
                yield f"the key {path}", paramiko.PKey.from_path(path)
            except (paramiko.PasswordRequiredException, TypeError):  # the latter from `cryptography`
                self.locked.append(str(path))
            except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, OSError, ValueError) as error:
                self.refused.append(f"the key {path} ({why(error)})")


class _Agent(paramiko.agent.AgentSSH):
    """The SSH agent at a socket. paramiko's own class knows SSH_AUTH_SOCK only."""

    def __init__(self, path: str) -> None:
        super().__init__()
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(path)
            self._connect(link)
        except BaseException:
            link.close()
            raise

    def close(self) -> None:
        self._close()


def _sentence(error: BaseException, step: Route, keys: _Keys, end: float, timeout: float) -> str:
    if isinstance(error, paramiko.AuthenticationException):
        if keys.locked and not keys.refused:
            return f"the key {keys.locked[0]} for {step} has a passphrase: load it into ssh-agent"
        tried = ", ".join(keys.refused) or "this user without a key"
        return (
            f"{step} refused {tried}: add the public key to the user's authorized_keys there, or set `user` and `key`"
        )
    if isinstance(error, ConnectionRefusedError):
        return f"connecting to {step} was refused: check `host` and `ssh_port`, and that sshd runs there"
    if isinstance(error, TimeoutError):
        return f"connecting to {step} got no answer within {timeout:g} s: check the network and the firewall"
    if isinstance(error, socket.gaierror):
        return f"the name of {step} cannot be resolved ({error.strerror}): check `host`, now {step.host}"
    if keys.refused and time.monotonic() < end:  # sshd's MaxAuthTries
        count = f"{len(keys.refused) + 1} keys" if len(keys.refused) > 1 else "a key"
        return f"{step} ended the login after {count}: set `key`, or IdentitiesOnly and IdentityFile in ~/.ssh/config"
    reason = f"the login did not end within {timeout:g} s" if time.monotonic() >= end else why(error)
    by = f"ProxyCommand `{step.command}` leads to it" if step.command else "`ssh_port` is an SSH server's port"
    return f"no SSH session with {step} ({reason}): check that {by}"


def why(error: BaseException) -> str:
    """What an exception says, or its type if it says nothing."""
    return str(error) or type(error).__name__
