"""One GPU job on the host, as a transient systemd unit that cannot live beside the server."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from taugate.errors import DeadlineError, HostError, JobError
from taugate.host.helper import Helper
from taugate.host.transport import Completed, OnLine, Transport
from taugate.host.unit import valid_unit_name

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
STOPPED_RC = 143  # what a job that was stopped (by the dead-man, by an operator's start) ends with
# systemd ends the job at its RuntimeMaxSec; after that it may need TimeoutStopSec (90 s) to kill it.
_GRACE_S = 120.0


@dataclass(frozen=True)
class Guard:
    """What ends a job beside a server: `gpu` (its uuid) holds over `mib` MiB more than before the job, or the server
    on `port` does not answer /health within `patience_s` seconds, twice in a row.
    """

    port: int
    gpu: str
    mib: int
    patience_s: float = 10.0

    def args(self) -> tuple[str, ...]:
        return str(self.port), self.gpu, str(self.mib), f"{self.patience_s:g}"


def job_unit(window_id: str, number: int) -> str:
    """The unit's name.

    A number is never used twice: systemd keeps the old name while something refers to it.
    """
    return f"taugate-job-{window_id}-{number}"


def run_job(
    transport: Transport,
    argv: Sequence[str],
    *,
    window_id: str,
    number: int,
    service: str,
    work_dir: str,
    deadline_s: float,
    env: Mapping[str, str] | None = None,
    on_line: OnLine | None = None,
    sudo: bool = False,
    guard: Guard | None = None,
) -> Completed:
    """Run `argv` in `work_dir` on the host until it ends; systemd kills it after `deadline_s` seconds.

    The host starts it only while the window holds the lease and the service is stopped (rc NOT_HELD, NOT_SO).
    Conflicts=service: whoever starts the server ends the job first. guard: instead it runs beside the service, for as
    long as that is well (rc UNHEALTHY, OVER_CEILING). A job that failed is a value (rc;
    STOPPED_RC = it was stopped); rc None = its end is unknown. Raises HostError, and DeadlineError if even
    systemd did not end it.
    """
    valid_unit_name(job_unit(window_id, number) + ".service")
    service = valid_unit_name(service)
    for name in env or {}:
        if not _ENV_NAME.fullmatch(name):
            raise HostError(f"{name!r} is not the name of an environment variable for a job")
    # One text, which only the job's own user evaluates: systemd would expand $NAME in a command, and root would
    # read variables such as LD_PRELOAD.
    values = [f"{name}={value}" for name, value in (env or {}).items()]
    command = shlex.join([*(["env", *values] if values else []), *argv])
    seconds = str(max(1, round(deadline_s)))
    args = (window_id, str(number), service, seconds, work_dir, command)
    kind, more = ("job", ()) if guard is None else ("job-beside", guard.args())
    return Helper(transport, sudo).call(kind, *args, *more, deadline=deadline_s + _GRACE_S, on_line=on_line)


def check_end(done: Completed, what: str, deadline_s: float) -> Completed:
    """Return `done` if the job ended by itself.

    Raises DeadlineError (ended by systemd), JobError (end unknown).
    """
    if done.rc is None:
        raise JobError(
            f"{what} on {done.host} ended without an exit status (connection lost or killed by a signal):"
            " its results"
            " cannot be trusted"
        )
    if done.rc != 0 and done.seconds >= deadline_s:
        raise DeadlineError(
            f"{what} on {done.host} was ended by systemd after {deadline_s:g} s: raise `window.job_timeout`,"
            " or give it"
            " less to do"
        )
    return done
