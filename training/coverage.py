"""How much of the supervised tokens a draft vocabulary covers, by its size; and a trained head pruned to such a one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..heads.base import DraftHead
from ..heads.prune import prune
from ..heads.vocab import DraftVocab
from .batches import Rows
from .recipe import DataSettings
from .rows import prepared_rows


@dataclass
class VocabSettings:
    """Which rows are counted, and what for."""

    input: list[str] = field(default_factory=lambda: ["shipped"])
    """Files of chats, `shipped` for the conversations that come with headstart, or one folder made by data prepare."""
    max_length: int = 1024
    """Tokens of a row; what lies behind them is not counted."""
    held_out: float = 0.02
    """Share of the conversations that is not counted, but measured on; the same ones as in training."""
    sizes: list[int] = field(default_factory=list)
    """Sizes to tell the coverage of; without any, 1,024 and its doubles."""
    head: str | None = None
    """A trained head to prune: the folder of a head or of its run, or a Hub id."""
    keep: int | None = None
    """Tokens that the pruned head keeps: those of its own that occur most."""
    out: Path | None = None
    """Folder of the pruned head."""

    def __post_init__(self) -> None:
        given = [one is not None for one in (self.head, self.keep, self.out)]
        if any(given) and not all(given):
            raise UserError("--head, --keep and --out belong together: which head, how many tokens, and where to")
        wrong = [size for size in self.sizes if size < 1]
        if wrong:
            raise UserError(f"--sizes has {wrong[0]}; expected numbers of 1 or more")
        if self.keep is not None and self.keep < 1:
            raise UserError(f"--keep is {self.keep}; expected a number of 1 or more")


@dataclass
class Coverage:
    """What was counted."""

    train: Tensor
    """(V,) how often each token is supervised in the rows trained on."""
    held_out: Tensor
    """(V,) in those held out."""

    @classmethod
    def of(cls, settings: VocabSettings, tokenizer: Any) -> Coverage:
        """Count the rows that training would count.

        Args:
            tokenizer: of the backbone; V is one more than its highest id.
        """
        data = DataSettings(train=settings.input, max_length=settings.max_length, held_out=settings.held_out)
        prepared = prepared_rows(data, tokenizer)
        vocab_size = max(tokenizer.get_vocab().values()) + 1  # ids may have gaps
        return cls(*(_counts(rows, vocab_size) for rows in prepared.parted(data.held_out, data.max_length)))

    def vocab(self, size: int) -> DraftVocab:
        """The draft vocabulary of this size, as training counts it."""
        return DraftVocab.frequent(self.train, size)

    def shares(self, size: int) -> tuple[float, float]:
        """Shares of the supervised tokens, trained on and held out, that a vocabulary of this size covers; nan: of
        none."""
        ids = self.vocab(size).ids
        train, held_out = (float(counts[ids].sum() / counts.sum()) for counts in (self.train, self.held_out))
        return train, held_out

    def pruned(self, head: DraftHead, keep: int) -> DraftHead:
        """The head with the `keep` of its tokens that are supervised most.

        Raises:
            UserError: it has fewer.
        """
        if keep > head.vocab.size:
            raise UserError(f"--keep is {keep}; the head proposes {head.vocab.size} tokens")
        counts = self.train.new_zeros(head.vocab.vocab_size)  # the backbone may have rows that no token is for
        known = min(len(counts), len(self.train))
        counts[:known] = self.train[:known]
        chosen = DraftVocab.frequent(counts[head.vocab.ids], keep).ids  # draft ids of the head
        return prune(head, DraftVocab(head.vocab.ids[chosen], head.vocab.vocab_size))

    def table(self, sizes: list[int]) -> str:
        """The shares, a line a size; that of all tokens comes last.

        Raises:
            UserError: a size is larger.
        """
        seen, whole = int((self.train > 0).sum()), len(self.train)
        if max(sizes, default=0) > whole:
            raise UserError(f"--sizes has {max(sizes)}; the tokenizer has {whole} tokens")
        lines = [
            f"{int(self.train.sum()):,} supervised tokens trained on, {seen:,} of {whole:,} different ones;",
            f"{int(self.held_out.sum()):,} held out",
            "",
            f"{'draft_vocab':>11}  trained on  held out",
        ]
        doubles = [1024 << i for i in range(12)]
        for size in sorted({*(sizes or [size for size in doubles if size < whole]), whole}):
            train, held_out = (f"{100 * share:.2f}%" if share == share else "-" for share in self.shares(size))
            lines.append(f"{size:>11,}  {train:>10}  {held_out:>8}")
        return "\n".join(lines)


def _counts(rows: Rows, vocab_size: int) -> Tensor:
    """(V,) how often each token is supervised."""
    pieces = [ids[mask] for ids, mask in (rows[row] for row in range(len(rows)))]
    tokens = torch.from_numpy(np.concatenate([*pieces, np.empty(0)]).astype(np.int64))
    return torch.bincount(tokens, minlength=vocab_size)
