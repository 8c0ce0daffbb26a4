"""Opening an SSH connection: one clear sentence for each way in which that can fail."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import paramiko

from taugate.errors import HostError
from taugate.host.hostkeys import StrictKeys, changed_key, load_known_hosts

# Without a handler, paramiko's reader thread prints tracebacks on stderr for errors that we report ourselves.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

KEEPALIVE_S = 5
# Keepalives alone do not notice a dead link: nobody waits for their answer. The kernel gives up after this.
TCP_USER_TIMEOUT_MS = 15_000
LOST = (paramiko.SSHException, EOFError, OSError)


def open_client(
    host: str, port: int, user: str, key: Path | None, known_hosts: Path, timeout: float
) -> paramiko.SSHClient:
    """An authenticated client to `user`@`host`:`port`; timeout in seconds, for each step of the handshake.

    Raises HostKeyError (unknown or changed key) and HostError (refused, no answer, unknown name, not let in).
    """
    if key and not key.is_file():
        raise HostError(f"the SSH key {key} for {user}@{host} does not exist: set the profile's `key`")
    client = paramiko.SSHClient()
    try:
        load_known_hosts(client, known_hosts)
        client.set_missing_host_key_policy(StrictKeys(host, port, known_hosts))
        client.connect(
            host,
            port=port,
            username=user,
            key_filename=str(key) if key else None,
            allow_agent=key is None,
            look_for_keys=key is None,
            timeout=timeout,
            banner_timeout=timeout,
            auth_timeout=timeout,
            channel_timeout=timeout,
        )
        transport = client.get_transport()
        assert transport is not None
        transport.set_keepalive(KEEPALIVE_S)
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)
        return client
    except paramiko.BadHostKeyException as error:
        client.close()
        raise changed_key(host, port, known_hosts, error.key) from None
    except LOST as error:
        client.close()
        raise HostError(_sentence(error, f"{host} port {port} as user {user}", host, key, timeout)) from error
    except BaseException:
        client.close()
        raise


def _sentence(error: BaseException, where: str, host: str, key: Path | None, timeout: float) -> str:
    if isinstance(error, paramiko.PasswordRequiredException):
        return f"the key {key} for {where} has a passphrase: load it into ssh-agent and leave `key` unset"
    if isinstance(error, paramiko.AuthenticationException):
        tried = f"the key {key}" if key else "the agent's and the default keys"
        remedy = "add the public key to the user's authorized_keys there, or set `user` and `key`"
        return f"{where} refused {tried}: {remedy}"
    if isinstance(error, (paramiko.ssh_exception.NoValidConnectionsError, ConnectionRefusedError)):
        return f"connecting to {where} was refused: check `host` and `ssh_port`, and that sshd runs there"
    if isinstance(error, TimeoutError):
        return f"connecting to {where} got no answer within {timeout:g} s: check the network and the firewall"
    if isinstance(error, socket.gaierror):
        return f"the name of {where} cannot be resolved ({error.strerror}): check `host`, now {host}"
    return f"no SSH session with {where} ({why(error)}): check that `ssh_port` is an SSH server's port"


def why(error: BaseException) -> str:
    """What an exception says, or its type if it says nothing."""
    return str(error) or type(error).__name__
