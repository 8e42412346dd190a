"""Hidden states, kept while a forward runs: hooks on decoder layers that are there for just as long.

The hooks of one `Tapping` are the same each time, and stand under the same number, so that a compiled graph that was
made with them still fits.

Letters: B rows, T positions, H hidden width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_numbers = itertools.count(-1, -1)  # torch counts its own hooks from 0


class Tapping:
    """Keeps these hidden states of a forward inside its `with` block; `taken` has them.

    Args:
        layers: of the decoder.
        taps: numbers of hidden states: 0 is what goes into the first layer, k what comes out of layer k - 1.
        stream: which of several states a layer hands on side by side, (streams, B, T, H), where it does (AltUp).
    """

    def __init__(self, layers: nn.ModuleList, taps: Sequence[int], stream: int = 0) -> None:
        self.stream, states = stream, list(dict.fromkeys(taps))
        self.kept: list[Tensor | None] = [None] * len(states)
        self._places = [states.index(k) for k in taps]
        self._number, self._hooks = next(_numbers), list[tuple[nn.Module, bool, Any]]()
        for place, k in enumerate(states):
            assert 0 <= k <= len(layers), f"hidden state {k} of a model with {len(layers)} layers"
            hook = self._input(place) if k == 0 else self._output(place)
            self._hooks.append((layers[max(0, k - 1)], k == 0, hook))

    def __enter__(self) -> Tapping:
        for layer, before, hook in self._hooks:
            if before:
                layer._forward_pre_hooks[self._number] = hook
                layer._forward_pre_hooks_with_kwargs[self._number] = True
            else:
                layer._forward_hooks[self._number] = hook
        return self

    def __exit__(self, *error: Any) -> None:
        for layer, *_ in self._hooks:
            for registered in (layer._forward_pre_hooks, layer._forward_pre_hooks_with_kwargs, layer._forward_hooks):
                registered.pop(self._number, None)

    def taken(self, device: torch.device) -> Tensor | None:
        """(B, T, taps * H) those of the last forward, side by side; None if there are no taps."""
        if not self.kept:
            return None
        states = []
        for place, kept in enumerate(self.kept):
            assert kept is not None, "a layer was not run"
            states.append((kept[self.stream] if kept.ndim == 4 else kept).to(device))
            self.kept[place] = None
        return torch.cat([states[place] for place in self._places], -1)

    def _input(self, place: int) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            self.kept[place] = arguments[0] if arguments else keywords["hidden_states"]

        return hook

    def _output(self, place: int) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            self.kept[place] = output[0] if isinstance(output, tuple) else output

        return hook
