"""HTTP to a port on the host's loopback, through the transport."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any

from taugate.errors import HostError
from taugate.host.transport import Transport

_CONNECT_S = 10.0


@dataclass(frozen=True)
class Reply:
    """An HTTP answer. status 0 = nothing listens there.

    body: parsed JSON, None if it is empty or not JSON.
    """

    status: int
    body: Any

    @property
    def ok(self) -> bool:
        return self.status == 200


def request(transport: Transport, port: int, method: str, path: str, body: bytes | None, deadline: float) -> Reply:
    """One request to 127.0.0.1:`port` of the host; deadline: seconds in total.

    A refused connection and every HTTP status are values. Raises HostError if the host is unreachable, if
    there is no answer in time, or if the answer breaks off.
    """
    where = f"the server on port {port} of {transport.name}"
    end = time.monotonic() + deadline
    try:
        channel = transport.open_tcp(port, min(deadline, _CONNECT_S))
    except ConnectionRefusedError:
        return Reply(0, None)
    try:
        connection = HTTPConnection("127.0.0.1", port)
        connection.sock = _Tunnel(channel, end)
        headers = {"Connection": "close", "Content-Type": "application/json"}
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        data = response.read()
    except TimeoutError as error:
        raise HostError(f"{where} did not answer {path} within {deadline:g} s") from error
    except (OSError, EOFError, HTTPException) as error:
        raise HostError(f"{where} broke off while answering {path}: {error!r}") from error
    finally:
        channel.close()
    try:
        return Reply(response.status, json.loads(data))
    except ValueError:
        return Reply(response.status, None)


class _Tunnel:
    """What http.client needs of a socket. Closing does nothing: http.client closes the socket before it has
    read an answer that ends with the connection, which cuts off a paramiko channel (a real socket lives on in
    its file)."""

    def __init__(self, channel: Any, end: float) -> None:
        self._channel, self._end = channel, end

    def sendall(self, data: bytes) -> None:
        self._channel.settimeout(self._left())
        self._channel.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Stream(self._channel, self._left))

    def close(self) -> None:
        pass

    def _left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class _Stream(io.RawIOBase):
    def __init__(self, channel: Any, left: Callable[[], float]) -> None:
        self._channel, self._left = channel, left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._channel.settimeout(self._left())
        data = self._channel.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)
