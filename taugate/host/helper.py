"""The helper: one shell script that makes every change of a window on its host, for the lease's holder only.

It checks and acts in one place, on the host, so that a command that arrives late (a frozen client, a slow
network) does nothing. It needs no file there: its text travels with each call, and the dead-man keeps it in
systemd.
"""

from __future__ import annotations

from dataclasses import replace

from taugate.errors import DeadlineError
from taugate.host.transport import Completed, OnLine, Transport

# Exit codes of the helper's own refusals.
NOT_HELD, NOT_SO, QUARANTINED, IN_USE = 75, 76, 77, 78
NAME = "taugate-host"
_VARIABLE = "TAUGATE_HELPER"
_RUN = f'eval "${_VARIABLE}"'

# Dead-man, lock and lease are one transient timer. A renewal restarts it, so for a moment it is gone: who
# does not find it looks again before believing that.
SCRIPT = r"""
LEASE=taugate-window JOBS='taugate-job-*.service'
refuse() { echo "taugate: $2" >&2; exit "$1"; }
say() { systemd-cat -t taugate -p "$1" echo "$2" 2>/dev/null || :; }
active() { systemctl show -p ActiveState --value "$1"; }
stopped() { case $(active "$1") in inactive | failed) ;; *) return 1 ;; esac; }

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

ready() { # PORT
    command -v bash >/dev/null || { [ "$waited" -ge 60 ]; return; }
    timeout 15 bash -c 'exec 3<>"/dev/tcp/127.0.0.1/$0" && printf "GET /health HTTP/1.0\r\n\r\n" >&3 &&
        read -r line <&3 && [[ $line == *" 200"* ]]' "$1" 2>/dev/null
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
arm) # ID TTL SERVICE PORT STATE OWNER
    if [ -e "$6/quarantine" ]; then cat "$6/quarantine"; exit 77; fi
    # Without a start limit: at its fifth renewal in 10 s the timer would be refused, and be gone.
    # The command has no $ in it: systemd 252 loses that at a daemon-reload.
    systemd-run --quiet --collect --unit=$LEASE --on-active="$3s" --timer-property=AccuracySec=100ms \
        --timer-property=StartLimitIntervalSec=0 --property=Type=oneshot --property=Restart=on-failure \
        --property=RestartSec=5s --description="taugate window $2 $7" --setenv=TAUGATE_HELPER="$TAUGATE_HELPER" \
        --setenv=TAUGATE_SERVICE="$4" --setenv=TAUGATE_PORT="$5" --setenv=TAUGATE_STATE="$6" \
        /bin/sh -c 'printenv TAUGATE_HELPER | exec /bin/sh -s restore'
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
    fenced "$2" && say notice "window $2 stops $3" && exec systemctl stop --no-block "$3" ;;
job) # ID N SERVICE SECONDS DIR COMMAND [--setenv=NAME=VALUE ...]
    fenced "$2"
    stopped "$4" || refuse 76 "$4 is $(active "$4"): somebody started it"
    id=$2 n=$3 service=$4 seconds=$5 dir=$6 command=$7
    shift 7
    for option; do
        case $option in --setenv=*) ;; *) refuse 64 "$option is not an option of a job" ;; esac
    done
    exec systemd-run --quiet --collect --wait --pipe --unit="taugate-job-$id-$n" \
        --property=Conflicts="$service" --property=After="$service" \
        --property=RuntimeMaxSec="$seconds" --property=TimeoutStopSec=10 \
        --property=WorkingDirectory="$dir" "$@" --setenv=TAUGATE_JOB="$command" \
        --setenv=TAUGATE_HELPER="$TAUGATE_HELPER" \
        /bin/sh -c 'eval "$TAUGATE_HELPER"' taugate-host inside "$id" "$service" ;;
inside) # ID SERVICE: the job itself; starting it has stopped the service, so the lease is looked at once more
    mine "$2" || { systemctl start --no-block "$3"; refuse 75 "window $2 lost the lease as its job began"; }
    unset TAUGATE_HELPER
    trap 'exit 143' TERM # systemd calls an end by SIGTERM a success, and --wait would say 0
    eval "$TAUGATE_JOB" &
    wait $! ;;
end-jobs) systemctl stop "taugate-job-$2-*.service"; code=$?; [ $code -eq 5 ] || exit $code ;;
kill) # ID SERVICE: what a stopped service left in its control group
    fenced "$2"
    stopped "$3" || refuse 76 "$3 is $(active "$3")"
    exec systemctl kill --signal=SIGKILL "$3" ;;
kill-pid) # ID SERVICE PID START: that process and no later one with its number
    fenced "$2"
    stopped "$3" || refuse 76 "$3 is $(active "$3")"
    [ "$(sed 's/.*) //' "/proc/$4/stat" | cut -d' ' -f20)" = "$5" ] || refuse 76 "pid $4 is another process"
    exec kill -KILL "$4" ;;
start) # ID SERVICE: also without a lease, but never into somebody else's window
    found=$(holder)
    case $found in "" | "taugate window $2 "*) ;; *) refuse 78 "the host is in use by $found" ;; esac
    systemctl reset-failed "$3" 2>/dev/null
    exec systemctl start --no-block "$3" ;;
disarm) # ID [SERVICE]: with a service, only while that is active
    fenced "$2"
    [ -z "${3-}" ] || [ "$(active "$3")" = active ] || refuse 76 "$3 is $(active "$3")"
    systemctl stop $LEASE.timer && say notice "window $2 closed" ;;
quarantine) # ID STATE TEXT
    say err "window $2: $4"
    mkdir -p "$3" && printf 'window %s: %s\n' "$2" "$4" >"$3/quarantine" ;;
release) rm -f "$2/quarantine" ;;
status) # STATE
    echo "lease=$(holder)"
    echo "restoring=$(stopped $LEASE.service || echo yes)"
    echo "quarantine=$(head -n 1 "$2/quarantine" 2>/dev/null)"
    systemctl list-units --all --plain --no-legend "$JOBS" | sed 's/^\([^ ]*\).*/job=\1/' ;;
restore) restore "${2-$TAUGATE_SERVICE}" "${3-$TAUGATE_PORT}" "${4-$TAUGATE_STATE}" </dev/null ;;
*) refuse 64 "no such command: ${1-}" ;;
esac
"""


class Helper:
    """The helper on the host behind `transport`; the user must be root there."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def argv(self, command: str, *args: str) -> list[str]:
        return ["env", f"{_VARIABLE}={SCRIPT}", "/bin/sh", "-c", _RUN, NAME, command, *args]

    def call(self, command: str, *args: str, deadline: float = 20.0, on_line: OnLine | None = None) -> Completed:
        """Run one of the helper's commands. Raises DeadlineError, HostError (no connection)."""
        short = (NAME, command, *args)  # for messages: nobody wants to read the script in them
        try:
            done = self.transport.run(self.argv(command, *args), deadline=deadline, on_line=on_line)
        except DeadlineError:
            raise DeadlineError(
                f"`{' '.join(short[:3])}` on {self.transport.name} did not end within {deadline:g} s; it may"
                " still be running there"
            ) from None
        return replace(done, argv=short)
