"""The text of the helper: one shell script that makes every change of a window on its host.

It checks and acts in one place, on the host, so that a command that arrives late (a frozen client, a slow
network) does nothing. For a login as root the text travels with each call, and the dead-man keeps it in systemd;
for anybody else it is installed there once, with rights of its own (see install.py).
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence

INSTALLED = "/usr/local/sbin/taugate-host"
STATE_DIR = "/var/lib/taugate"

# Dead-man, lock and lease are one transient timer. A renewal restarts it, so for a moment it is gone: who
# does not find it looks again before believing that.
SCRIPT = r"""
LEASE=taugate-window JOBS='taugate-job-*.service'
refuse() { echo "taugate: $2" >&2; exit "$1"; }
say() { systemd-cat -t taugate -p "$1" echo "$2" 2>/dev/null || :; }
active() { systemctl show -p ActiveState --value "$1"; }
stopped() { case $(active "$1") in inactive | failed) ;; *) return 1 ;; esac; }
# Installed for a user, it serves the units that it was installed for, and keeps its notes in one place.
ours() { case " ${TAUGATE_SERVICES-$1} " in *" $1 "*) ;; *) refuse 64 "it is not installed for $1" ;; esac; }

holder() {
    for try in 1 2 3 4; do
        state=$(systemctl show -p SubState,Description $LEASE.timer) || exit 1
        case $state in
        *SubState=waiting*) printf '%s\n' "$state" | sed -n 's/^Description=//p' && return ;;
        esac
        sleep 0.1
    done
}

mine() { case $(holder) in "taugate window $1 "*) ;; *) return 1 ;; esac; }
fenced() { mine "$1" || refuse 75 "window $1 does not hold the lease of this host"; }

healthy() { # PORT SECONDS
    timeout "$2" bash -c 'exec 3<>"/dev/tcp/127.0.0.1/$0" && printf "GET /health HTTP/1.0\r\n\r\n" >&3 &&
        read -r line <&3 && [[ $line == *" 200"* ]]' "$1" 2>/dev/null
}

ready() { # PORT
    command -v bash >/dev/null || { [ "$waited" -ge 60 ]; return; }
    healthy "$1" 15
}

in_unit() { # PID SERVICE
    while IFS=: read -r _ _ group; do
        case $group/ in */"$2"/*) return 0 ;; esac
    done <"/proc/$1/cgroup"
    return 1
}

work() { # the job: as the user who asked for it, and with nothing of root's environment
    unset TAUGATE_HELPER
    [ "${TAUGATE_UID:-0}" -ne 0 ] || exec /bin/sh -c "exec $TAUGATE_JOB"
    exec setpriv --reuid="$TAUGATE_UID" --regid="$TAUGATE_GID" --init-groups --reset-env \
        /bin/sh -c "exec $TAUGATE_JOB"
}

used() { # GPU: MiB
    timeout 10 nvidia-smi --query-gpu=uuid,memory.used --format=csv,noheader,nounits | sed -n "s/^$1, *//p"
}

watch() { # SERVICE PORT GPU BEFORE MIB SECONDS: tell the job's own shell when the server is in danger
    slow=0 began=$(systemctl show -p ActiveState,InvocationID "$1")
    while sleep 1; do
        now=$(used "$3")
        [ "$(systemctl show -p ActiveState,InvocationID "$1")" = "$began" ] || {
            echo "taugate: somebody stopped or restarted $1, it is $(active "$1")" >&2
            break
        }
        if healthy "$2" "$6"; then slow=0; else slow=$((slow + 1)); fi
        [ $slow -lt 2 ] || { echo "taugate: $1 is not healthy any more" >&2; break; }
        [ $((${now:-999999999} - $4)) -le "$5" ] || {
            echo "taugate: $3 holds ${now:-an unknown number of} MiB, $4 before the job" >&2
            kill -USR2 $$
            return
        }
    done
    kill -USR1 $$
}

run_unit() { # N, then options and the command: one job as a unit
    n=$1
    shift
    exec systemd-run --quiet --collect --wait --pipe --unit="taugate-job-$id-$n" \
        --property=RuntimeMaxSec="$seconds" --property=WorkingDirectory="$dir" --setenv=TAUGATE_JOB="$command" \
        --setenv=TAUGATE_UID="${SUDO_UID-}" --setenv=TAUGATE_GID="${SUDO_GID-}" \
        --setenv=TAUGATE_HELPER="$TAUGATE_HELPER" "$@"
}

