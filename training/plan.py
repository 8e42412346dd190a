"""`headstart plan`: what a run will take, before anything runs.

Rows are prepared (which the run finds again) and counted; backbone and head are there by their shapes alone, on the
meta device. Memory and disk follow by arithmetic (`memory.py`), steps from the rows, and time from how fast this
machine multiplies, or from steps that are really taken.

Letters: N positions of a forward, D depths.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..data.capture import GROUP_TOKENS, batches_of, size_of
from ..data.feature_key import Reads, stored_as
from ..errors import UserError
from ..files import cache_folder
from ..heads.backbone import Backbone
from ..heads.base import DraftHead
from ..heads.format import load_head
from ..heads.layouts import BackboneNeededError
from ..heads.load import load_backbone, sketch_backbone
from ..progress import duration
from .batches import Batches, Rows, anchors, collate
from .calibration import LOOKED_AT, calibrated
from .lora import adapt
from .memory import LAYOUTS, Shape, adapter_bytes, free_bytes, head_bytes, moment_bytes, parts, resident
from .objective import depths_of
from .recipe import Recipe, load_recipe
from .rows import prepared_rows
from .schedule import Schedule
from .setup import autocast_of, precision_of, sketch_head

GIB = 2**30


@dataclass
class PlanSettings:
    """What a training run will take; with --serve, what serving will."""

    recipe: Path | None = None
    """The recipe, a YAML file such as configs/smollm2-eagle3.yaml; with --serve there is none."""
    overrides: list[str] = field(default_factory=list)
    """Settings of the recipe that are to be otherwise, as key=value."""
    processes: int = 1
    """Processes that will share each step."""
    layout: Literal["whole", "zero1", "zero2", "zero3", "fsdp"] = "whole"
    """How they hold backbone and optimizer: whole on each of them, or sharded as accelerate is told."""
    memory: float | None = None
    """Memory of each process, in GiB; without it, what is free on this machine, shared among the processes."""
    disk: float | None = None
    """Disk for the run, in GiB; without it, what is free where its folder will be."""
    calibrate: bool = False
    """Load everything and take a few steps in memory, for the time of a step and the memory that it really took."""

    def __post_init__(self) -> None:
        for name in ("processes", "memory", "disk"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"{name} is {value}; expected a number above 0")


@dataclass
class Plan:
    """What came of it; bytes and seconds."""

    memory: dict[str, float]
    """By what it is for, on each process."""
    disk: dict[str, float]
    steps: int
    step_seconds: float
    seconds: float
    """Of the run, without evaluation."""
    rows: int
    tokens: int
    """Of an epoch."""
    room: dict[str, float]
    """Memory of each process and disk that there are."""
    measured: float | None = None
    """The memory that calibration really took, in bytes."""
    change: str = ""
    """The first change of the recipe that makes it fit; empty where it fits or nothing does."""
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def short(self) -> dict[str, tuple[float, float]]:
        """What will not fit: bytes needed, bytes there."""
        needed = {"memory": max(sum(self.memory.values()), self.measured or 0.0), "disk": sum(self.disk.values())}
        return {name: (size, self.room[name]) for name, size in needed.items() if size > self.room[name]}

    def lines(self) -> dict[str, str]:
        """Names and values, in the order of telling."""
        timed = "measured" if self.measured is not None else "by how fast this machine multiplies; --calibrate measures"
        made = {
            **self.facts,
            "rows": f"{self.rows:,} trained on, {self.tokens:,} tokens an epoch",
            "steps": f"{self.steps:,}",
            "memory": _listed(self.memory) + f"; {_gib(self.room['memory'])} there",
            "disk": _listed(self.disk) + f"; {_gib(self.room['disk'])} there",
            "time": f"{duration(self.seconds)}, {self.step_seconds:.2g} s a step ({timed}), without evaluation",
        }
        if self.measured is not None:
            made["memory of a step"] = f"{_gib(self.measured)}, measured"
        return made

    def check(self) -> None:
        """That it fits.

        Raises:
            UserError: it does not; says what to change.
        """
        for name, (needed, there) in self.short.items():
            advice = f"set {self.change}" if self.change else "no setting alone makes it fit: take another machine"
            raise UserError(f"{name}: needs {_gib(needed)}, and {_gib(there)} are there; {advice}")


def plan(
    recipe: Recipe | str | Path,
    overrides: Mapping[str, Any] | Iterable[str] = (),
    *,
    backbone: Backbone | None = None,
    **options: Any,
) -> Plan:
    """What a run will take.

    Args:
        backbone: one in memory, in place of the one that the recipe names.
        options: of `PlanSettings`.

    Raises:
        UserError: whatever of the recipe `train` would stop at before its first step.
    """
    recipe = load_recipe(recipe, overrides)
    settings = PlanSettings(recipe=recipe.run, **options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sketch = backbone or sketch_backbone(recipe.backbone, revision=recipe.revision)
    prepared = prepared_rows(recipe.data, sketch)
    rows, _ = prepared.parted(recipe.data.held_out, recipe.data.max_length)
    libraries = resident() if device.type == "cpu" else 0.0
    shape = _shape(recipe, sketch, rows, device, settings)
    batches = Batches(rows, recipe.batch, recipe.seed, world=settings.processes)
    steps = recipe.optim.max_steps or batches.steps(recipe.optim.epochs)
    made = Plan(
        memory=parts(shape, libraries),
        disk=_disk(shape, prepared),
        steps=steps,
        step_seconds=0.0,
        seconds=0.0,
        rows=len(rows),
        tokens=int(rows.lengths.sum()),
        room=_room(settings, recipe, device),
        facts=_facts(shape),
    )
    each = made.tokens * _epochs(batches, steps) / steps / settings.processes  # tokens of a step and process
    made.step_seconds = _seconds(shape, each)
    if settings.calibrate:
        made.step_seconds, made.measured = calibrated(recipe, backbone)
    made.seconds = min(made.steps * made.step_seconds, Schedule(recipe.optim, steps).seconds)
    made.change = _change(made, shape, rows, device, settings, libraries, prepared) if made.short else ""
    return made


def _shape(recipe: Recipe, sketch: Backbone, rows: Rows, device: torch.device, settings: PlanSettings) -> Shape:
    head = _start(recipe, recipe.start, sketch) if recipe.start else sketch_head(recipe, sketch)
    if recipe.lora.rank is not None:
        adapt(head, recipe.lora)
    depths = depths_of(recipe.loss, head)
    positions, found = _largest(recipe, rows, depths, settings.processes)
    dtype = precision_of(recipe, device) if sketch.device.type == "meta" else sketch.dtype
    return Shape(
        recipe, sketch, head, dtype, autocast_of(recipe, device), device.type, positions, found, settings.processes,
        settings.layout,
    )  # fmt: skip


def _start(recipe: Recipe, start: str, sketch: Backbone) -> DraftHead:
    """The trained head; files of some other tools can be read only beside the backbone's own weights."""
    there = None if sketch.device.type == "meta" else sketch
    try:
        return load_head(start, there)
    except BackboneNeededError:
        return load_head(start, load_backbone(recipe.backbone, revision=recipe.revision))


