"""Asking the SGLang server on the host, through a tunnel to its loopback: no port is opened and no curl is
needed.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from taugate.errors import HostError
from taugate.host.transport import Transport
from taugate.host.tunnel import Reply, request

_SAID_CHARS = 300  # of a server's own words in an error
# Names of fields of /server_info that are new at every start.
_CHANGES = re.compile(r"seed|time|status|pid|port|throughput|_addr|uuid|launch_command|version|created")


@dataclass(frozen=True)
class ServerIdentity:
    """What a server says it is. launch_command: its argv as one shell line; "" on servers too old to tell.

    info: all of /model_info, as (name, JSON) pairs sorted by name.
    """

    model_id: str
    model_path: str
    launch_command: str
    version: str
    info: tuple[tuple[str, str], ...] = ()

    def differs_from(self, other: ServerIdentity) -> list[str]:
        """Sentences for what makes this another server than `other`. The version is not part of that,
        nor is a field of /model_info that only one of the two has."""
        names = ("model_id", "model_path", "launch_command")
        pairs = [(name, getattr(other, name), getattr(self, name)) for name in names]
        was, now = dict(other.info), dict(self.info)
        shared = sorted((was.keys() & now.keys()) - {"model_path"})
        pairs += [(f"model_info.{name}", was[name], now[name]) for name in shared]
        return [f"{name} was {was!r} and is {now!r}" for name, was, now in pairs if was != now]


@dataclass(frozen=True)
class Load:
    """Requests on the server now, summed over its data-parallel ranks."""

    running: int
    waiting: int


@dataclass(frozen=True)
class Generation:
    """One greedy continuation.

    output_ids: generated token ids. finish_reason: "stop" or "length". matched: the token id or text that
    stopped it. top_logprobs: per output token the best (logprob, token id) pairs, best first; empty if not
    asked for.
    """

    output_ids: tuple[int, ...]
    finish_reason: str
    matched: int | str | None
    prompt_tokens: int
    cached_tokens: int
    top_logprobs: tuple[tuple[tuple[float, int], ...], ...] = ()


def _holds_objects(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(part, (dict, list)) for part in value)


class SGLangClient:
    """The server on 127.0.0.1:`port` of the host.

    A server that is down or busy loading is a value, not an error.
    """

    def __init__(self, transport: Transport, port: int) -> None:
        self._transport, self.port = transport, port
        self.where = f"the server on port {port} of {transport.name}"

    def get_json(self, path: str, deadline: float = 15.0) -> Reply:
        """GET. deadline: seconds in total.

        Raises HostError if the host is unreachable or the answer breaks off.
        """
        return request(self._transport, self.port, "GET", path, None, deadline)

    def post_json(self, path: str, body: Any, deadline: float = 60.0) -> Reply:
        """POST a JSON body. deadline and errors as in get_json."""
        return request(self._transport, self.port, "POST", path, json.dumps(body).encode(), deadline)

    def ready(self) -> bool:
        """Whether it takes requests: `/ready`, or `/health` on older servers."""
        reply = self.get_json("/ready")
        return self.healthy() if reply.status == 404 else reply.ok

    def healthy(self) -> bool:
        """Whether `/health` says 200; real servers generate a token for that, which takes about a second."""
        return self.get_json("/health", deadline=30.0).ok

    def identity(self) -> ServerIdentity:
        """Raises HostError if the server does not tell all of it."""
        models = self._first("/v1/models")
        model = self._first("/model_info", "/get_model_info")
        server = self._first("/server_info", "/get_server_info")
        try:
            command = server.get("launch_command") or ""
            return ServerIdentity(
                model_id=str(models["data"][0]["id"]),
                model_path=str(model["model_path"]),
                launch_command=command if isinstance(command, str) else shlex.join(map(str, command)),
                version=str(server.get("version", "")),
                info=tuple(sorted((name, json.dumps(value, sort_keys=True)) for name, value in model.items())),
            )
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise HostError(f"{self.where} does not tell which model it serves: is it SGLang? ({error!r})") from error

    def arguments(self) -> dict[str, str]:
        """What /server_info says of the server's arguments and sizes, without what changes at every start.

        Raises HostError.
        """
        info = self._first("/server_info", "/get_server_info")
        kept = {name: value for name, value in info.items() if not (_CHANGES.search(name) or _holds_objects(value))}
        return {name: json.dumps(value, sort_keys=True) for name, value in kept.items()}

    def startup_seconds(self) -> float | None:
        """How long its last start took by its own account, in seconds; None if it does not tell.

        It times parts that contain one another (loading the weights, the scheduler, the whole): the longest.
        """
        times = self._first("/server_info", "/get_server_info").get("startup_time")
        if isinstance(times, dict):
            times = max((value for value in times.values() if isinstance(value, (int, float))), default=None)
        return float(times) if isinstance(times, (int, float)) and times > 0 else None

    def loads(self) -> Load | None:
        """Requests running and waiting; None on servers without `/v1/loads`."""
        reply = self.get_json("/v1/loads")
        ranks = reply.body.get("loads", [reply.body]) if isinstance(reply.body, dict) else reply.body
        if not reply.ok or not isinstance(ranks, list):
            return None
        return Load(
            sum(int(rank.get("num_running_reqs", 0)) for rank in ranks),
            sum(int(rank.get("num_waiting_reqs", 0)) for rank in ranks),
        )

    def generate(
        self, input_ids: Sequence[int], max_new_tokens: int, top_logprobs: int = 0, deadline: float = 300.0
    ) -> Generation:
        """Greedy continuation of token ids [n] by at most `max_new_tokens`. deadline: seconds.

        Raises HostError.
        """
        body: dict[str, Any] = {
            "input_ids": list(input_ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens},
        }
        if top_logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": top_logprobs}
        reply = self.post_json("/generate", body, deadline)
        if not reply.ok:
            raise HostError(f"{self.where} {self._refusal(reply)} to a generation of {max_new_tokens} tokens")
        try:
            meta = reply.body["meta_info"]
            finish = meta["finish_reason"]
            generation = Generation(
                output_ids=tuple(int(token) for token in reply.body["output_ids"]),
                finish_reason=str(finish["type"]),
                matched=finish.get("matched"),
                prompt_tokens=int(meta["prompt_tokens"]),
                cached_tokens=int(meta.get("cached_tokens", 0)),
                top_logprobs=tuple(
                    tuple((float(entry[0]), int(entry[1])) for entry in position)
                    for position in (meta.get("output_top_logprobs") or ())
                ),
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise HostError(f"{self.where} answered /generate without the expected fields ({error!r})") from error
        if generation.finish_reason not in ("stop", "length"):
            raise HostError(f"{self.where} ended a generation with {generation.finish_reason!r}, not by itself")
        return generation

    def _first(self, *paths: str) -> dict[str, Any]:
        """The body of the first path that exists; newer names come first. Raises HostError."""
        reply = Reply(0, None)
        for path in paths:
            reply = self.get_json(path)
            if reply.ok and isinstance(reply.body, dict):
                return reply.body
            if reply.status != 404:
                break
        raise HostError(f"{self.where} {self._refusal(reply)} to {' and '.join(paths)}")

    def _refusal(self, reply: Reply) -> str:
        if not reply.status:
            return "is not listening: no answer"
        body = reply.body if isinstance(reply.body, dict) else {}
        error = body.get("error", body.get("message"))  # its own form, and OpenAI's
        said = error.get("message") if isinstance(error, dict) else error
        said = " ".join(str(said).split())[:_SAID_CHARS] if said else ""
        return f"answered {reply.status}" + (f" ({said})" if said else "")
