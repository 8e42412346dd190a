"""How and where forwards are computed: what every measurement of speed depends on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..heads.backbone import Backbone


def running(backbone: Backbone) -> dict[str, Any]:
    """How and where its forwards are computed, and by which versions."""
    cuda = backbone.device.type == "cuda"
    return {
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "attention": getattr(backbone.config, "_attn_implementation", None),
        "device": torch.cuda.get_device_name(backbone.device) if cuda else str(backbone.device),
        **{name: metadata.version(name) for name in ("torch", "transformers", "headstart")},
    }


def machine() -> dict[str, Any]:
    """What computes, beside a GPU."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
