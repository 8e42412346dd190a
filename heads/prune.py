"""A trained head with another draft vocabulary: fewer tokens, exactly as they were, or others.

Letters: Vd draft vocabulary, V vocabulary of the backbone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..errors import UserError
from .base import DraftHead, HeadConfig
from .vocab import DraftVocab


def prune(head: DraftHead, vocab: DraftVocab) -> DraftHead:
    """The head with some of its tokens alone: their rows of each projection, and all else, bit for bit.

    Args:
        head: bound to a backbone or not; stays as it is.
        vocab: tokens that the head can propose.

    Raises:
        UserError: one of them is not among those of the head.
    """
    known = head.vocab.to_draft(vocab.ids.to(_device(head)))  # (Vd,)
    missing = (known < 0).nonzero().flatten()
    if len(missing):
        token = int(vocab.ids[int(missing[0])])
        raise UserError(
            f"token {token} is not among the {head.vocab.size} that the head can propose: nothing was learned for it"
        )
    return revocab(head, vocab)


def revocab(head: DraftHead, vocab: DraftVocab) -> DraftHead:
    """The head with this draft vocabulary: tokens it knows keep their rows, others begin as the backbone's do.

    Args:
        head: bound to a backbone, if there are tokens it does not know; stays as it is.
        vocab: of the same backbone.

    Raises:
        UserError: the vocabulary is of another size than the backbone's.
    """
    if vocab.vocab_size != head.config.vocab_size:
        raise UserError(
            f"the vocabulary is one of {vocab.vocab_size} tokens; the head's is of {head.config.vocab_size}"
        )
    weights, first = head.state_dict(), next(head.parameters())
    made = type(head)(_sized(head.config, vocab.size), vocab).to(device=first.device, dtype=first.dtype)
    known = head.vocab.to_draft(vocab.ids.to(first.device))  # (Vd,)
    kept = known >= 0
    if head._backbone is not None:
        made.bind(head.backbone)
    if not kept.all():
        with torch.no_grad():
            made.seed()
    by_token, own = _by_token(head), made.state_dict()
    for name, old in weights.items():
        if name in by_token:
            own[name][kept] = old[known[kept]]
        elif not name.startswith("vocab."):
            own[name] = old
    made.load_state_dict(own)
    for name, weight in made.named_parameters():
        weight.requires_grad_(head.get_parameter(name).requires_grad)
    return made.train(head.training)


def _by_token(head: DraftHead) -> set[str]:
    """Names of the tensors that have a row for each token of the draft vocabulary."""
    vocab = DraftVocab([0], head.config.vocab_size)
    with torch.device("meta"):  # shapes alone
        other = type(head)(_sized(head.config, 1), vocab).state_dict()
    return {
        name
        for name, tensor in head.state_dict().items()
        if not name.startswith("vocab.") and _rows(tensor) != _rows(other[name])
    }


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 0


def _sized(config: HeadConfig, size: int) -> HeadConfig:
    return replace(config, draft_vocab_size=size)


def _device(head: DraftHead) -> torch.device:
    return next(head.parameters()).device
