"""What a server is made of, field by field, so that a report can say what is different after a restart.

Fields that change with every start (seeds, ports, times, process ids) are left out. A difference in what the server
says it serves makes it another server (`ServerIdentity.differs_from`); any other one is only reported.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from taugate.host.gpus import GpuSnapshot
from taugate.host.host import Host
from taugate.host.sglang import ServerIdentity
from taugate.host.unit import COMMAND_DEADLINE_S

_MARK = "--- environment"
# The unit with its drop-ins as systemd has it, and the files that its environment comes from.
_FILES = f"""systemctl cat "$0" 2>/dev/null; echo "{_MARK}"
systemctl show -p EnvironmentFiles --value "$0" | sed 's/ (ignore_errors=[a-z]*)$//' |
while read -r file; do [ -z "$file" ] || sha256sum "$file" 2>&1; done"""
_HASHED = re.compile(r"^([0-9a-f]{64})  (.+)$", re.MULTILINE)


def take(host: Host, identity: ServerIdentity, gpus: GpuSnapshot) -> dict[str, str]:
    """field -> value, as text. Raises HostError."""
    fields = {"model_id": identity.model_id, "model_path": identity.model_path, "version": identity.version}
    fields |= {"launch_command": identity.launch_command}
    fields |= {f"model_info.{name}": value for name, value in identity.info}
    fields |= {f"server_info.{name}": value for name, value in host.server.arguments().items()}
    fields |= {f"GPU {gpu.index}": f"{gpu.uuid} {gpu.name} {gpu.total_mib} MiB" for gpu in gpus.gpus}
    done = host.transport.run(["sh", "-c", _FILES, host.unit.name], deadline=COMMAND_DEADLINE_S)
    unit, _, environment = done.check("reading the unit's files").stdout.partition(f"{_MARK}\n")
    fields["unit file"] = f"sha256 {hashlib.sha256(unit.encode()).hexdigest()[:16]}"
    fields |= {f"environment file {name}": f"sha256 {digest[:16]}" for digest, name in _HASHED.findall(environment)}
    return fields


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """One line for each field that is not the same, in the order of their names."""
    names = sorted(before.keys() | after.keys())
    pairs = [(name, before.get(name, "absent"), after.get(name, "absent")) for name in names]
    return [f"{name} was {was} and is {now}" for name, was, now in pairs if was != now]
