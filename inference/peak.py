"""The most memory that was taken while something ran, beyond what was taken before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """See `peak`."""

    bytes: int | None = None
    """Known when the block is left; None where this system does not tell."""


@contextmanager
def peak(device: torch.device) -> Iterator[Peak]:
    """How much memory the block takes at most, beyond what is taken when it begins: of the GPU, where the device is
    one, else resident memory of this process."""
    found = Peak()
    gc.collect(1)  # engines of before; a whole collection takes longer than small models do
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    with suppress(OSError):
        RESET.write_text("5")  # the peak starts anew from what is resident now
    resident = _status("VmRSS")
    yield found
    highest = _status("VmHWM")
    found.bytes = None if resident is None or highest is None else max(0, highest - resident)


def _status(name: str) -> int | None:
    with suppress(OSError, ValueError, StopIteration):
        lines = STATUS.read_text(encoding="utf-8").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])
    return None
