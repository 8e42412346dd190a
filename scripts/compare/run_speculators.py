"""`python -m speculators.train` on a CPU: the places that take a GPU for granted are told otherwise; nothing else."""

from __future__ import annotations

import runpy
import sys

import speculators.train.checkpointer as checkpointer
import speculators.train.trainer as trainer
import torch

torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")
torch.accelerator.synchronize = lambda *_, **__: None
torch.accelerator.is_available = lambda: False
trainer.get_local_rank = lambda: "cpu"  # what the model and each batch are moved to
checkpointer.get_current_device = lambda: "cpu"  # where a checkpoint is read to
torch.cpu.empty_cache = lambda: None
torch.Tensor.pin_memory = lambda self, *_: self
sys.argv[0] = "speculators.train"
runpy.run_module("speculators.train", run_name="__main__")
