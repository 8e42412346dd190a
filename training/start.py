"""The head that a run begins with, and the adapter on its backbone: new ones, or those trained before."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import UserError
from ..heads import adapter as lora
from ..heads.backbone import Backbone
from ..heads.base import DraftHead
from ..heads.format import load_head, place_of
from ..heads.prune import revocab
from ..heads.vocab import DraftVocab
from ..settings import dump
from .batches import Rows
from .lora import adapt
from .recipe import Recipe


def first_head(recipe: Recipe, method: type[DraftHead], backbone: Backbone, rows: Rows) -> DraftHead:
    """The head of a run before its first step, in fp32 and in training mode.

    Raises:
        UserError: the head that the run is to begin with is missing, is another than the recipe describes, or has
            another vocabulary.
    """
    torch.manual_seed(recipe.seed)
    if recipe.start is not None:
        head = _warm(recipe, recipe.start, backbone, rows)
        if recipe.lora.rank is not None:
            adapt(head, recipe.lora)
        return head.train()
    vocab = None
    if recipe.draft_vocab is not None and recipe.draft_vocab != backbone.vocab_size:
        vocab = counted(rows, backbone.vocab_size, recipe.draft_vocab)
    return method.build(backbone, vocab=vocab, **recipe.head).train()


def counted(rows: Rows, vocab_size: int, size: int) -> DraftVocab:
    """The most frequent supervised tokens of all rows; it follows from these alone, whichever process counts them."""
    pairs = ((ids.astype(np.int64), mask) for ids, mask in (rows[row] for row in range(len(rows))))
    return DraftVocab.count(pairs, vocab_size, size)


def first_adapter(recipe: Recipe, backbone: Backbone, head: DraftHead) -> lora.Adapter | None:
    """The LoRA on the backbone that learns beside the head of a run, at work in it; None where it stays as it is.

    Raises:
        UserError: peft is missing, a layer is named that the backbone has not, or the head that the run begins with has
            another adapter than the recipe describes, which may be none.
    """
    wanted, known = recipe.adapter, head.config.adapter_hash
    if wanted.rank is None:
        if known:
            raise UserError(
                f"start is {recipe.start}, which was trained together with a LoRA on its backbone (Medusa-2); set "
                "adapter.rank, so that both learn on"
            )
        return None
    settings = lora.AdapterSettings(rank=wanted.rank, alpha=wanted.alpha, targets=wanted.targets)
    if known and recipe.start is not None:
        folder = place_of(recipe.start) / lora.FOLDER
        before = lora.stored(folder)
        if before != settings:
            raise UserError(f"the recipe's adapter has {settings}; the one beside {recipe.start} has {before}")
    torch.manual_seed(recipe.seed)
    made = lora.Adapter(backbone, settings)
    if known and recipe.start is not None:
        try:
            made.read(folder, known)
        except UserError:
            made.remove()
            raise
    return made


def _warm(recipe: Recipe, start: str, backbone: Backbone, rows: Rows) -> DraftHead:
    """The trained head. Its vocabulary stays as it is: its rows mean these tokens, whatever the new rows are like."""
    head = load_head(start, backbone, dtype=torch.float32, adapter=False)
    if head.method != recipe.method:
        raise UserError(f"start is {start}, of method {head.method}; the recipe trains {recipe.method}")
    config = dump(head.config)
    for name, value in recipe.head.items():
        if str(config[name]) != str(value):
            raise UserError(
                f"head.{name} is {value}; {start} has {config[name]}: leave it out, or begin with a new head"
            )
    size = recipe.draft_vocab or head.vocab.size
    if recipe.new_vocab:
        return revocab(head, counted(rows, backbone.vocab_size, size))
    if size != head.vocab.size:
        raise UserError(
            f"draft_vocab is {size}; {start} has {head.vocab.size} tokens. Leave it out to keep them, set "
            "new_vocab=true to count them anew, or prune the head first (headstart data vocab --head)"
        )
    return head
