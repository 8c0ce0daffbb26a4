"""The target's head bundle: made on the host, fetched once per target after its server is back."""

from __future__ import annotations

import time

from taugate.errors import JobError
from taugate.pipeline.bar import Bar, duration, size
from taugate.pipeline.dataset import Dataset
from taugate.pipeline.survey import Survey
from taugate.target.head import HeadStore


def fetch_bundle(survey: Survey, data: Dataset) -> None:
    """Bring the target's embedding and head over unless they are here. An interrupted fetch goes on where it was.

    Raises HostError, JobError, StoreError for a bundle here that is damaged.
    """
    heads, weights = HeadStore(survey.cache), survey.target.weights_sha256
    if heads.find(weights):
        return
    host = survey.host
    remote = f"{host.work_dir}/heads/{weights[:32]}.safetensors"
    made = survey.package.run(
        "target.head",
        "--model-path",
        survey.model_path,
        "--out",
        remote,
        deadline=1800,
        what="making the head bundle",
    )
    bar, start, first = Bar(survey.say, "fetch head"), time.monotonic(), -1

    def progress(count: int) -> None:
        nonlocal first
        first = count if first < 0 else first
        rate = (count - first) / max(time.monotonic() - start, 1e-3)
        left = f", {duration((made['bytes'] - count) / rate)} left" if rate else ""
        bar(count, made["bytes"], f"{size(count)} of {size(made['bytes'])}{left}")

    waiting = heads.incoming(made["sha256"])
    if host.transport.get(remote, waiting, resume=True, on_bytes=progress) != made["sha256"]:
        waiting.unlink()
        raise JobError(f"the head bundle changed on its way from {host.name}; run again to fetch it once more")
    heads.adopt(waiting, made["sha256"], weights)
    host.transport.run(["rm", "-f", remote], deadline=60).check(f"removing {remote}")
