"""Calling the helper on the host: every change of a window is one of its commands, for the lease's holder only."""

from __future__ import annotations

from dataclasses import replace

from taugate.errors import DeadlineError, HostError
from taugate.host.script import INSTALLED, SCRIPT, VERSION
from taugate.host.transport import Completed, OnLine, Transport, last_line

# Exit codes of the helper's own refusals, and of a job that was ended because the server beside it was in danger.
NOT_HELD, NOT_SO, QUARANTINED, IN_USE, OTHER_VERSION = 75, 76, 77, 78, 79
UNHEALTHY, OVER_CEILING = 81, 82
NAME = "taugate-host"
_VARIABLE = "TAUGATE_HELPER"
_RUN = f'eval "${_VARIABLE}"'


class Helper:
    """The helper on the host behind `transport`.

    sudo: the login user is not root and uses the installed helper; otherwise its text travels with each call.
    """

    def __init__(self, transport: Transport, sudo: bool = False) -> None:
        self.transport, self.sudo = transport, sudo

    def argv(self, command: str, *args: str) -> list[str]:
        if self.sudo:
            return ["sudo", "-n", INSTALLED, VERSION, command, *args]
        return ["env", f"{_VARIABLE}={SCRIPT}", "/bin/sh", "-c", _RUN, NAME, command, *args]

    def call(self, command: str, *args: str, deadline: float = 20.0, on_line: OnLine | None = None) -> Completed:
        """Run one of the helper's commands.

        Raises DeadlineError, HostError (no connection; not installed, of another version, or not allowed).
        """
        short = (NAME, command, *args)  # for messages: nobody wants to read the script in them
        try:
            done = self.transport.run(self.argv(command, *args), deadline=deadline, on_line=on_line)
        except DeadlineError:
            raise DeadlineError(
                f"`{' '.join(short[:3])}` on {self.transport.name} did not end within {deadline:g} s; it may"
                " still be running there"
            ) from None
        if self.sudo:
            self._require_rights(done)
        return replace(done, argv=short)

    def _require_rights(self, done: Completed) -> None:
        said = last_line(done.stderr)
        if done.rc == OTHER_VERSION or (done.rc == 1 and said.startswith("sudo:")):
            what = "is of another version" if done.rc == OTHER_VERSION else "may not be used"
            raise HostError(
                f"the helper {INSTALLED} on {self.transport.name} {what} ({said.removeprefix('sudo: ')}): let root"
                " install it there with `python -m taugate host install`"
            )