alarm() { # STATE TEXT
    say err "$2"
    mkdir -p "$1" && { [ -e "$1/quarantine" ] || echo "restore: $2" >"$1/quarantine"; }
    [ ! -x /etc/taugate/notify ] || /etc/taugate/notify "$2" || :
}

restore() { # SERVICE PORT STATE: start it, and stay until it serves; systemd begins again when this fails
    say warning "restoring $1"
    systemctl kill --signal=SIGKILL "$JOBS" 2>/dev/null # its results are lost: no time for its manners
    systemctl stop "$JOBS"
    systemctl reset-failed "$1"
    systemctl start "$1" || { alarm "$3" "$1 cannot be started"; return 1; }
    waited=0
    until ready "$2"; do
        case $(active "$1") in
        failed) alarm "$3" "$1 was started and failed"; return 1 ;;
        inactive) say warning "$1 was stopped by somebody else"; return 0 ;;
        esac
        [ $waited -ne 900 ] || alarm "$3" "$1 does not become healthy"
        sleep 1
        waited=$((waited + 1))
    done
    case $(cat "$3/quarantine" 2>/dev/null) in restore:*) rm -f "$3/quarantine" ;; esac
    say notice "$1 serves again"
}

case $1 in
arm) # ID TTL SERVICE PORT STATE OWNER [beside]: beside a server that stays, the dead-man only ends the job
    ours "$4"
    state=${TAUGATE_STATE_DIR-$6} act=restore
    if [ -e "$state/quarantine" ]; then cat "$state/quarantine"; exit 77; fi
    [ "${8-}" != beside ] || act=leave
    # Without a start limit: at its fifth renewal in 10 s the timer would be refused, and be gone.
    # The command has no $ in it: systemd 252 loses that at a daemon-reload.
    systemd-run --quiet --collect --unit=$LEASE --on-active="$3s" --timer-property=AccuracySec=100ms \
        --timer-property=StartLimitIntervalSec=0 --property=Type=oneshot --property=Restart=on-failure \
        --property=RestartSec=5s --description="taugate window $2 $7" --setenv=TAUGATE_HELPER="$TAUGATE_HELPER" \
        --setenv=TAUGATE_SERVICE="$4" --setenv=TAUGATE_PORT="$5" --setenv=TAUGATE_STATE="$state" \
        /bin/sh -c "printenv TAUGATE_HELPER | exec /bin/sh -s $act"
    code=$?
    found=$(holder)
    case $code:$found in
    0:* | *:"taugate window $2 "*) systemctl stop "$JOBS" 2>/dev/null; say notice "window $2 of $7 opened" ;;
    *:?*) echo "$found"; exit 78 ;;
    *) stopped $LEASE.service || { echo "the restore after an earlier window"; exit 78; }; exit $code ;;
    esac
    exit 0 ;;
holder) holder ;;
held) fenced "$2" ;;
renew) fenced "$2" && systemctl restart $LEASE.timer ;;
stop) # ID SERVICE
    ours "$3"
    fenced "$2" && say notice "window $2 stops $3" && exec systemctl stop --no-block "$3" ;;
job) # ID N SERVICE SECONDS DIR COMMAND
    ours "$4"
    fenced "$2"
    stopped "$4" || refuse 76 "$4 is $(active "$4"): somebody started it"
    id=$2 service=$4 seconds=$5 dir=$6 command=$7
    run_unit "$3" --property=Conflicts="$service" --property=After="$service" --property=TimeoutStopSec=10 \
        /bin/sh -c 'eval "$TAUGATE_HELPER"' taugate-host inside "$id" "$service" ;;
inside) # ID SERVICE: the job itself; starting it has stopped the service, so the lease is looked at once more
    mine "$2" || { systemctl start --no-block "$3"; refuse 75 "window $2 lost the lease as its job began"; }
    trap 'exit 143' TERM # systemd calls an end by SIGTERM a success, and --wait would say 0
    work &
    wait $! ;;
job-beside) # ID N SERVICE SECONDS DIR COMMAND PORT GPU MIB PATIENCE: no Conflicts, whoever stops the server may
    ours "$4"
    fenced "$2"
    [ "$(active "$4")" = active ] || refuse 76 "$4 is $(active "$4")"
    id=$2 service=$4 seconds=$5 dir=$6 command=$7
    run_unit "$3" --property=TimeoutStopSec=2 \
        /bin/sh -c 'eval "$TAUGATE_HELPER"' taugate-host guarded "$id" "$service" "$8" "$9" "${10}" "${11}" ;;
