"""The helper as a file on the host, for login users who are not root.

Installed are two files: the helper, which only root can change, and one sudoers line that lets one user run exactly
this helper. The helper serves the units that it was installed for; a window's job runs as that user, not as root.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence

from taugate.errors import ConfigError, HostError
from taugate.host.check import Check
from taugate.host.host import Host
from taugate.host.script import INSTALLED, STATE_DIR, VERSION, file_text
from taugate.host.transport import last_line
from taugate.host.unit import valid_unit_name

SUDOERS = "/etc/sudoers.d/taugate-"
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")
_DEADLINE_S = 60.0
_END = "END-OF-TAUGATE"

_INSTALLER = """set -eu
umask 022
[ "$(id -u)" = 0 ] || {{ echo "only root can install the helper" >&2; exit 77; }}
id {user} >/dev/null
part=$(mktemp -d)
trap 'rm -rf "$part"' EXIT
cat >"$part/helper" <<'{end}'
{helper}{end}
cat >"$part/sudoers" <<'{end}'
{sudoers}{end}
echo "{sha256}  $part/helper" | sha256sum --check --quiet
sh -n "$part/helper"
if command -v visudo >/dev/null; then visudo -cqf "$part/sudoers"; fi
install -d -o root -g root -m 0755 {directory} {state}
install -o root -g root -m 0755 "$part/helper" {path}.new
install -o root -g root -m 0440 "$part/sudoers" "$part/checked"
mv -f {path}.new {path}
mv -f "$part/checked" {sudoers_path}
[ -d {work_dir} ] || install -d -o {user} -m 0755 {work_dir}
[ "$(sha256sum <{path} | cut -d ' ' -f 1)" = {sha256} ]
runuser -u {user} -- sudo -n {path} {version} holder >/dev/null
echo "{user} may open windows on {services}: {path} {version} (sha256 {sha256})"
"""
_UNINSTALLER = """set -eu
[ "$(id -u)" = 0 ] || {{ echo "only root can remove the helper" >&2; exit 77; }}
rm -f {path} {sudoers}*
rmdir {state} 2>/dev/null || [ ! -d {state} ] || echo "{state} is kept: it holds the note of a failed restore"
echo "the helper is gone"
"""


def sudoers_text(user: str) -> str:
    """The rule of one user: this program with any arguments, nothing else, without a password or a terminal."""
    return (
        "# Written by `python -m taugate host install`: windows on this host's GPUs.\n"
        f"Defaults!{INSTALLED} !requiretty\n{user} ALL=(root) NOPASSWD: {INSTALLED}\n"
    )


def installer(services: Sequence[str], user: str, work_dir: str) -> str:
    """A shell script that installs the helper when root runs it, checks both files, and proves that `user` may use it.

    Raises ConfigError for a user who needs none, HostError for a bad unit name.
    """
    if user == "root":
        raise ConfigError("root needs no helper on the host: name the login user that is to have one with --for USER")
    if not _USER.fullmatch(user):
        raise ConfigError(f"{user!r} is not the name of a login user: give one with --for USER")
    helper = file_text([valid_unit_name(name) for name in services])
    return _INSTALLER.format(
        user=shlex.quote(user), helper=helper, sudoers=sudoers_text(user), end=_END, services=" ".join(services),
        sha256=hashlib.sha256(helper.encode()).hexdigest(), path=INSTALLED, directory=INSTALLED.rpartition("/")[0],
        state=STATE_DIR, sudoers_path=SUDOERS + user.replace(".", "_"), version=VERSION, work_dir=shlex.quote(work_dir),
    )  # fmt: skip


def install(host: Host, user: str) -> str:
    """Install the helper for `user`; returns what was done. Raises ConfigError, HostError."""
    return _as_root(host, installer([host.unit.name], user, host.work_dir), "install")


def uninstall(host: Host) -> str:
    """Remove the helper and its sudoers lines. Raises HostError, also while a window is open."""
    holder = last_line(host.transport.run(_holder_of(), deadline=_DEADLINE_S).stdout)
    if holder.startswith("taugate window"):
        raise HostError(f"{host.name} is in use by `{holder}`: its end needs the helper, remove it after that")
    return _as_root(host, uninstaller(), "uninstall")


def uninstaller() -> str:
    """A shell script that removes what `installer` has put there, when root runs it."""
    return _UNINSTALLER.format(path=INSTALLED, sudoers=SUDOERS, state=STATE_DIR)


def rights(host: Host) -> Check:
    """Whether this login can make a window's changes; changes nothing."""
    if not host.settings.sudo:
        return Check("rights", True, "root's")
    whom = f"--service {host.unit.name} --for {host.settings.user or '$USER'}"
    if host.settings.transport == "local":
        remedy = f"`python -m taugate host install --host localhost {whom} --print | sudo sh`"
    else:
        remedy = f"`python -m taugate host install --host root@{host.settings.host} {whom}`"
    try:
        done = host.helper.call("holder")
    except HostError as error:
        return Check("rights", False, str(error), remedy)
    detail = f"by sudo through {INSTALLED} {VERSION}" if done.rc == 0 else last_line(done.stderr)
    return Check("rights", done.rc == 0, detail, remedy)


def _holder_of() -> list[str]:
    return ["systemctl", "show", "-p", "Description", "--value", "taugate-window.timer"]


def _as_root(host: Host, script: str, command: str) -> str:
    shell = ["sudo", "-n", "sh", "-s"] if host.settings.sudo else ["sh", "-s"]
    done = host.transport.run(shell, deadline=_DEADLINE_S, input=script.encode())
    if host.settings.sudo and done.rc == 1 and last_line(done.stderr).startswith("sudo:"):
        raise HostError(
            f"{host.settings.user or 'this login'} is not root on {host.name} and may not become root"
            f" ({last_line(done.stderr).removeprefix('sudo: ')}): connect as root with --host root@… --for USER, or"
            f" let root there run what `python -m taugate host {command} --print` prints"
        )
    return done.check(f"host {command}").stdout.strip()
