"""A head with exactly the tensors that a file holds: nothing missing, nothing left over, nothing of another shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import UserError
from .base import DraftHead, HeadConfig
from .vocab import DraftVocab

MAPS = ("d2t", "t2d")
_TIED = 64  # parts that may share their tensors with others


def assembled(
    method: type[DraftHead],
    config: HeadConfig,
    tensors: dict[str, Tensor],
    place: str,
    spell: Callable[[str], str] = str,
) -> DraftHead:
    """A head with exactly these tensors in it.

    Args:
        tensors: by the names of the own format.
        place: the file they come from, for messages.
        spell: our name of a tensor to that of the file.

    Raises:
        UserError: they are not those of this config; names what differs.
    """
    for key in ("head_layers", "num_heads", "num_blocks"):
        if (claimed := getattr(config, key, 0)) > len(tensors) + _TIED:
            raise UserError(f"{place}: {key} is {claimed}, and the file holds {len(tensors)} tensors")
    vocab = DraftVocab(range(config.draft_vocab_size), config.vocab_size)
    if not vocab.full and all(name in tensors for name in MAPS):
        try:
            vocab = DraftVocab.from_maps(tensors["d2t"], tensors["t2d"], config.vocab_size)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
    with torch.device("meta"):  # without storage, so that what no tensor fills could not be used
        head = method(config, vocab)
    expected = {outside(name): tensor for name, tensor in head.state_dict().items()}
    _compare(expected, tensors, place, method.method, spell)
    broken = next((n for n, one in tensors.items() if one.is_floating_point() and not one.isfinite().all()), None)
    if broken is not None:
        raise UserError(f"{place}: {spell(broken)} holds numbers that are none (NaN or infinity); train the head again")
    head.load_state_dict({_inside(name): tensor for name, tensor in tensors.items()}, strict=True, assign=True)
    return head


def outside(name: str) -> str:
    """A tensor's name in the file: the map stands at the top, as in the EAGLE-3 layout."""
    return name.removeprefix("vocab.")


def some(names: list[str]) -> str:
    """The first few names."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "nothing"


def _compare(
    expected: dict[str, Tensor], found: dict[str, Tensor], place: str, method: str, spell: Callable[[str], str]
) -> None:
    """Refuse tensors that are missing, left over, or of another shape or kind."""
    faults = []
    if missing := sorted(expected.keys() - found.keys()):
        faults.append(f"missing: {some([spell(name) for name in missing])}")
    if extra := sorted(found.keys() - expected.keys()):
        faults.append(f"not part of it: {some([spell(name) for name in extra])}")
    for name in sorted(expected.keys() & found.keys()):
        wanted, given = _kind(expected[name]), _kind(found[name])
        if wanted != given:
            faults.append(f"{spell(name)} is {given}, expected {wanted}")
    if faults:
        raise UserError(f"{place}: does not hold the {method} head of its config.json; " + "; ".join(faults[:6]))


def _inside(name: str) -> str:
    return f"vocab.{name}" if name in MAPS else name


def _kind(tensor: Tensor) -> str:
    plain = tensor.is_floating_point() and tensor.element_size() > 1  # eight bits mean nothing without their scales
    kind = "float" if plain else str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {tuple(tensor.shape)}"