guarded) # ID SERVICE PORT GPU MIB PATIENCE: the job, and beside it the watch over the server
    mine "$2" || refuse 75 "window $2 lost the lease as its job began"
    before=$(used "$5")
    [ "${before:--1}" -ge 0 ] || refuse 76 "nvidia-smi does not tell the memory of $5"
    trap 'exit 143' TERM
    trap 'exit 81' USR1
    trap 'exit 82' USR2
    work &
    job=$!
    watch "$3" "$4" "$5" "$before" "$6" "$7" &
    wait $job
    code=$?
    kill $! 2>/dev/null
    exit $code ;;
leave) # the dead-man of a window beside the server
    say warning "the client of a window beside the server is gone: its job is ended"
    systemctl kill --signal=SIGKILL "$JOBS" 2>/dev/null
    systemctl stop "$JOBS" ;;
end-jobs) systemctl stop "taugate-job-$2-*.service"; code=$?; [ $code -eq 5 ] || exit $code ;;
kill) # ID SERVICE: what a stopped service left in its control group
    ours "$3"
    fenced "$2"
    stopped "$3" || refuse 76 "$3 is $(active "$3")"
    exec systemctl kill --signal=SIGKILL "$3" ;;
kill-pid) # ID SERVICE PID START: that process and no later one with its number
    ours "$3"
    fenced "$2"
    stopped "$3" || refuse 76 "$3 is $(active "$3")"
    [ -z "${TAUGATE_SERVICES-}" ] || in_unit "$4" "$3" || refuse 76 "pid $4 is not a process of $3"
    [ "$(sed 's/.*) //' "/proc/$4/stat" | cut -d' ' -f20)" = "$5" ] || refuse 76 "pid $4 is another process"
    exec kill -KILL "$4" ;;
start) # ID SERVICE: also without a lease, but never into somebody else's window
    ours "$3"
    found=$(holder)
    case $found in "" | "taugate window $2 "*) ;; *) refuse 78 "the host is in use by $found" ;; esac
    systemctl reset-failed "$3" 2>/dev/null
    exec systemctl start --no-block "$3" ;;
disarm) # ID [SERVICE]: with a service, only while that is active
    fenced "$2"
    [ -z "${3-}" ] || [ "$(active "$3")" = active ] || refuse 76 "$3 is $(active "$3")"
    systemctl stop $LEASE.timer && say notice "window $2 closed" ;;
quarantine) # ID STATE TEXT
    state=${TAUGATE_STATE_DIR-$3}
    say err "window $2: $4"
    mkdir -p "$state" && printf 'window %s: %s\n' "$2" "$4" >"$state/quarantine" ;;
release) rm -f "${TAUGATE_STATE_DIR-$2}/quarantine" ;; # STATE
status) # STATE
    echo "lease=$(holder)"
    echo "restoring=$(stopped $LEASE.service || echo yes)"
    echo "quarantine=$(head -n 1 "${TAUGATE_STATE_DIR-$2}/quarantine" 2>/dev/null)"
    systemctl list-units --all --plain --no-legend "$JOBS" | sed 's/^\([^ ]*\).*/job=\1/' ;;
restore) # [SERVICE PORT STATE]: without, as the dead-man does it
    [ $# -eq 1 ] || ours "$2"
    restore "${2-$TAUGATE_SERVICE}" "${3-$TAUGATE_PORT}" "${TAUGATE_STATE_DIR-${4-$TAUGATE_STATE}}" </dev/null ;;
*) refuse 64 "no such command: ${1-}" ;;
esac
"""

VERSION = hashlib.sha256(SCRIPT.encode()).hexdigest()[:12]

_FILE = """#!/bin/sh
# The root's part of taugate's windows on this host, for the units below; written by `python -m taugate host install`.
# taugate-host VERSION COMMAND ARGUMENT...: a client of another version is refused.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
TAUGATE_SERVICES={services} TAUGATE_STATE_DIR={state}
TAUGATE_HELPER=$(sed '1,/^# --- the helper/d' {path})
[ "${{1-}}" = {version} ] || {{ echo "taugate: version {version} is installed here" >&2; exit 79; }}
shift
case ${{1-}} in inside | guarded | leave) exit 64 ;; esac # these are systemd's to call
[ "${{1-}}" != restore ] || [ $# -eq 4 ] || exit 64
eval "$TAUGATE_HELPER"
exit $?
# --- the helper
{script}"""


def file_text(services: Sequence[str]) -> str:
    """The file that is installed as INSTALLED: it serves these units and no others."""
    return _FILE.format(
        services=shlex.quote(" ".join(services)), state=shlex.quote(STATE_DIR), path=INSTALLED, version=VERSION,
        script=SCRIPT.lstrip("\n"),
    )  # fmt: skip
