"""What the processes of a run do together: meet, wait for each other, and run a sharded backbone in step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch

from ..errors import UserError
from ..heads.backbone import Backbone
from .layout import Layout

T = TypeVar("T")
PATIENCE = timedelta(days=7)  # for a process that prepares rows while the others have nothing to do


def meet() -> None:
    """Before the accelerator is made: DeepSpeed's processes on the CPU, which accelerate would leave by themselves."""
    if asked("DEEPSPEED"):
        from .zero import drop_dead_locks

        drop_dead_locks()
    if os.environ.get("DS_ACCELERATOR") == "cpu" and asked("DEEPSPEED") and "LOCAL_RANK" in os.environ:
        from accelerate import PartialState

        PartialState(cpu=True)


def asked(what: str) -> bool:
    """Was `accelerate launch` told to use it?"""
    return os.environ.get(f"ACCELERATE_USE_{what}", "").lower() == "true"


def layout_of(accelerator: Any) -> Layout:
    """The layout that `accelerate launch` was told.

    Raises:
        UserError: accelerate has left out DeepSpeed, or the other processes.
    """
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != started:
        raise UserError(f"{started} processes were started, and accelerate knows of {accelerator.num_processes}")
    if kind == "DEEPSPEED":
        from .zero import ZeroLayout

        return ZeroLayout(accelerator)
    if asked("DEEPSPEED"):
        raise UserError(
            f"DeepSpeed was asked for, and accelerate runs {kind} without it; on the processor set DS_ACCELERATOR=cpu, "
            "and neither ACCELERATE_USE_CPU nor --cpu"
        )
    if asked("FSDP"):  # accelerate knows it on GPUs alone
        from .fsdp import FsdpLayout

        return FsdpLayout(accelerator)
    return Layout(accelerator)


def in_turns(accelerator: Any, work: Callable[[], T]) -> T:
    """Do a work whose result stays on disk: first the first process, then the first of each machine, then the others.

    The others wait in a group of their own, whatever time the work takes; the time-out of training is none of it.
    """
    if accelerator.num_processes == 1:
        return work()
    group = torch.distributed.new_group(backend="gloo", timeout=PATIENCE)
    turn = 0 if accelerator.is_main_process else 1 if accelerator.is_local_main_process else 2
    for now in range(3):
        if now == turn:
            made = work()
        torch.distributed.barrier(group)
    return made


@contextmanager
def in_step(layout: Layout, backbone: Backbone) -> Iterator[None]:
    """While it is open, each process runs the backbone as often as it likes, and none waits for ever.

    A forward of a sharded backbone needs all processes. Before each, all agree that one of them still has something to
    run; a process that is done joins in with a token of its own until all are. Each prompt is decoded by one process
    alone, so that what is accepted is decided once.
    """
    if not layout.sharded:
        yield
        return
    handle = backbone.decoder.register_forward_pre_hook(lambda *_: _go(layout, True), prepend=True)
    try:
        yield
    finally:
        handle.remove()
    token = torch.zeros(1, 1, dtype=torch.long, device=backbone.device)
    while _go(layout, False):
        with torch.no_grad():
            backbone.forward(token)


def _go(layout: Layout, wanted: bool) -> bool | None:
    """Does any process still run the backbone? (As a hook it must return None.)"""
    own = torch.tensor(float(wanted), device=layout.accelerator.device)
    found = float(layout.accelerator.reduce(own, "sum")) > 0
    return None if wanted else found


def gathered(accelerator: Any, own: T) -> list[T]:
    """What each process has, in their order. On all processes."""
    if accelerator.num_processes == 1:
        return [own]
    from accelerate.utils import gather_object

    return list(gather_object([own]))


def same_on_all(accelerator: Any, facts: Mapping[str, Any]) -> None:
    """All processes have to have the same.

    Raises:
        UserError: one has not; names the fact, and both values.
    """
    for process, others in enumerate(gathered(accelerator, dict(facts))):
        for name, value in facts.items():
            if others[name] != value:
                raise UserError(
                    f"{name} is {value} on process {accelerator.process_index}, and {others[name]} on process "
                    f"{process}: all machines have to see the same files, the folder of the run among them"
                )
