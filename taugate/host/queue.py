"""Two runs on one host: the second waits for the first, or is told at once who has it."""

from __future__ import annotations

import time
from collections.abc import Callable

from taugate.errors import HostError, WindowError
from taugate.host.host import Host
from taugate.host.status import lease_state

_POLL_S = 2.0
_SAY_S = 30.0


def wait_until_free(
    host: Host,
    seconds: float,
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when nobody holds the host's lease and no restore runs there; wait at most `seconds`.

    say: told whom we wait for. Raises WindowError naming the holder. A host that cannot be asked is not waited for:
    what is wrong with it is the preflight's to say.
    """
    begun, said_at, said_of = clock(), -_SAY_S, ""
    while True:
        try:
            holder = lease_state(host).holder
        except HostError:
            return
        waited = clock() - begun
        if not holder:
            return
        if waited >= seconds:
            after = f" after {waited:.0f} s" if seconds else ""
            raise WindowError(
                f"{host.name} is still in use by `{holder}`{after}: wait until that window closes"
                " (window.wait_for_lease makes a run wait); if its client is dead, the host ends it by itself"
            )
        if holder != said_of or waited - said_at >= _SAY_S:
            say(f"{host.name} is in use by `{holder}`: waiting, {waited:.0f} s of at most {seconds:.0f} s")
            said_at, said_of = waited, holder
        sleep(min(_POLL_S, seconds - waited))
