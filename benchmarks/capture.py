"""Capture of hidden states at the shape of Qwen3.6-27B on an H200: against the hardware, a ceiling, and accelerate.

    python benchmarks/shape27b.py --out /dev/shm/qwen27b          bf16 shards with random weights on the RAM disk, 54 GB
    python benchmarks/capture.py --model /dev/shm/qwen27b         every row that one GPU can give
    python benchmarks/capture.py --model /dev/shm/qwen27b --rows two-gpus     device_map="auto" under 48 GB caps
    python benchmarks/capture.py --model DIR --small --device cpu             whether it runs at all, without a GPU

Each run is a process of its own. Rows go to stderr, the last line of stdout is JSON. A pass is timed the second time in
its process (first_s has the first, which also loads kernels into the GPU); setup_s is the engine's construction.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.capture_gpu import Watch  # noqa: E402

GPU = ROOT / "benchmarks/capture_gpu.py"
ROWS = ("warmup", "rates", "streamed", "one-buffer", "offload", "resident", "two-gpus")
CEILING, LOW_CEILING, CAP = 3.0e9, 1.8e9, 48e9  # bytes
LENGTH = 1024
MIB = 1 << 20


def say(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


class Bench:
    """The rows; each adds its figures to `result`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.result = args, {}
        self.taps = [t for t in (1, 16, 31, 46, 61) if t < self.layers] or [0]

    @property
    def layers(self) -> int:
        return self._text["num_hidden_layers"]

    @property
    def _text(self) -> dict[str, Any]:
        config = json.loads((Path(self.args.model) / "config.json").read_text())
        return config.get("text_config") or config

    def run(self, *options: str, hog: float | None = None) -> dict[str, Any]:
        """One capture_run.py, with its memory by nvidia-smi; hog: bytes that another process leaves free meanwhile."""
        command = [sys.executable, str(ROOT / "benchmarks/capture_run.py"), "--model", self.args.model]
        command += ["--device", self.args.device, "--path", self.args.path, "--length", str(self.args.length), *options]
        holder = self._hog(hog) if hog and self.args.device != "cpu" else None
        try:
            watch = Watch() if self.args.device != "cpu" else None
            child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            out, _ = child.communicate(timeout=self.args.limit)
            memory = watch.stop(child.pid) if watch else {}
        finally:
            if holder:
                holder.stdin.close()
                holder.wait()
        if child.returncode:
            return {"failed": child.returncode, **memory}
        return {**json.loads(out.splitlines()[-1]), **memory}

    def _hog(self, leave: float) -> subprocess.Popen[str]:
        command = [sys.executable, str(GPU), "hog", "--leave-mib", str(int(leave // MIB))]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        said = holder.stdout.readline()
        say("another process holds the GPU's memory:", said.strip())
        return holder

    def row(self, name: str, **figures: Any) -> None:
        self.result[name.replace("-", "_").replace(" ", "_")] = figures
        say(f"{name}: " + ", ".join(f"{key} {value}" for key, value in figures.items()))

    def warmup(self) -> None:
        """Compile once; a second process has nothing to compile."""
        with tempfile.TemporaryDirectory() as scratch:
            spec = Path(scratch) / "spec.json"
            sequences = [{"key": str(n), "token_ids": [1] * n} for n in (self.args.length, 700, 2 * self.args.length)]
            asked = {"model_path": self.args.model, "kernel_path": self.args.path, "dtype": "bfloat16"}
            spec.write_text(json.dumps({**asked, "device": self.args.device, "sequences": sequences}))
            for name in ("warm-up", "warm-up again")[: self.args.warmups]:
                watch = Watch() if self.args.device != "cpu" else None
                child = subprocess.Popen([sys.executable, "-m", "taugate.target.warmup", "--spec", str(spec)],
                                         cwd=ROOT, stdout=subprocess.PIPE, text=True)  # fmt: skip
                out, _ = child.communicate(timeout=self.args.limit)
                done = json.loads(out.splitlines()[-1])
                done.pop("kernels", None)
                self.row(name, **done, **(watch.stop(child.pid) if watch else {}))

    def rates(self) -> None:
        command = [sys.executable, str(GPU), "rates", "--length", str(self.args.length)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        self.row("rates", **json.loads(done.stdout))

    def streamed(self) -> None:
        """Against the hardware, under the ceiling, while another process holds everything else."""
        done = self.run(*self._ours("4,16", "3"), "--max-mib", str(int(CEILING // MIB)), hog=CEILING)
        for prompts in (4, 16):
            self.row(f"streamed {prompts * self.args.length // 1024}k", **self._against(done, prompts))

    def one_buffer(self) -> None:
        done = self.run(*self._ours("4", "2"), "--max-mib", str(int(LOW_CEILING // MIB)), hog=LOW_CEILING)
        self.row("one buffer", **self._against(done, 4))

    def offload(self) -> None:
        """accelerate's disk offload of the first layers, all prompts in one batch, against ours of the same depth."""
        depth = str(min(self.args.offload_layers, self.layers) - 1)
        same = ["--prompts", "4", "--taps", depth, "--no-final", "--repeats", "2"]
        peer = self.run(*same, "--engine", "offload")
        ours = self.run(*same, "--engine", "streamed")
        if "failed" in peer or "failed" in ours:
            return self.row("offload", peer=peer, ours=ours)
        ratio = peer["walls_s"]["4"][-1] / ours["walls_s"]["4"][-1]
        return self.row(
            "offload", layers=int(depth) + 1, peer_s=peer["walls_s"]["4"], ours_s=ours["walls_s"]["4"],
            times_faster=round(ratio, 2), peer_mib=peer.get("process_mib"), ours_mib=ours.get("process_mib"),
        )  # fmt: skip

    def resident(self) -> None:
        done = self.run(*self._ours("16", "2"), "--engine", "resident")
        if "failed" in done:
            return self.row("resident", **done)
        tokens, weights = 16 * self.args.length, self._weights() / MIB
        same = self.result.get(f"streamed_{tokens // 1024}k", {}).get("states") == done["states"]["16"]
        return self.row(
            "resident", s_per_10k_tokens=round(done["walls_s"]["16"][-1] / tokens * 1e4, 3), setup_s=done["setup_s"],
            peak_over_weights=round(sum(done["peak_allocated_mib"]) / weights, 3), walls_s=done["walls_s"]["16"],
            process_mib=done.get("process_mib"), states=done["states"]["16"], equal_to_streamed=same,
            compiled=done["facts"]["compilations"]["compiled"],
        )  # fmt: skip

    def two_gpus(self) -> None:
        """The whole model over two GPUs, neither of which could hold it, against one GPU."""
        import torch

        from taugate.numerics.measures import in_roundings, relative_error

        with tempfile.TemporaryDirectory(dir=self.args.scratch) as scratch:
            files = {name: Path(scratch) / name for name in ("one", "two")}
            one = self.run(*self._ours("4", "1"), "--engine", "resident", "--save", str(files["one"]))
            two = self.run(*self._ours("4", "1"), "--engine", "resident", "--save", str(files["two"]),
                           "--max-mib", str(int(CAP // MIB)))  # fmt: skip
            if "failed" in one or "failed" in two:
                return self.row("two GPUs", one=one, two=two)
            a, b = (torch.load(file) for file in files.values())
        worst = max(in_roundings(relative_error(b[i][name], a[i][name])) for i in a for name in a[i])
        equal = one["states"] == two["states"]
        return self.row("two GPUs", devices=two["facts"]["devices"], worst_difference_f=worst, bit_equal=equal,
                        peak_mib=two["peak_allocated_mib"], setup_s=two["setup_s"], walls_s=two["walls_s"])  # fmt: skip

    def _ours(self, prompts: str, repeats: str) -> list[str]:
        return ["--prompts", prompts, "--taps", ",".join(map(str, self.taps)), "--repeats", repeats]

    def _weights(self) -> float:
        """Bytes of layers, embedding and final norm in bf16."""
        sizes = {file: file.stat().st_size for file in Path(self.args.model).glob("*.safetensors")}
        return sum(sizes.values()) - 2 * self._text["vocab_size"] * self._text["hidden_size"]

    def _against(self, done: dict[str, Any], prompts: int) -> dict[str, Any]:
        """Wall time against the time that its copies or its products need at the measured rates."""
        if "failed" in done:
            return done
        walls, facts = done["walls_s"][str(prompts)], done["facts"]
        wall = min(walls[1:] or walls)
        found = {
            "wall_s": wall, "first_s": walls[0], "setup_s": done["setup_s"], "plan": facts.get("plan"),
            "graphs": facts.get("graphs"), "files": facts.get("files"), "fused": facts.get("fused"),
            "process_mib": done.get("process_mib"), "reserved_mib": done["peak_reserved_mib"],
            "allocated_mib": done["peak_allocated_mib"], "compiled": facts["compilations"]["compiled"],
            "states": done["states"][str(prompts)],
        }  # fmt: skip
        if "rates" in self.result:
            layers = self._weights() - 2 * self._text["vocab_size"] * self._text["hidden_size"]
            transfer = layers / self.result["rates"]["pinned_bytes_per_s"]
            # Two flop for each weight, and a weight is two bytes.
            compute = layers * prompts * self.args.length / self.result["rates"]["flops_per_s"]
            found |= {"transfer_s": round(transfer, 3), "compute_s": round(compute, 3),
                      "efficiency": round(max(transfer, compute) / wall, 3)}  # fmt: skip
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint written by shape27b.py")
    parser.add_argument("--rows", default=",".join(ROWS[:-1]), help="comma-separated: " + ", ".join(ROWS))
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of each prompt")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--path", default="fla")
    parser.add_argument("--offload-layers", type=int, default=16)
    parser.add_argument("--warmups", type=int, default=2, help="1: leave out the second warm-up")
    parser.add_argument("--scratch", help="directory for states that are compared")
    parser.add_argument("--limit", type=float, default=240, help="seconds for each process")
    args = parser.parse_args()
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "taugate-triton"))
    bench = Bench(args)
    for name in args.rows.split(","):
        getattr(bench, name.replace("-", "_"))()
    print(json.dumps({"benchmark": "capture", "layers": bench.layers, **bench.result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
