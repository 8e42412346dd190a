"""torch's FSDP: head, gradients, optimizer state and the backbone's decoder layers in shards.

The frozen layers are gathered one at a time for a forward. The head is gathered for each forward and backward of
training, and stays whole while it is evaluated. What it borrows of the backbone (embedding, final norm, output
projection) stays whole on every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..heads.backbone import Backbone
from .layout import Layout
from .objective import Objective, Result
from .recipe import Recipe
from .zero import aside


class FsdpLayout(Layout):
    """See the module's docstring."""

    name = "FSDP"
    sharded = True

    def __init__(self, accelerator: Any) -> None:
        super().__init__(accelerator)
        self.mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))

    def check(self, recipe: Recipe) -> None:
        self.check_in_pieces(recipe, "FSDP")

    def load(self, load: Callable[[torch.device | None], Backbone]) -> Backbone:
        return load(None)  # in the memory of the host; layers move to the device one by one, a shard of each

    def shard(self, backbone: Backbone) -> None:
        backbone.hash = backbone.fingerprint()
        with aside(backbone.decoder, backbone.borrowed):
            for layer in backbone.layers:
                fully_shard(layer, mesh=self.mesh, reshard_after_forward=True)
            fully_shard(backbone.decoder, mesh=self.mesh)
        for module in backbone.borrowed:
            module.to(self.accelerator.device)

    # -- a step --------------------------------------------------------------------------------------------------

    def wrap(self, objective: Objective, optimizer: Any, clip: float | None) -> None:
        names = {id(one): name for name, one in objective.named_parameters()}
        places = [[names[id(one)] for one in group["params"]] for group in optimizer.param_groups]
        fully_shard(objective, mesh=self.mesh, reshard_after_forward=False)
        now = dict(objective.named_parameters())
        for group, held in zip(optimizer.param_groups, places, strict=True):
            group["params"] = [now[name] for name in held]
        self.parameters = [one for one in objective.parameters() if one.requires_grad]
        self.clip = clip or float("inf")
        self.wrapped, self.optimizer = objective, optimizer

    def run(self, batch: Any, features: Any, scale: Tensor, last: bool) -> Result:
        self.wrapped.set_requires_gradient_sync(last)
        result: Result = self.wrapped(batch, features, scale)
        torch.autograd.backward(result.total)
        return result

    def norm(self) -> float:
        norm = nn.utils.clip_grad_norm_(self.parameters, self.clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    # -- whole tensors -------------------------------------------------------------------------------------------

    @contextmanager
    def whole(self) -> Iterator[None]:
        self.wrapped.unshard()
        try:
            yield
        finally:
            self.wrapped.reshard()

    def weights(self, objective: Objective) -> dict[str, Tensor]:
        return {name: _whole(tensor).detach().cpu() for name, tensor in objective.head.state_dict().items()}

    def load_weights(self, objective: Objective, tensors: Mapping[str, Tensor]) -> None:
        own = objective.head.state_dict()
        made = {name: _like(own[name], tensor) if name in own else tensor for name, tensor in tensors.items()}
        objective.head.load_state_dict(made, strict=True)

    def moments(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()
        whole = {n: {k: _whole(v).cpu() for k, v in one.items()} for n, one in state["state"].items()}
        return {**state, "state": whole}

    def load_moments(self, state: dict[str, Any]) -> None:
        flat = [one for group in self.optimizer.param_groups for one in group["params"]]
        shards = {
            n: {k: _like(flat[n], v) if v.ndim else v for k, v in one.items()} for n, one in state["state"].items()
        }
        self.optimizer.load_state_dict({**state, "state": shards})


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(own: Tensor, whole: Tensor) -> Tensor:
    """A whole tensor, cut as this one is."""
    if not isinstance(own, DTensor):
        return whole
    return distribute_tensor(whole.to(own.device), own.device_mesh, own.placements)
