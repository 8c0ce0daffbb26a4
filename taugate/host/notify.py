"""Telling somebody that a server did not come back: a command, a web address, or both."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

TIMEOUT_S = 15.0


def notify(
    text: str, facts: Mapping[str, Any], command: Sequence[str], webhook: str | None, timeout: float = TIMEOUT_S
) -> list[str]:
    """Run `command` with `text` as its last word and the facts as JSON on stdin; POST the same JSON to `webhook`.

    Returns a sentence for everything that went wrong; raises nothing: there is worse news than that.
    """
    data = json.dumps({"text": text, **facts}, default=str).encode()
    troubles = []
    if command:
        try:
            done = subprocess.run([*command, text], input=data, capture_output=True, timeout=timeout)
            if done.returncode:
                troubles.append(f"the command {command[0]} of window.notify ended with status {done.returncode}")
        except (OSError, subprocess.TimeoutExpired) as error:
            troubles.append(f"the command {command[0]} of window.notify could not tell anybody: {error}")
    if webhook:
        request = urllib.request.Request(webhook, data, {"Content-Type": "application/json"})
        try:
            urllib.request.urlopen(request, timeout=timeout).close()
        except (OSError, ValueError) as error:  # URLError, HTTPError and time-outs are OSErrors
            troubles.append(f"window.webhook could not be told: {error}")
    return troubles
