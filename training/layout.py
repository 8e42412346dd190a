"""How a run is laid out over processes: what each of them holds of backbone, head and optimizer.

- `Layout`: all of it on each process, one or many that average their gradients (DDP).
- `ZeroLayout` (zero.py): optimizer and gradients of the head sharded by DeepSpeed; in stage 3 the backbone, too.
- `FsdpLayout` (fsdp.py): head, optimizer and backbone sharded by torch's FSDP.

What goes in and comes out is the same for all: a checkpoint holds whole tensors, so that a run may go on in another
layout, and on another number of processes. Methods that end in "On all processes." wait for the others.

Letters: D depths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..heads.backbone import Backbone
from .objective import Objective, Result
from .recipe import Recipe


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
                "shard it over the processes with configs/accelerate-zero3.json or configs/accelerate-fsdp.json"
            )

    def check_in_pieces(self, recipe: Recipe, tool: str) -> None:
        """Refuse what no layout can do that leaves each process a piece of what is trained.

        Args:
            tool: what cuts it.

        Raises:
            UserError: names the setting.
        """
        if recipe.optim.name != "adamw":
            raise UserError(
                f"optim.name is {recipe.optim.name}, which moves whole matrices, and {self.name} leaves each process a "
                f"piece of all of them: set optim.name=adamw, or launch without {tool}"
            )
        if recipe.device_map:
            raise UserError(f"device_map is {recipe.device_map}, and {self.name} spreads the backbone its own way")
        for name in ("lora", "adapter"):
            if getattr(recipe, name).rank is not None:
                raise UserError(
                    f"{name}.rank is set, and {self.name} shards what is trained: launch without, it is small"
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
        """The trained tensors by name, whole, on the CPU. On all processes."""
        return {name: tensor.detach().cpu() for name, tensor in objective.tensors().items()}

    def load_weights(self, objective: Objective, tensors: Mapping[str, Tensor]) -> None:
        """The reverse of `weights`. On all processes."""
        objective.load(tensors)

    def moments(self) -> dict[str, Any]:
        """The optimizer's state, with whole tensors, in the form of the optimizer itself. On all processes."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_moments(self, state: dict[str, Any]) -> None:
        """The reverse of `moments`. On all processes."""
        self.optimizer.load_state_dict(state)