def _largest(recipe: Recipe, rows: Rows, depths: int, world: int) -> tuple[int, list[int]]:
    """The most positions of a forward, and the most anchors, by depth; of different forwards perhaps."""
    batches = Batches(rows, recipe.batch, recipe.seed, world=world)
    lengths, supervised = batches.lengths, rows.supervised
    most, widest, fullest = 0, 0, list[int]()
    for step in range(min(LOOKED_AT, recipe.optim.max_steps or LOOKED_AT, batches.steps(1))):
        for group in batches.groups(step):
            widest = max(widest, len(group) * int(lengths[group[0]]))
            taught = int(supervised[group].sum())
            if taught > most:
                most, fullest = taught, group
    found = anchors(collate(rows, fullest).mask, depths)
    return widest, [len(at) for at in found]


def _epochs(batches: Batches, steps: int) -> float:
    epoch, number = batches.place(steps - 1)
    return epoch + (number + 1) / len(batches.plan(epoch))


def _disk(shape: Shape, prepared: Rows) -> dict[str, float]:
    """What the run adds: the checkpoints that stay and the one being written, and the head twice, best and last."""
    recipe = shape.recipe
    state = head_bytes(shape) + moment_bytes(shape)
    made = {"checkpoints": state * (recipe.save.keep + 1), "head and best head": 2 * head_bytes(shape)}
    made["prepared rows"] = float(len(prepared.ids) * 5)
    if recipe.data.cache is not None:
        rows = prepared.trimmed(recipe.data.max_length)
        precision = str(shape.dtype).removeprefix("torch.")
        settings = {"store": stored_as(recipe.data.cache_store, precision), "width": shape.backbone.hidden_size}
        reads, groups = Reads.of(shape.head), batches_of(rows.lengths, GROUP_TOKENS)
        made["cached features"] = float(sum(size_of(rows, group, reads, settings) for group in groups))
    return made


def _room(settings: PlanSettings, recipe: Recipe, device: torch.device) -> dict[str, float]:
    import shutil

    there = free_bytes(device) + (resident() if device.type == "cpu" else 0.0)  # this process makes room for the run
    shared = settings.processes if device.type == "cpu" else math.ceil(settings.processes / torch.cuda.device_count())
    places = [recipe.run, cache_folder() if recipe.data.cache in (None, "auto") else Path(str(recipe.data.cache))]
    folders = [next(one for one in (place.absolute(), *place.absolute().parents) if one.exists()) for place in places]
    disk = min(shutil.disk_usage(folder).free for folder in folders)
    return {
        "memory": settings.memory * GIB if settings.memory else there / shared,
        "disk": settings.disk * GIB if settings.disk else float(disk),
    }


