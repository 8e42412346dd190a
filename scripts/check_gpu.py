"""Checks headstart on a GPU, from a checkout, without network, in eight minutes; writes a report.

    scripts/check_gpu.sh                             the whole run; its report: runs/check-gpu/report.md
    scripts/check_gpu.sh --device cpu --quick        a trial of the script itself, on tiny models, in seconds

What is done:

  1. stories260K, a real model of 260,000 parameters (in $HEADSTART_TEST_DATA/stories260k/, left out where that is not
     at hand), is converted in memory and writes the English story that it is known for
  2. a head of every method is trained 50 steps in bf16, on texts that the backbone wrote itself: the loss falls, all of
     the head learns, and nothing of the backbone changes
  3. greedy answers with every head and tree are those of model.generate: in fp32 but for ties (below 1e-4 in float64),
     in bf16 but for what rounding explains at that prefix; each parting is listed with its gap and margin
  4. a seed draws the same tokens with and without heads, on CPU and GPU
  5. prompts, heads and files from the CPU work with a backbone on the GPU
  6. 2 to 4 with a random model of 1,024 x 16 layers (a smaller one where less than 12 GiB are free)
  7. timings in bf16 of that model, and of one of 1 or 8 billion parameters if it fits: forwards by tree nodes, drafts,
     answers beside model.generate; training tokens a second and peak memory stand with 2

Timings come last, and are what is left out where time runs short. Whatever is not checked stands at the report's end.

exit code: 0 all checks passed, 1 one failed, 2 nothing could be run, 130 interrupted
environment: PYTHON the Python to use (.venv, made by scripts/setup.sh, if it is there; else python3)
             CUDA_VISIBLE_DEVICES which GPU      HEADSTART_TEST_DATA the folder that holds stories260k/
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu import checkout

if TYPE_CHECKING:
    import torch
    from gpu.record import Run


def main(arguments: list[str] | None = None) -> int:
    started = time.monotonic()
    given = _parser().parse_args(arguments)
    if lacking := checkout.missing():
        names = ", ".join(lacking)
        return _refuse(f"{sys.executable} lacks {names}; run scripts/setup.sh, or name another Python by PYTHON=...")
    checkout.make_importable()
    if given.device == "cuda" and (reason := _no_gpu()):
        return _refuse(f"{reason}; for a trial of the script itself: --device cpu --quick")
    from headstart.errors import UserError

    try:
        given.out.mkdir(parents=True, exist_ok=True)
        return _checked(given, started)
    except (UserError, OSError) as error:
        return _refuse(str(error))


def _checked(given: argparse.Namespace, started: float) -> int:
    """Do it all, write the report, and say how it went."""
    import torch
    import transformers
    from gpu import plan, report
    from gpu.record import Run

    device = torch.device("cuda", 0) if given.device == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"  # training would take the GPU where there is one
    torch.set_float32_matmul_precision("highest")  # fp32 is to be fp32: TF32 keeps ten bits
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(prefix=".work-", dir=given.out) as work:
        run = Run(device, Path(work), given.minutes, quick=given.quick, started=started)
        run.record.facts = facts(device)
        with contextlib.redirect_stdout(sys.stderr):
            stopped = _go(run)
    run.record.tables.append(run.parts)
    left_out = len(run.record.omitted)
    run.record.omitted += plan.NEVER
    run.record.facts["seconds in all"] = round(time.monotonic() - started)
    path = report.write(run.record, given.out)
    print(f"{report.verdict(run.record)}; left out: {left_out} (see the end of the report); {path}")
    return 130 if stopped else 1 if run.record.failed else 0 if run.record.checks else 2


def _go(run: Run) -> bool:
    """Do every part; was it interrupted?"""
    from gpu import plan

    try:
        run.go(plan.parts(run))
    except (KeyboardInterrupt, SystemExit):  # training turns the first Ctrl-C into an orderly end
        run.omit("everything behind the interruption")
        return True
    return False


def facts(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    import torch

    found: dict[str, Any] = {"device": "CPU"}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found = {
            "device": torch.cuda.get_device_name(device),
            "compute capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "GPU memory": f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} of them free at first",
            "CUDA": torch.version.cuda or f"HIP {torch.version.hip}",
        }
    commit = ["git", "-C", str(checkout.ROOT), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        found["commit"] = subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip()
    versions = {name: metadata.version(name) for name in ("headstart", "torch", "transformers", "accelerate")}
    return {**found, "threads": torch.get_num_threads(), "python": platform.python_version(), **versions}


def _no_gpu() -> str:
    """Why no GPU can be used; empty if one can."""
    import torch

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    because = f" ({str(told[0].message).splitlines()[0]})" if told else ""
    return f"torch {torch.__version__} finds no GPU{because}"


def _refuse(reason: str) -> int:
    print(f"check_gpu: {reason}", file=sys.stderr)
    return 2


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < float("inf"):
        raise ValueError
    return minutes


def _parser() -> argparse.ArgumentParser:
    about, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="check_gpu.sh", description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _minutes.__name__ = "minutes"  # what argparse calls a bad value
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to work (cuda)")
    parser.add_argument("--quick", action="store_true", help="tiny models and few steps: a trial of the script itself")
    parser.add_argument("--minutes", type=_minutes, default=8, help="what all of it may take (8)")
    out = checkout.ROOT / "runs" / "check-gpu"
    parser.add_argument("--out", type=Path, default=out, help="folder for report.md and report.json (runs/check-gpu)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
