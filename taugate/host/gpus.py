"""The host's GPUs as nvidia-smi tells them, parsed strictly: an unexpected line is an error, not a free
GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from taugate.errors import HostError
from taugate.host.transport import Transport

GPU_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.used,memory.total,mig.mode.current",
    "--format=csv,noheader,nounits",
)
APP_QUERY = (
    "nvidia-smi",
    "--query-compute-apps=pid,gpu_uuid,used_memory,process_name",
    "--format=csv,noheader,nounits",
)
_UNKNOWN = {"[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "[Insufficient Permissions]"}
_QUERY_DEADLINE_S = 30.0  # nvidia-smi itself hangs on a wedged GPU


@dataclass(frozen=True)
class Gpu:
    """One GPU. used_mib, total_mib: MiB. mig: "Enabled", "Disabled" or "[N/A]".

    Its identity is `uuid`, not `index`.
    """

    index: int
    uuid: str
    name: str
    used_mib: int
    total_mib: int
    mig: str


@dataclass(frozen=True)
class ComputeApp:
    """A process with a compute context on one GPU. used_mib: MiB, None where the driver does not say."""

    pid: int
    gpu_uuid: str
    used_mib: int | None
    name: str


@dataclass(frozen=True)
class GpuSnapshot:
    """All GPUs and all compute processes at one moment."""

    gpus: tuple[Gpu, ...]
    apps: tuple[ComputeApp, ...]

    def by_uuid(self) -> dict[str, Gpu]:
        return {gpu.uuid: gpu for gpu in self.gpus}

    def apps_of(self, pids: Iterable[int]) -> tuple[ComputeApp, ...]:
        """The compute processes whose pid is among `pids`."""
        wanted = set(pids)
        return tuple(app for app in self.apps if app.pid in wanted)

    def describe(self) -> str:
        """One line for messages: memory per GPU and who holds it."""
        memory = ", ".join(f"GPU {gpu.index} {gpu.used_mib}/{gpu.total_mib} MiB" for gpu in self.gpus)
        holders = ", ".join(f"{app.name} (pid {app.pid})" for app in self.apps)
        return f"{memory}; processes: {holders or 'none'}"


def query(transport: Transport) -> GpuSnapshot:
    """Ask nvidia-smi on the host. Raises HostError if it fails or says something unexpected."""
    apps = transport.run(APP_QUERY, deadline=_QUERY_DEADLINE_S).check("listing the GPU processes")
    gpus = transport.run(GPU_QUERY, deadline=_QUERY_DEADLINE_S).check("listing the GPUs")
    return GpuSnapshot(parse_gpus(gpus.stdout, transport.name), parse_apps(apps.stdout, transport.name))


def parse_gpus(text: str, host: str = "the host") -> tuple[Gpu, ...]:
    """Parse the answer to GPU_QUERY.

    Raises HostError on any line that is not six well-formed fields, and on none.
    """
    gpus = []
    for line in _lines(text):
        fields = [field.strip() for field in line.split(",")]
        try:
            index, uuid, name, used, total, mig = fields
            gpus.append(Gpu(int(index), _uuid(uuid), name, int(used), int(total), mig))
        except ValueError:
            if len(fields) == 6 and _UNKNOWN & {fields[3], fields[4]}:
                raise HostError(
                    f"nvidia-smi on {host} does not know the memory of GPU {fields[0]} ({fields[2]}):"
                    " a window cannot see whether that GPU is free"
                ) from None
            raise HostError(f"nvidia-smi on {host} gave an unexpected GPU line: {line!r}") from None
    if not gpus:
        raise HostError(f"nvidia-smi on {host} lists no GPU")
    if len({gpu.uuid for gpu in gpus}) != len(gpus):
        raise HostError(f"nvidia-smi on {host} lists a GPU twice")
    return tuple(gpus)


def parse_apps(text: str, host: str = "the host") -> tuple[ComputeApp, ...]:
    """Parse the answer to APP_QUERY; empty text means no process. Raises HostError on any other line."""
    apps = []
    for line in _lines(text):
        fields = [field.strip() for field in line.split(",", 3)]  # a process name may hold commas
        try:
            pid, uuid, used, name = fields
            apps.append(ComputeApp(int(pid), _uuid(uuid), None if used in _UNKNOWN else int(used), name))
        except ValueError:
            raise HostError(f"nvidia-smi on {host} gave an unexpected process line: {line!r}") from None
    return tuple(apps)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _uuid(text: str) -> str:
    if not text.startswith(("GPU-", "MIG-")):
        raise ValueError(text)
    return text
