"""Everything that a recipe names, loaded and checked: backbone, rows, head, objective, optimizer.

The training room loads by name itself, because device and order of loading belong to the run: the accelerator comes
first, then the backbone on its device, then rows by its tokenizer, and the head last.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import nn

from ..data.feature_key import Reads
from ..data.features import FeatureCache
from ..errors import UserError, nearest
from ..heads.backbone import Backbone
from ..heads.base import DraftHead
from ..heads.forms import weights_hash
from ..heads.layer import LayerConfig
from ..heads.load import load_backbone
from ..heads.methods import METHODS, TRAINABLE
from ..heads.vocab import DraftVocab
from ..inference.tree import Auto, parse_shape
from ..settings import build
from .batches import Batches, Rows
from .cached import features_of
from .distilled import Distilled
from .layout import Layout
from .objective import Objective, depths_of
from .optimizer import build_optimizer
from .processes import in_step, in_turns, layout_of, meet, same_on_all
from .recipe import Recipe
from .rows import prepared_rows, template_of
from .schedule import Schedule
from .start import first_adapter, first_head, trained_head


@dataclass
class Setup:
    """A run, ready to start."""

    recipe: Recipe
    accelerator: Any
    layout: Layout
    backbone: Backbone
    rows: Rows
    """Trained on."""
    held_out: Rows
    dropped: int
    """Rows with nothing supervised within max_length."""
    head: DraftHead
    objective: Objective
    optimizer: Any
    """As the layout made it."""
    batches: Batches
    schedule: Schedule

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained."""
        return [one for one in self.objective.parameters() if one.requires_grad]

    def facts(self) -> dict[str, Any]:
        """What a checkpoint depends on besides the recipe, by the words a message uses."""
        cache = self.rows.cache
        with self.objective.original():
            weights = self.backbone.fingerprint()
        return {
            **({"the cached features": cache.identity()} if cache else {}),
            "the backbone's weights": weights,
            "the rows trained on": self.rows.hash(),
        }


def keep_few_products() -> None:
    """Cap what torch keeps of a CPU's compiled products: one for each shape it meets, 1,024 in either of two caches.

    A step's shapes hardly ever come back, so that memory grew by 80 MB a step, to gigabytes. Read at the first product.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "16")


def set_up(recipe: Recipe, backbone: Backbone | None = None) -> Setup:
    """Load what the recipe names.

    Args:
        backbone: one in memory, as it is; None: the one that the recipe names.

    Raises:
        UserError: a name, file or value is wrong, or the parts do not fit together.
    """
    keep_few_products()
    method = _method(recipe)
    wanted = recipe.evaluate.tree  # said now, and not behind the last step
    if wanted is not None and isinstance(parse_shape(wanted), Auto):
        raise UserError("evaluate.tree is auto, which follows the machine and its load; give a fixed form")
    accelerator = _accelerator(recipe)
    layout = layout_of(accelerator)
    layout.check(recipe)
    dtype = precision_of(recipe, accelerator.device)
    backbone = backbone or layout.load(lambda device: _backbone(recipe, device, dtype))
    # while each process has all of them
    weights = weights_hash(backbone.model) if recipe.data.cache is not None else ""
    backbone.model.requires_grad_(False)
    layout.shard(backbone)
    trained = trained_head(recipe, backbone)
    # whatever does not fit is said before rows are prepared, and features computed
    depths_of(recipe.loss, trained or sketch_head(recipe, backbone))
    prepared = in_turns(accelerator, lambda: prepared_rows(recipe.data, backbone))
    rows, held_out = prepared.parted(recipe.data.held_out, recipe.data.max_length)
    batches = Batches(rows, recipe.batch, recipe.seed, rank=accelerator.process_index, world=accelerator.num_processes)
    head = first_head(recipe, method, backbone, rows, trained)
    _check_depths(head, rows)
    head.config.template_hash = template_of(recipe.data) or head.config.template_hash
    if recipe.data.cache is not None:
        reads, together = Reads.of(head), partial(in_step, layout, backbone)
        rows.cache = held_out.cache = features_of(
            recipe.data, backbone, weights, reads, prepared, accelerator, together=together
        )
    if isinstance(head.config, LayerConfig):
        head.config.trained_positions = max(recipe.data.max_length, head.config.trained_positions or 0)
    head.checkpointing = recipe.batch.checkpointing
    autocast, beside = autocast_of(recipe, accelerator.device), first_adapter(recipe, backbone, head)
    objective = Objective(head, recipe.loss, autocast=autocast)
    if beside is not None:
        objective = Distilled(head, recipe.loss, beside, recipe.adapter.heads, autocast=autocast)
    matrices = [] if beside is None else beside.parameters()
    layout.wrap(objective, build_optimizer(head, recipe.optim, matrices, recipe.adapter.lr_share), recipe.optim.clip)
    setup = Setup(
        recipe=recipe,
        accelerator=accelerator,
        layout=layout,
        backbone=backbone,
        rows=rows,
        held_out=held_out,
        dropped=len(prepared) - len(rows) - len(held_out),
        head=head,
        objective=objective,
        optimizer=layout.optimizer,
        batches=batches,
        schedule=Schedule(recipe.optim, recipe.optim.max_steps or batches.steps(recipe.optim.epochs)),
    )
    same_on_all(accelerator, setup.facts())
    return setup


def _method(recipe: Recipe) -> type[DraftHead]:
    """The method's class; an unknown one, or an unknown field of it, is said before anything is loaded."""
    if recipe.method not in METHODS:
        hint = _hint(recipe.method, METHODS)
        raise UserError(f"method is {recipe.method!r}; choose one of {', '.join(METHODS)}{hint}")
    method = METHODS[recipe.method]
    if not method.trainable:
        raise UserError(
            f"method is {recipe.method}, which is for decoding only; what can be trained: {', '.join(TRAINABLE)}"
        )
    known = [one.name for one in fields(method.config_class)]
    for name in recipe.head:
        if name == "draft_vocab_size":
            raise UserError(f"head.{name}: the draft vocabulary is counted from the rows; set draft_vocab instead")
        if name not in known:
            hint = _hint(name, known)
            raise UserError(f"unknown setting head.{name}: {recipe.method} has {', '.join(known)}{hint}")
    return method


