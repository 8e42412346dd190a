"""A draft model with a tokenizer of its own: true tokens to text to its tokens, and its drafts back.

The text goes over, not the ids. What was read before stays in the draft model's cache as far as the new text is
tokenised in the same way. Drafts are read together with the last true tokens, so that spaces and merges at the junction
fall as they would in a text; where none falls on it, or a character is not complete, less is drafted, or nothing.

"Ours" are the tokens of the backbone, "theirs" those of the draft model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..heads.backbone import Backbone, Features
from .draft_model import DraftModel
from .tree import Tree

_WINDOW = 64  # tokens of ours that are always translated anew
_TAIL = 8  # true tokens read together with the drafts
_BROKEN = "\ufffd"  # what decoding shows of an incomplete character


class Translation:
    """One text in the tokens of both.

    Args:
        ours, theirs: the two tokenizers.
    """

    def __init__(self, ours: Any, theirs: Any) -> None:
        self.ours, self.theirs = ours, theirs
        self.done = 0  # tokens of ours that were translated for good
        self.settled = _opening(theirs)  # theirs for those
        self.patience = 2 * _WINDOW

    def there(self, text: Sequence[int]) -> list[int] | None:
        """Our tokens, all of the text, as theirs; None where the text ends within a character."""
        if self.done == 0 and self.settled and text[0] == self.ours.bos_token_id:
            self.done = 1  # they open texts in their own way
        words = _decode(self.ours, text[self.done :])
        if words.endswith(_BROKEN):
            return None
        found = [*self.settled, *_encode(self.theirs, words)]
        if len(text) - self.done > self.patience:
            self._settle(text, words)
        return found

    def back(self, known: Sequence[int], drafts: Sequence[int], text: Sequence[int]) -> list[int]:
        """Their drafts behind `known` as tokens of ours behind the text."""
        tail = list(known[-_TAIL:])
        before, after = _decode(self.theirs, tail), _decode(self.theirs, [*tail, *drafts])
        new = after[len(before) :].rstrip(_BROKEN)
        if not after.startswith(before) or not new:
            return []
        end = list(text[-_TAIL:])
        said = _decode(self.ours, end)
        whole = _encode(self.ours, said + new)
        if whole[: len(end)] == end:
            return whole[len(end) :]
        alone = _encode(self.ours, new)
        return alone if _decode(self.ours, [*end, *alone]) == said + new else []

    def _settle(self, text: Sequence[int], words: str) -> None:
        """Leave the older part of the text behind, cut where both parts read and translate as the whole does."""
        last = len(text) - _WINDOW
        whole = _encode(self.theirs, words)
        for cut in range(last, max(last - 16, self.done), -1):
            one, other = _decode(self.ours, text[self.done : cut]), _decode(self.ours, text[cut:])
            front = _encode(self.theirs, one)
            if one + other == words and front + _encode(self.theirs, other) == whole:
                self.settled, self.done, self.patience = [*self.settled, *front], cut, 2 * _WINDOW
                return
        self.patience *= 2  # such tokenizers are asked less and less often


class TranslatedDrafter:
    """Drafts chains with a model that has other tokens than the backbone.

    Args:
        backbone: what is drafted for; it and the draft model both have a tokenizer.
        depth: drafted tokens a round, at most, in the backbone's tokens.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, backbone: Backbone, model: DraftModel, depth: int) -> None:
        self.model, self.depth = model, depth
        self.tokenizers = backbone.tokenizer, model.backbone.tokenizer
        self.vocab_size, self.ends = backbone.vocab_size, backbone.eos_token_ids

    def start(self, prompt: Sequence[int]) -> None:
        self.text = [prompt[0]]
        self.translation, self.known = Translation(*self.tokenizers), self.model.start()

    def advance(self, features: Features | None, next_ids: Sequence[int]) -> None:
        """The text goes on with `next_ids`; features are not looked at."""
        self.text += next_ids

    def draft(self, budget: int) -> Tree:
        depth = min(self.depth, budget)
        theirs = self.translation.there(self.text) if depth > 0 else None
        drafts = self._drafts(theirs, depth) if theirs else []
        return Tree.chain([self.text[-1], *drafts])

    def _drafts(self, theirs: list[int], depth: int) -> list[int]:
        """At most `depth` tokens of ours."""
        guesses, found = list[int](), list[int]()
        ended = False
        for guess in self.model.chain(self.known, theirs, min(2 * depth, self.model.room(theirs))):
            if guess in self.model.backbone.eos_token_ids:
                ended = True
                break
            guesses.append(guess)
            found = self.translation.back(theirs, guesses, self.text)
            if len(found) > depth:  # the last may still grow with the next guess
                break
        if ended and self.ends:
            found.append(min(self.ends))
        wrong = next((place for place, token in enumerate(found) if token >= self.vocab_size), len(found))
        return found[: min(depth, wrong)]


def _opening(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text."""
    bos = getattr(tokenizer, "bos_token_id", None)
    ids = list(tokenizer("a")["input_ids"])
    return ids[:1] if bos is not None and ids[:1] == [bos] else []


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str), "decode gave no text"
    return text
