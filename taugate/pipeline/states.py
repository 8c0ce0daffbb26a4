"""From a host and a configuration to cached states: a window is opened only if something is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from filelock import FileLock, Timeout

from taugate.config_schema import GateConfig
from taugate.drafter.checkpoint import DrafterConfig
from taugate.drafter.replay import CachedSequence
from taugate.errors import StoreError
from taugate.host.host import Host
from taugate.host.queue import wait_until_free
from taugate.pipeline.bar import Say
from taugate.pipeline.borrow import Borrower
from taugate.pipeline.dataset import Dataset
from taugate.pipeline.head import fetch_bundle
from taugate.pipeline.survey import Record, Survey
from taugate.target.here import LOCK
from taugate.target.store import FINAL_HIDDEN, tap_name


def acquire(
    host: Host,
    config: GateConfig,
    drafters: Sequence[DrafterConfig],
    say: Say,
    record: Record,
    *,
    armed: bool,
    always: bool = False,
    dry_run: bool = False,
) -> Dataset:
    """Complete every prompt, capture the states that the store lacks, fetch the head bundle.

    armed: whether the server may be asked and a window opened; always: open one even if nothing is missing;
    dry_run: record the plan and stop there. Raises HostError and CheckpointError (nothing was touched), StoreError
    when states are missing and no window may be opened, PreflightError with the server untouched, WindowError and
    JobError.
    """
    if armed and not dry_run and not host.server.ready():
        wait_until_free(host, config.window.wait_for_lease, say)  # inside another's window there is no server to ask
    survey = Survey(host, config, drafters, say)
    data = survey.dataset(ask=armed and not dry_run)
    record(survey.provenance(data))
    borrower = Borrower(survey, data, record)
    if dry_run:
        borrower.plan(list(data.sequences) if always else _missing(survey, data))
        return data
    if survey.unasked and not armed:
        raise StoreError(
            f"{len(survey.unasked)} completions are not in {survey.cache}, the first is key {survey.unasked[0][:16]}…; "
            "`pytest -m gpu_window` asks the server for them and captures their states"
        )
    if always or _missing(survey, data):
        with _producing(survey):
            _produce(survey, data, borrower, armed, always)
    else:
        borrower.not_needed()
    fetch_bundle(survey, data)
    return data


def _produce(survey: Survey, data: Dataset, borrower: Borrower, armed: bool, always: bool) -> None:
    """Get what is missing: from the host if an earlier run left it there, else through a window."""
    wanted = list(data.sequences)
    if not always:
        missing = _missing(survey, data)  # again: whoever was producing before us may have captured it
        wanted = borrower.results.fetch_waiting(missing) if missing else []
    if wanted and not armed:
        raise StoreError(
            f"{len(wanted)} of {len(data.sequences)} states are not in {data.store.root}, the first is key "
            f"{data.key(wanted[0])[:16]}… of prompt {wanted[0].prompt_id!r}; `pytest -m gpu_window` opens a window "
            "and captures them"
        )
    if wanted:
        borrower.capture(wanted)
    else:
        borrower.not_needed()


def _missing(survey: Survey, data: Dataset) -> list[CachedSequence]:
    """The sequences that lack a state. Raises StoreError for a damaged one."""
    names = [*map(tap_name, survey.taps), FINAL_HIDDEN]
    return [s for s in data.sequences if data.store.missing(data.key(s), names)]


@contextmanager
def _producing(survey: Survey) -> Iterator[None]:
    """One process at a time produces into a store; the others wait, and then mostly find it done."""
    lock = FileLock(survey.cache / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        survey.say(f"another process captures into {survey.cache}; waiting for its end")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