def _check_depths(head: DraftHead, rows: Rows) -> None:
    """Refuse heads side by side of which the last ones would stay as they begin."""
    if head.max_depth is not None and rows.longest <= head.max_depth:
        raise UserError(
            f"the {head.method} head has {head.max_depth} depths, and the longest reply that is trained on has "
            f"{rows.longest} tokens: from depth {rows.longest - 1} on nothing would be learned. Set head.num_heads to "
            f"{rows.longest - 1} or less, or train on longer replies (data.max_length cuts them, too)"
        )


def _hint(name: str, known: Iterable[str]) -> str:
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def _accelerator(recipe: Recipe) -> Any:
    from accelerate import Accelerator

    meet()
    asked = recipe.log.trackers
    try:
        accelerator = Accelerator(mixed_precision="no", log_with=asked or None, project_dir=str(recipe.run))
    except ValueError as error:  # a name that accelerate does not know
        raise UserError(f"log.trackers is {asked}: {error}") from None
    missing = [name for name in asked if name not in map(str, accelerator.log_with)]
    if missing:
        raise UserError(f"log.trackers names {missing[0]}, which is not installed: pip install {missing[0]}")
    return accelerator


def _fast_bf16(device: torch.device) -> bool:
    """Does this device multiply bf16 faster than fp32?"""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    tests = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, test, lambda: False)() for test in tests)


def precision_of(recipe: Recipe, device: torch.device) -> torch.dtype:
    """Of the backbone."""
    name = recipe.precision.backbone
    found = getattr(torch, ("bfloat16" if _fast_bf16(device) else "float32") if name == "auto" else name)
    assert isinstance(found, torch.dtype), f"torch has no dtype {name}"
    return found


def autocast_of(recipe: Recipe, device: torch.device) -> bool:
    """Do the head's matrix products run in bf16?"""
    wanted = recipe.precision.autocast
    return _fast_bf16(device) if wanted == "auto" else wanted == "bf16"


def _backbone(recipe: Recipe, device: torch.device | None, dtype: torch.dtype) -> Backbone:
    backbone = load_backbone(
        recipe.backbone, dtype=dtype, device=device, revision=recipe.revision, device_map=recipe.device_map
    )
    backbone.packs = False  # measuring a few answers is not worth the memory of a second copy
    return backbone


def sketch_head(recipe: Recipe, backbone: Backbone) -> DraftHead:
    """The head of a recipe by its shape alone, on the meta device; its draft vocabulary is not counted yet.

    Raises:
        UserError: the recipe describes none.
    """
    method, size = _method(recipe), recipe.draft_vocab or backbone.vocab_size
    if size > backbone.vocab_size:
        raise UserError(f"draft_vocab is {size}; {backbone.name} has {backbone.vocab_size} tokens")
    fields = {**method.config_class.facts(backbone), **recipe.head, "draft_vocab_size": size}
    config = build(method.config_class, fields, "head.{}".format)
    vocab = DraftVocab(None if size == backbone.vocab_size else range(size), backbone.vocab_size)
    with torch.device("meta"):
        return method(config, vocab)


def cache_features(
    recipe: Recipe, backbone: Backbone | None = None, *, also: Sequence[Recipe] = (), restart: bool = False
) -> FeatureCache:
    """Make the features that a recipe trains on, or check every byte of those that are there; nothing is trained.

    Args:
        also: further recipes, for the same rows, whose heads are to find what they read there, too.

    Raises:
        UserError: as `set_up` does; the features would not fit on the disk, or another process is at work on them.
    """
    for one in (recipe, *also):
        _method(one)  # said before anything is loaded
    accelerator = _accelerator(recipe)
    backbone = backbone or _backbone(recipe, accelerator.device, precision_of(recipe, accelerator.device))
    prepared = in_turns(accelerator, lambda: prepared_rows(recipe.data, backbone))
    reads = Reads.all([Reads.of(sketch_head(one, backbone)) for one in (recipe, *also)])
    weights = weights_hash(backbone.model)
    return features_of(recipe.data, backbone, weights, reads, prepared, accelerator, restart=restart, thorough=True)
