"""The real SGLang server on a CPU as the serving unit of a systemd test host."""

from __future__ import annotations

import subprocess
from pathlib import Path

from fixtures.testhost.host import MODEL, PORT, SystemdHost
from fixtures.testhost.rootfs import cache_dir
from taugate.errors import HostError

VERSION = "0.5.23"
STOP_S = 90  # systemd's default
_STUBS = Path(__file__).resolve().parent / "stubs"
_ENVIRONMENT = (
    "SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 HOME=/root PYTHONDONTWRITEBYTECODE=1"
    " PYTHONPATH=/opt/stubs:/opt/testhost"
)
_COMMAND = (
    f"/opt/sglang/bin/python -m sglang.launch_server --model-path /models/tiny --served-model-name {MODEL}"
    f" --port {PORT} --device cpu --attention-backend torch_native --mem-fraction-static 0.05"
    " --max-total-tokens 4096"
)
# As in the stand-in, memory belongs to live processes of the unit; the real server on a CPU takes none.
_HOLD = (
    "/bin/sh -c 'for gpu in 0 1; do sleep infinity |"
    " /usr/bin/python3 -m fixtures.embedded.gpus /dev 47000 $$gpu & done'"
)


def venv() -> Path:
    """Where `make contract` installs SGLang and the model it serves."""
    return cache_dir() / f"sglang-{VERSION}"


def real_host(
    directory: Path, *, kill_mode: str = "mixed", enabled: bool = True, restart: str = "always", memory: bool = False
) -> SystemdHost:
    """A test host, not yet started, whose unit is the real server. memory: let its unit hold GPU memory.

    Raises HostError if SGLang is not installed.
    """
    place = venv()
    python = place / "bin/python"
    if not (place / ".installed").is_file():
        raise HostError(f"SGLang {VERSION} is not installed in {place}: run `make contract`")
    asked = [str(python), "-c", "import sys; print(sys.base_prefix, *sys.version_info[:2])"]
    prefix, *version = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    binds = {"/opt/sglang": place, "/opt/stubs": _STUBS, "/models/tiny": place / "model"}
    if prefix != "/usr":
        binds[prefix] = Path(prefix)
    elif version != ["3", "11"]:
        raise HostError(
            f"the test host has Python 3.11 in /usr, and {python} is a {'.'.join(version)} of /usr: run"
            " `make contract PYTHON=...` with a Python 3.11"
        )
    unit = {
        "Environment": _ENVIRONMENT,
        "ExecStart": f"\nExecStart={_COMMAND}",  # the empty setting drops the stand-in's command
        "KillMode": kill_mode,
        "TimeoutStopSec": str(STOP_S),
        "Restart": restart,
    }
    if memory:
        unit["ExecStartPost"] = _HOLD
    return SystemdHost(directory, unit=unit, enabled=enabled, binds=binds)
