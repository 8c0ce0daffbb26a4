"""From a host and a configuration to cached states: a window is opened only if something is missing."""

from __future__ import annotations

from collections.abc import Sequence

from taugate.config_schema import GateConfig
from taugate.drafter.checkpoint import DrafterConfig
from taugate.errors import StoreError
from taugate.host.host import Host
from taugate.pipeline.borrow import Borrower
from taugate.pipeline.dataset import Dataset
from taugate.pipeline.survey import Record, Say, Survey
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
    survey = Survey(host, config, drafters, say)
    data = survey.dataset(ask=armed and not dry_run)
    record(survey.provenance(data))
    borrower = Borrower(survey, data, record)
    names = [*map(tap_name, survey.taps), FINAL_HIDDEN]
    missing = [s for s in data.sequences if data.store.missing(data.key(s), names)]
    wanted = list(data.sequences) if always else missing
    if dry_run:
        borrower.plan(wanted)
        return data
    if survey.unasked and not armed:
        raise StoreError(
            f"{len(survey.unasked)} completions are not in {survey.cache}, the first is key {survey.unasked[0][:16]}…; "
            "`pytest -m gpu_window` asks the server for them and captures their states"
        )
    if wanted and not armed:
        raise StoreError(
            f"{len(missing)} of {len(data.sequences)} states are not in {data.store.root}, the first is key "
            f"{data.key(wanted[0])[:16]}… of prompt {wanted[0].prompt_id!r}; `pytest -m gpu_window` opens a window "
            "and captures them"
        )
    if wanted:
        borrower.capture(wanted)
    else:
        borrower.not_needed()
    borrower.fetch_bundle()
    return data
