"""The kernels of a capture are compiled while the server still serves: minutes that the window then does not take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taugate.pipeline.remote import RemotePackage

_DEADLINE_S = 900  # every kernel of fla compiled and timed takes about a minute on a fast processor


def warm_up(package: RemotePackage, spec: str, kernel_path: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Warm the kernels up for the capture's spec at `spec` on the host, beside the server. See `target.warmup`.

    A GPU with too little memory left is no failure: the capture compiles then, and that is said. Raises HostError for
    anything else, with the server untouched.
    """
    if kernel_path == "torch":
        return {"skipped": "the PyTorch path compiles nothing"}
    done = package.run(
        "target.warmup", "--spec", spec, "--if-it-fits", deadline=_DEADLINE_S, what="warming up the kernels"
    )
    if "refused" in done:
        say(f"the capture will compile its kernels inside the window: {done['refused']}")
    elif "skipped" not in done:
        compiled, cached = done["compiled"], done["cached"]
        say(f"kernels ready after {done['seconds']:.0f} s, {compiled} compiled, {cached} from the cache")
    return done
