"""Average the weights of drafters of one shape: python tools/average.py OUT CHECKPOINT CHECKPOINT [...]

The mean of checkpoints that one run visited generalises better than each of them (arXiv 2203.05482); the shipped
reference drafter is the mean of the last checkpoints of its two training runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path


def average(out: Path, checkpoints: list[Path]) -> None:
    """Write the mean of `checkpoints` to `out`, summed in float32 and stored in their dtype.

    Raises SystemExit if their configs or tensors differ.
    """
    import torch
    from safetensors.torch import load_file, save_file

    configs = [json.loads((path / "config.json").read_text()) for path in checkpoints]
    for path, config in zip(checkpoints, configs, strict=True):
        if config != configs[0]:
            raise SystemExit(f"{path} has another config.json than {checkpoints[0]}; average checkpoints of one shape")
    every = [load_file(path / "model.safetensors") for path in checkpoints]
    mean = {
        key: torch.stack([tensors[key].float() for tensors in every]).mean(0).to(value.dtype).contiguous()
        for key, value in every[0].items()
    }
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(checkpoints[0] / "config.json", out / "config.json")
    save_file(mean, out / "model.safetensors", metadata={"format": "pt", "averaged": str(len(checkpoints))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("checkpoints", type=Path, nargs="+")
    args = parser.parse_args()
    average(args.out, args.checkpoints)


if __name__ == "__main__":
    main()