def _seconds(shape: Shape, tokens: float) -> float:
    """A step, by the products that it takes and how fast this machine makes them: a rough figure."""
    backbone = sum(one.numel() for one in shape.backbone.layers.parameters())
    head = sum(one.numel() for one in shape.head.parameters() if one.ndim > 1)
    taught = shape.anchors[0] / max(1, shape.positions)
    projected = shape.head.vocab.size * shape.backbone.hidden_size * (1 + 3 * len(shape.anchors))
    frozen = 0 if shape.recipe.data.cache is not None else backbone
    rates = {dtype: _rate(dtype, shape.device) for dtype in (shape.dtype, _product(shape))}
    seconds = 2 * tokens * frozen / rates[shape.dtype]
    return seconds + 2 * tokens * taught * (3 * head * len(shape.anchors) + projected) / rates[_product(shape)]


def _product(shape: Shape) -> torch.dtype:
    return torch.bfloat16 if shape.autocast else torch.float32


def _rate(dtype: torch.dtype, device: str, size: int = 512) -> float:
    """Floating-point operations a second of a matrix product, the middle of some; about half of it is reached."""
    one = torch.ones(size, size, dtype=dtype, device=device)
    taken = []
    for _ in range(7):
        began = time.perf_counter()
        (one @ one)[0, 0].item()
        taken.append(time.perf_counter() - began)
    return float(size**3 / sorted(taken)[3])


def _change(
    made: Plan,
    shape: Shape,
    rows: Rows,
    device: torch.device,
    settings: PlanSettings,
    libraries: float,
    prepared: Rows,
) -> str:
    """The first change by which everything fits, the mildest one first."""
    for change in _changes(shape, "memory" in made.short):
        keys = {key: value for key, value in change.items() if key != "layout"}
        recipe = load_recipe(shape.recipe, keys)
        sketch = shape.backbone
        tried = _shape(recipe, sketch, rows, device, replace(settings, layout=change.get("layout", settings.layout)))
        if "precision.backbone" in change:
            tried.dtype = precision_of(recipe, device)
        other = replace(made, memory=parts(tried, libraries), disk=_disk(tried, prepared), measured=None)
        if not other.short:
            return " ".join(
                f"--layout {value}" if key == "layout" else f"{key}={value}" for key, value in change.items()
            )
    return ""


def _changes(shape: Shape, memory: bool) -> Iterator[dict[str, Any]]:
    recipe, longest = shape.recipe, max(1, shape.positions)
    if not memory:
        yield from ({"save.keep": keep} for keep in range(recipe.save.keep - 1, 0, -1))
        if recipe.data.cache is not None:
            yield {"data.cache_store": "int8"}
            yield {"data.cache": None}
        return
    tokens: list[dict[str, Any]] = []
    limit = min(longest, recipe.batch.forward_tokens)
    while limit > 64:
        limit //= 2
        tokens.append({"batch.forward_tokens": limit})
    yield from tokens
    yield {"batch.checkpointing": True}
    yield from ({"batch.checkpointing": True, **one} for one in tokens)
    smallest = tokens[-1] if tokens else {}
    if shape.dtype == torch.float32:
        yield {"precision.backbone": "bfloat16", **smallest}
    for share in (4, 16):
        yield {"draft_vocab": max(1, shape.head.vocab.size // share), "batch.checkpointing": True, **smallest}
    if shape.processes > 1:
        yield from ({"layout": name, **smallest} for name in LAYOUTS[1:])


def _facts(shape: Shape) -> dict[str, str]:
    trained = sum(one.numel() for one in shape.head.parameters() if one.requires_grad) + round(
        adapter_bytes(shape) / 16
    )
    each = "" if shape.processes == 1 else f", on each of {shape.processes} processes ({shape.layout})"
    return {
        "method": f"{shape.recipe.method} for {shape.backbone.name}, {len(shape.anchors)} depths",
        "trainable parameters": f"{trained:,}",
        "largest forward": f"{shape.positions:,} positions, {shape.anchors[0]:,} anchors{each}",
    }


def _listed(sizes: Mapping[str, float]) -> str:
    large = [f"{name} {_gib(size)}" for name, size in sizes.items() if size >= 0.005 * GIB]
    return f"{_gib(sum(sizes.values()))}" + (f" ({', '.join(large)})" if large else "")


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def options_of(settings: PlanSettings) -> dict[str, Any]:
    """What `plan` takes besides the recipe."""
    return {name: value for name, value in asdict(settings).items() if name not in ("recipe", "overrides")}
