"""The capture as a job: what is missing is captured, and one safetensors file is written for each sequence.

    python -m taugate.target.capture --spec spec.json --out DIR

The spec is JSON: {"model_path", "kernel_path", "dtype", "device", "taps": [L, …], "sequences": [{"key", "token_ids"}]},
and if wanted "final_hidden" (true), "engine" ("auto"), "max_gpu_memory" (MiB on each GPU, context included), "threads".
Progress goes to stdout as JSON lines. Files that are complete already are kept, so an interrupted run goes on where
it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from taugate.errors import TaugateError
from taugate.files import sha256_file
from taugate.target.capture import Capture, LayerDone, pick_device
from taugate.target.kernels import kernel_path


def run(spec: dict[str, Any], out: Path) -> Iterator[dict[str, Any]]:
    """Capture what is missing in `out` and yield progress events; the last one is {"event": "done", …}."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    todo = [s for s in spec["sequences"] if not (out / f"{s['key']}.safetensors").is_file()]
    done = len(spec["sequences"]) - len(todo)
    device = pick_device(spec["device"])
    yield {"event": "loading", "done": done, "of": len(spec["sequences"]), "device": device}
    evidence: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    if todo:
        capture = Capture.from_spec(spec, device)
        with kernel_path(spec["kernel_path"], capture.model_type, device) as ran:
            start, finished = time.monotonic(), 0
            for event in capture.states([s["token_ids"] for s in todo]):
                if isinstance(event, LayerDone):
                    yield {"event": "layer", **event.to_json()}
                    continue
                if not finished:
                    ran.require()  # a wrong path is known after one sequence, not after all of them
                sequence = todo[event.index]
                partial = out / f".{sequence['key']}.partial"
                save_file(event.tensors, partial)
                partial.replace(out / f"{sequence['key']}.safetensors")
                finished += 1
                spent = time.monotonic() - start
                yield {
                    "event": "state",
                    "done": done + finished,
                    "of": len(spec["sequences"]),
                    "tokens": len(sequence["token_ids"]),
                    "left_s": round(spent / finished * (len(todo) - finished), 1),
                }
            evidence, engine = ran.require(), capture.facts()
    files = {s["key"]: sha256_file(out / f"{s['key']}.safetensors") for s in spec["sequences"]}
    yield {"event": "done", "kernels": evidence, "engine": engine, "files": files, "device": device}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m taugate.target.capture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--spec", type=Path, required=True, help="JSON file, see above")
    parser.add_argument("--out", type=Path, required=True, help="directory for KEY.safetensors")
    args = parser.parse_args(argv)
    spec = json.loads(args.spec.read_text())
    if spec["kernel_path"] == "torch":
        sys.modules.setdefault("fla", None)  # type: ignore[arg-type]  # importing it costs ten seconds for nothing
    try:
        for event in run(spec, args.out):
            print(json.dumps(event), flush=True)
    except TaugateError as error:
        print(json.dumps({"event": "error", "sentence": str(error)}), flush=True)
        print(error, file=sys.stderr)
        return 1
    return 0
