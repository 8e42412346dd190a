"""How a run is laid out over processes: what each of them holds of backbone, head and optimizer.

- `Layout`: all of it on each process, one or many that average their gradients (DDP).
- `ZeroLayout` (zero.py): optimizer and gradients of the head sharded by DeepSpeed; in stage 3 the backbone, too.
- `FsdpLayout` (fsdp.py): head, optimizer and backbone sharded by torch's FSDP.

What goes in and comes out is the same for all: a checkpoint holds whole tensors, so that a run may go on in another
layout, and on another number of processes. Methods that end in "On all processes." wait for the others.

Letters: D depths.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..heads.backbone import Backbone
from .objective import Objective, Result
from .recipe import Recipe

T = TypeVar("T")
PATIENCE = timedelta(days=7)  # for a process that prepares rows while the others have nothing to do


class Layout:
    """Everything on every process."""

    name = "whole on each process"
    sharded = False
    """Whether a forward of the backbone waits for the other processes, so that all have to make the same number."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.wrapped: Any = None
        self.optimizer: Any = None
        self.parameters: list[nn.Parameter] = []
        self.clip = float("inf")

    # -- setting up ----------------------------------------------------------------------------------------------

    def check(self, recipe: Recipe) -> None:
        """Refuse what this layout cannot do.

        Raises:
            UserError: names the setting.
        """
        if recipe.device_map and self.accelerator.num_processes > 1:
            raise UserError(
                f"device_map is {recipe.device_map}: one process spreads the backbone over all GPUs, and "
                f"{self.accelerator.num_processes} would take the same ones; start one process (headstart train), or "
                "shard it over the processes with configs/deepspeed-zero3.yaml or configs/fsdp.yaml"
            )

    def load(self, load: Callable[[torch.device | None], Backbone]) -> Backbone:
        """The backbone, by a function of the device. On all processes."""
        return load(self.accelerator.device)

    def shard(self, backbone: Backbone) -> None:
        """Leave each process its part of the backbone. On all processes."""

    def wrap(self, objective: Objective, optimizer: Any, clip: float | None) -> None:
        """Take over the training of an objective."""
        self.parameters = [one for one in objective.parameters() if one.requires_grad]
        self.clip = clip or float("inf")
        self.wrapped, self.optimizer = self.accelerator.prepare(objective, optimizer)

    # -- a step --------------------------------------------------------------------------------------------------

    def run(self, batch: Any, features: Any, scale: Tensor, last: bool) -> Result:
        """A forward and its backward; gradients are averaged over the processes behind the last one of a step."""
        with nullcontext() if last else self.accelerator.no_sync(self.wrapped):
            result: Result = self.wrapped(batch, features, scale)
            self.accelerator.backward(result.total)
        return result

    def norm(self) -> float:
        """Norm of the gradient, over all processes; what is longer than `clip` is scaled down."""
        return float(self.accelerator.clip_grad_norm_(self.parameters, self.clip))

    def step(self) -> None:
        """Move the head along its gradient, and forget that."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    # -- whole tensors -------------------------------------------------------------------------------------------

    def whole(self) -> AbstractContextManager[None]:
        """While it is open, the head is whole on every process. On all processes."""
        return nullcontext()

    def weights(self, objective: Objective) -> dict[str, Tensor]:
        """The head's tensors by name, whole, on the CPU. On all processes."""
        return {name: tensor.detach().cpu() for name, tensor in objective.head.state_dict().items()}

    def load_weights(self, objective: Objective, tensors: Mapping[str, Tensor]) -> None:
        """The reverse of `weights`. On all processes."""
        objective.head.load_state_dict(tensors, strict=True)

    def moments(self) -> dict[str, Any]:
        """The optimizer's state, with whole tensors, in the form of the optimizer itself. On all processes."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_moments(self, state: dict[str, Any]) -> None:
        """The reverse of `moments`. On all processes."""
        self.optimizer.load_state_dict(state)


def meet() -> None:
    """Before the accelerator is made: DeepSpeed's processes on the CPU, which accelerate would leave by themselves."""
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


def same_on_all(accelerator: Any, facts: Mapping[str, Any]) -> None:
    """All processes have to have the same.

    Raises:
        UserError: one has not; names the fact, and both values.
    """
    if accelerator.num_processes == 1:
        return
    from accelerate.utils import gather_object

    for process, others in enumerate(gather_object([dict(facts)])):
        for name, value in facts.items():
            if others[name] != value:
                raise UserError(
                    f"{name} is {value} on process {accelerator.process_index}, and {others[name]} on process "
                    f"{process}: all machines have to see the same files, the folder of the run among them"
                )
