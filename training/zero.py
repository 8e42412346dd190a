"""DeepSpeed's ZeRO: optimizer state (stage 1), gradients (2) and backbone (3) in shards.

The head itself stays whole on every process in all stages, as its weights are read at every depth of a draft and in the
middle of the loss; it is one layer. In stage 3 the decoder layers of the frozen backbone are sharded, while they are
loaded already; what the head borrows of it (embedding, final norm, output projection) stays whole.

DeepSpeed's own files, which are pickles, are neither written nor read: states go in and out as whole tensors.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..heads.backbone import Backbone
from ..heads.forms import fingerprint
from .layout import Layout
from .objective import Objective, Result
from .recipe import Recipe

COMPILING = 300.0  # seconds; what DeepSpeed compiles takes a minute or two
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW


def drop_dead_locks() -> None:
    """Remove what would be waited for in silence, and for ever. On all processes, before any of them compiles.

    DeepSpeed compiles at its first use behind a lock that is a mere file, and stays where its process was killed. It
    goes once it is older than compiling takes, and no process of this machine has it open.
    """
    from torch.utils.cpp_extension import get_default_build_root

    for lock in Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()).rglob("lock"):
        try:
            if time.time() - lock.stat().st_mtime > COMPILING and not _is_open(lock):
                lock.unlink(missing_ok=True)
                continue
        except OSError:  # gone meanwhile
            continue
        print(f"{lock}: waiting for a process that compiles; if none is at work, remove this file", file=sys.stderr)


def _is_open(path: Path) -> bool:
    for one in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(one) == str(path.resolve()):
                return True
        except OSError:  # of somebody else, or closed meanwhile
            continue
    return False


class ZeroLayout(Layout):
    """See the module's docstring."""

    def __init__(self, accelerator: Any) -> None:
        super().__init__(accelerator)
        self.gradients: list[Tensor | None] = []
        self.config: dict[str, Any] = accelerator.state.deepspeed_plugin.deepspeed_config
        self.stage = int(self.config["zero_optimization"].get("stage") or 0)
        self.sharded = self.stage == 3
        self.name = f"DeepSpeed ZeRO, stage {self.stage}"

    def check(self, recipe: Recipe) -> None:
        self.check_in_pieces(recipe, "DeepSpeed")
        if recipe.data.cache is not None and self.sharded:
            raise UserError(
                f"data.cache is {recipe.data.cache}, and in stage 3 no process has all weights, by which features are "
                "told apart: use stage 2 (cached features spare the backbone in training) or FSDP, or no data.cache"
            )

    # -- the backbone --------------------------------------------------------------------------------------------

    def load(self, load: Callable[[torch.device | None], Backbone]) -> Backbone:
        if not self.sharded:
            return super().load(load)
        from transformers.integrations.deepspeed import HfDeepSpeedConfig

        shards: Any = HfDeepSpeedConfig
        told = shards(self._told(3))  # while it is there, transformers loads in shards
        backbone = load(None)
        del told
        return backbone

    def shard(self, backbone: Backbone) -> None:
        if not self.sharded:
            return
        import deepspeed

        backbone.hash = fingerprint(_gathered(backbone.model))
        device = self.accelerator.device
        for module in backbone.borrowed:
            _make_whole(module, device)
        with aside(backbone.decoder, backbone.borrowed):
            deepspeed.initialize(model=backbone.decoder, config=self._told(3))
        backbone.decoder.eval()

    def _told(self, stage: int) -> dict[str, Any]:
        """The user's settings of DeepSpeed for one of its two engines; what the recipe says is the recipe's."""
        config = copy.deepcopy(self.config)
        config["zero_optimization"]["stage"] = stage
        # in fp32 all: the head's products are under autocast, and the backbone keeps the dtype it was loaded in
        config |= {"fp16": {"enabled": False}, "bf16": {"enabled": False}, "steps_per_print": 1 << 40}
        config |= {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_allow_untested_optimizer": True,
        }
        config |= {"gradient_clipping": 0.0, "zero_force_ds_cpu_optimizer": False}
        for name in ("train_batch_size", "optimizer", "scheduler"):
            config.pop(name, None)
        config["zero_optimization"] = {k: v for k, v in config["zero_optimization"].items() if v != "auto"}
        return config

    # -- a step --------------------------------------------------------------------------------------------------

    def wrap(self, objective: Objective, optimizer: Any, clip: float | None) -> None:
        import deepspeed

        self.parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self.form = optimizer.state_dict()  # of an optimizer that is not sharded
        config = self._told(min(max(self.stage, 1), 2)) | {"gradient_clipping": clip or 0.0}
        self.engine, self.optimizer, *_ = deepspeed.initialize(model=objective, optimizer=optimizer, config=config)
        self.objective, self.gradients = objective, [None] * len(self.parameters)

    def run(self, batch: Any, features: Any, scale: Tensor, last: bool) -> Result:
        """Gradients are taken here and handed over at the end of a step, in one form for all processes.

        DeepSpeed adds up gradients in the order in which autograd finds them, and that is another one on a process
        whose rows leave a depth, or all of them, without an anchor.
        """
        result: Result = self.objective(batch, features, scale)
        gradients = torch.autograd.grad(result.total, self.parameters, allow_unused=True)
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                held = self.gradients[place]
                self.gradients[place] = gradient if held is None else held + gradient
        if last:
            pairs = zip(self.parameters, self.gradients, strict=True)
            total = sum((one * (torch.zeros_like(one) if held is None else held)).sum() for one, held in pairs)
            self.gradients = [None] * len(self.parameters)
            self.engine.backward(total, scale_wrt_gas=False)
        return result

    def norm(self) -> float:
        norm = float(self.optimizer.scaled_global_norm())  # it is clipped by `step`
        return norm if norm >= 0 else float("nan")  # -1 is how DeepSpeed tells that it is not finite

    def step(self) -> None:
        self.engine.step()

    # -- whole tensors -------------------------------------------------------------------------------------------

    def load_weights(self, objective: Objective, tensors: Mapping[str, Tensor]) -> None:
        super().load_weights(objective, tensors)
        self.optimizer.refresh_fp32_params()

    def moments(self) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        state: dict[int, dict[str, Any]] = {}
        steps = [float(one["step"]) for one in self.optimizer.optimizer.state.values()]
        if steps:
            self._link()
            for number, parameter in enumerate(self.parameters):
                found = {name: safe_get_full_optimizer_state(parameter, name).cpu() for name in MOMENTS}
                state[number] = {"step": torch.tensor(steps[0]), **found}
        return {"state": state, "param_groups": self.form["param_groups"]}

    def load_moments(self, state: dict[str, Any]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        for flat in self.optimizer.single_partition_of_fp32_groups:  # as AdamW makes it in its first step
            step = state["state"][0]["step"].clone()
            self.optimizer.optimizer.state[flat] = {"step": step, **{name: torch.zeros_like(flat) for name in MOMENTS}}
        self._link()
        for number, parameter in enumerate(self.parameters):
            for name in MOMENTS:
                safe_set_full_optimizer_state(parameter, state["state"][number][name].to(parameter.device), name)

    def _link(self) -> None:
        """Show DeepSpeed where its state of each parameter lies; by itself it knows that of the first group alone."""
        from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state

        zero = self.optimizer
        for parameters, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
            lazy_init_hp_params_optimizer_state(parameters, flat, zero.optimizer.state)


@contextmanager
def aside(decoder: nn.Module, modules: tuple[nn.Module, ...]) -> Iterator[None]:
    """While it is open, these modules are no part of the decoder."""
    places = [
        (parent, name) for parent in decoder.modules() for name, child in parent.named_children() if child in modules
    ]
    children = [getattr(parent, name) for parent, name in places]
    for parent, name in places:
        setattr(parent, name, nn.Identity())
    try:
        yield
    finally:
        for (parent, name), child in zip(places, children, strict=True):
            setattr(parent, name, child)


def _gathered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters by name, whole one after the other. On all processes."""
    import deepspeed

    for name, parameter in sorted(model.named_parameters()):
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            yield name, parameter


def _make_whole(module: nn.Module, device: torch.device) -> None:
    """Ordinary parameters in place of sharded ones, on the device; tied ones stay tied."""
    import deepspeed

    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if not hasattr(parameter, "ds_id"):
                part._parameters[name] = parameter
                continue
            if not hasattr(parameter, "whole"):
                with deepspeed.zero.GatheredParameters([parameter]):
                    parameter.whole = nn.Parameter(parameter.detach().to(device, copy=True), requires_grad=False)  # type: ignore[attr-defined]
            part._parameters[name] = parameter.whole  # type: ignore[attr-defined]
    module.to(device)
