"""What the GPU itself does, for benchmarks/capture.py: rates of copies and products, memory by nvidia-smi, a hog.

    python benchmarks/capture_gpu.py rates --length 1024      JSON with bytes/s and flop/s
    python benchmarks/capture_gpu.py hog --leave-mib 2861     holds all GPU memory but so much, until stdin closes
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from typing import Any

MIB = 1 << 20
# Weights [out, in] of the products of one block of three Gated DeltaNet layers and one attention layer at 27B sizes.
MLP = [(17408, 5120), (17408, 5120), (5120, 17408)]
DELTA_NET = [(10240, 5120), (6144, 5120), (5120, 6144), *MLP]
ATTENTION = [(12288, 5120), (1024, 5120), (1024, 5120), (5120, 6144), *MLP]


def rates(length: int, seconds: float = 1.5) -> dict[str, float]:
    """Pinned host-to-device copies; products of `length` tokens with the layer shapes; one large square product."""
    import torch

    host = torch.empty(1024 * MIB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    copy = _per_second(lambda: there.copy_(host, non_blocking=True), seconds)
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in 3 * DELTA_NET + ATTENTION]
    inputs = {width: torch.randn(length, width, device="cuda", dtype=torch.bfloat16) for width in (5120, 6144, 17408)}
    flops = sum(2 * length * rows * columns for rows, columns in 3 * DELTA_NET + ATTENTION)

    def block() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return {
        "pinned_bytes_per_s": copy * host.numel(),
        "flops_per_s": flops * _per_second(block, seconds),
        "square_flops_per_s": 2 * 8192**3 * _per_second(lambda: square @ square, seconds),
        "gpu": torch.cuda.get_device_name(),
    }


def _per_second(run: Any, seconds: float) -> float:
    import torch

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
        count += 5
    return count / (time.perf_counter() - start)


def hog(leave: int) -> None:
    """Take memory until `leave` bytes are free; say so; hold it until stdin ends."""
    import torch

    held = []
    while (free := torch.cuda.mem_get_info()[0]) > leave + 4 * MIB:
        size = max(2 * MIB, (free - leave) // (2 * MIB) * 2 * MIB)
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            held.append(torch.empty(size // 2, dtype=torch.uint8, device="cuda"))
    print(json.dumps({"left_mib": torch.cuda.mem_get_info()[0] // MIB}), flush=True)
    sys.stdin.read()


class Watch:
    """Peak GPU memory of one process by nvidia-smi, sampled every 200 ms: torch gives nothing back by itself."""

    def __init__(self) -> None:
        self.by_pid: dict[int, int] = {}
        self._watchers = [self._watch("--query-compute-apps=pid,used_gpu_memory", self._app)]

    def _app(self, line: str) -> None:
        pid, _, used = line.partition(",")
        if pid.strip().isdigit() and used.strip().isdigit():
            self.by_pid[int(pid)] = max(self.by_pid.get(int(pid), 0), int(used))

    def _watch(self, query: str, take: Any) -> subprocess.Popen[str]:
        watcher = subprocess.Popen(
            ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "200"], stdout=subprocess.PIPE, text=True
        )

        def read() -> None:
            for line in watcher.stdout or ():
                if line.strip() and line.strip()[0].isdigit():
                    take(line)

        threading.Thread(target=read, daemon=True).start()
        return watcher

    def stop(self, pid: int) -> dict[str, int | None]:
        for watcher in self._watchers:
            watcher.terminate()
            watcher.wait()
        return {"process_mib": self.by_pid.get(pid)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rates", "hog"])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--leave-mib", type=int, default=0)
    args = parser.parse_args()
    if args.what == "hog":
        hog(args.leave_mib * MIB)
    else:
        print(json.dumps(rates(args.length)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
