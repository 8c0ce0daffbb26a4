"""Run pytest with every outgoing connection of this process written to a file: scopespy.py OUT PYTEST-ARGS…"""

from __future__ import annotations

import json
import sys

EVENTS = ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname")


def main() -> int:
    contacted: set[str] = set()

    def hook(event: str, args: tuple) -> None:
        if event in ("socket.connect", "socket.sendto"):
            contacted.add(json.dumps(args[1] if isinstance(args[1], (list, tuple)) else str(args[1])))
        elif event in EVENTS:
            contacted.add(json.dumps([str(args[0]), args[1] if len(args) > 1 else None], default=str))

    sys.addaudithook(hook)
    import pytest

    try:
        return int(pytest.main(sys.argv[2:]))
    finally:
        with open(sys.argv[1], "w", encoding="utf-8") as stream:
            json.dump(sorted(contacted), stream)


if __name__ == "__main__":
    sys.exit(main())
