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


def trained_head(recipe: Recipe, backbone: Backbone) -> DraftHead | None:
    """The head that a run is to begin with, in fp32, as it was trained; None: a new one.

    Raises:
        UserError: it is missing, is another than the recipe describes, or has another vocabulary.
    """
    if recipe.start is None:
        return None
    head = load_head(recipe.start, backbone, dtype=torch.float32, adapter=False)
    if head.method != recipe.method:
        raise UserError(f"start is {recipe.start}, of method {head.method}; the recipe trains {recipe.method}")
    config = dump(head.config)
    for name, value in recipe.head.items():
        if str(config[name]) != str(value):
            raise UserError(
                f"head.{name} is {value}; {recipe.start} has {config[name]}: leave it out, or begin with a new head"
            )
    if not recipe.new_vocab and recipe.draft_vocab not in (None, head.vocab.size):
        raise UserError(
            f"draft_vocab is {recipe.draft_vocab}; {recipe.start} has {head.vocab.size} tokens. Leave it out to keep "
            "them, set new_vocab=true to count them anew, or prune the head first (headstart data vocab --head)"
        )
    return head


def first_head(
    recipe: Recipe, method: type[DraftHead], backbone: Backbone, rows: Rows, trained: DraftHead | None
) -> DraftHead:
    """The head of a run before its first step, in fp32 and in training mode.

    Args:
        trained: what it begins with. Its vocabulary stays as it is, since its rows mean these tokens, whatever the new
            rows are like; unless the recipe asks for another.
    """
    torch.manual_seed(recipe.seed)
    if trained is not None:
        head = trained
        if recipe.new_vocab:
            size = recipe.draft_vocab or head.vocab.size
            head = revocab(head, counted(rows, backbone.vocab_size, size))
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
