"""Two answers side by side: the plain one and the drafted one, in two columns."""

from __future__ import annotations

import shutil
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from .generator import Generator

GAP = " │ "


def compared(plain: Generator, drafted: Generator, prompt: Any, name: str, options: Mapping[str, Any]) -> str:
    """Answer a prompt with both; two columns, their speed, and whether the tokens are the same.

    Args:
        name: what drafts, for the title of its column.
        options: what `Generator.generate` takes; without a seed both get seed 0, so that they draw the same.
    """
    options = {"seed": 0, **options}
    for generator in (plain, drafted):
        generator.generate(prompt, **{**options, "max_new_tokens": 8})  # the first call pays for what later ones do not
    one, two = plain.generate(prompt, **options), drafted.generate(prompt, **options)
    left = f"plain: {one.stats.tokens_per_second:.1f} tokens/s"
    right = f"{name}: {two.stats.tokens_per_second:.1f} tokens/s, {two.stats.acceptance_length:.2f} tokens a round"
    verdict = "identical" if one.tokens == two.tokens else f"they part at token {_parting(one.tokens, two.tokens)}"
    if verdict != "identical" and plain.backbone.dtype != torch.float32:
        verdict += " (half precision rounds near-ties by the width of a forward: compare with --dtype float32)"
    ratio = two.stats.tokens_per_second / one.stats.tokens_per_second
    width = shutil.get_terminal_size((110, 24)).columns
    return f"{side_by_side((left, one.text), (right, two.text), width)}\n{ratio:.2f}x, {verdict}"


def _parting(one: Sequence[int], two: Sequence[int]) -> int:
    """Where two lists first differ; behind the shorter one, if the other goes on from it."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(two)))


def side_by_side(left: tuple[str, str], right: tuple[str, str], width: int = 100) -> str:
    """Two columns, each a (title, text) pair, wrapped to fit into `width` terminal cells together.

    Line breaks of the texts stay; control characters do not reach the terminal.
    """
    column = max(16, (width - len(GAP)) // 2)
    columns = [[title, "─" * column, *_wrapped(text, column)] for title, text in (left, right)]
    lines = zip_longest(*columns, fillvalue="")
    return "\n".join(f"{_padded(a, column)}{GAP}{b}".rstrip() for a, b in lines)


def _wrapped(text: str, column: int) -> list[str]:
    lines: list[str] = []
    for line in text.expandtabs(4).splitlines():
        clean = "".join(c for c in line if unicodedata.category(c)[0] != "C")
        lines += textwrap.wrap(clean, column // _widest(clean)) or [""]
    return lines


def _widest(text: str) -> int:
    """Cells of the widest character: 2 where East Asian text is in it."""
    return 2 if any(unicodedata.east_asian_width(c) in "WF" for c in text) else 1


def _padded(text: str, column: int) -> str:
    cells = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
    return text + " " * max(0, column - cells)
