"""Runs a trainer, and writes down when its optimizer stepped and how much memory it took.

    python watch.py OUT.json THREADS MODULE [arguments ...]
    python watch.py OUT.json THREADS FILE.py [arguments ...]

The moments are those of every `torch.optim.Optimizer.step`, by torch's own hook, so that nobody's log is trusted. Times
are wall seconds since the process began; the peak is the process's own largest resident memory.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import runpy
import sys
import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

out, threads, what, *arguments = sys.argv[1:]
torch.set_num_threads(int(threads))
began, steps, cpu, peaks = time.monotonic(), [], [], [0]


def stepped(*_):
    steps.append(time.monotonic() - began)
    cpu.append(time.process_time())
    peaks[0] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of training, not of what is saved behind it


def write():
    found = {"steps": steps, "cpu": cpu, "peak_mib": peaks[0] / 2**10, "load": os.getloadavg()[1]}
    found["threads"] = int(threads)
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found, file)


register_optimizer_step_post_hook(stepped)
atexit.register(write)
sys.argv = [what, *arguments]
sys.path[0] = os.path.dirname(what) if what.endswith(".py") else ""
(runpy.run_path if what.endswith(".py") else runpy.run_module)(what, run_name="__main__")
