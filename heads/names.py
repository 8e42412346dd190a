"""Tensor names of other layouts, as tables of templates: `("blocks.{i}.layers.{j}.{p}", "heads.{i}.{j}.linear.{p}")`.

The left side is a name in the file, the right one a name of ours. `{i}` and `{j}` stand for numbers, other letters for
any rest. A name that no line fits stays as it is, so that what is unknown is found out by whoever compares names.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from torch import Tensor

from ..errors import UserError

Table = tuple[tuple[str, str], ...]


def inward(name: str, table: Table) -> str:
    """The file's name to ours."""
    return next((found for file, own in table if (found := _fitted(name, file, own))), name)


def outward(name: str, table: Table) -> str:
    """Our name to the file's."""
    return next((found for file, own in table if (found := _fitted(name, own, file))), name)


def renamed(tensors: Mapping[str, Tensor], table: Table, *, out: bool = False) -> dict[str, Tensor]:
    """Tensors by our names, or with `out` by the file's.

    Raises:
        UserError: two of them mean the same.
    """
    found: dict[str, Tensor] = {}
    came: dict[str, str] = {}
    for name, tensor in tensors.items():
        new = outward(name, table) if out else inward(name, table)
        if new in found:
            raise UserError(f"{came[new]} and {name} are the same tensor of the head; which of them counts?")
        found[new], came[new] = tensor, name
    return found


def _fitted(name: str, before: str, after: str) -> str | None:
    match = _pattern(before).fullmatch(name)
    return after.format(**match.groupdict()) if match else None


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", template)
    numbers = [f"(?P<{part}>{'[0-9]+' if part in 'ij' else '.+'})" for part in parts[1::2]]
    return re.compile("".join(re.escape(text) + group for text, group in zip(parts[::2], [*numbers, ""], strict=True)))
