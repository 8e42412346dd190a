"""Text as it comes: tokens to pieces of text that add up to the text of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_WINDOW = 48  # tokens decoded again for each token, about
_UNFINISHED = "\ufffd"  # what decoding shows for the first bytes of a character


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of the tokens, special ones left out and spaces untouched; empty without a tokenizer.

    Where bytes make no character, it is what a `Detokenizer` shows of them, so that streams and whole outputs agree.
    """
    text = _decode(tokenizer, tokens)
    if _UNFINISHED not in text:
        return text
    stream = Detokenizer(tokenizer)
    return stream.push(tokens) + stream.finish()


class Detokenizer:
    """Turns tokens into text as they come, a character being held back until its last byte is there.

    What is decoded again for each token is a window behind a place where the text was known to be whole, so that the
    cost does not grow with the output.

    Tokenizers that write rare characters as bytes read a run of bytes as a whole, and one broken character among them
    would take back those before it. What was shown stays: the run is read anew from the last place where it was whole.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.window: list[int] = []
        self.shown = ""  # text of the window that was handed out
        self.whole = 0  # tokens of the window when its text was last whole

    def push(self, tokens: Sequence[int]) -> str:
        """The new text that these tokens make certain; it does not depend on how they were grouped."""
        return "".join(map(self._push, tokens))

    def finish(self) -> str:
        """What was held back to the end: bytes that never became a character."""
        text = _decode(self.tokenizer, self.window)
        if not text.startswith(self.shown):
            text = self._restart()
        return text[len(self.shown) :]

    def _push(self, token: int) -> str:
        self.window.append(token)
        text = _decode(self.tokenizer, self.window)
        whole = not text.endswith(_UNFINISHED)
        if whole and not text.startswith(self.shown):
            text = self._restart()
        certain = text.rstrip(_UNFINISHED)
        if not certain.startswith(self.shown):
            return ""
        piece, self.shown = certain[len(self.shown) :], certain
        if whole:
            self._shift()
        return piece

    def _restart(self) -> str:
        """Leave all that was shown behind; returns the text of the window that is left."""
        self.window, self.whole, self.shown = self.window[self.whole :], 0, ""
        return _decode(self.tokenizer, self.window)

    def _shift(self) -> None:
        """The text is whole here: start a long window at the last such place, if it reads the same from there."""
        if len(self.window) > _WINDOW and self.whole:
            rest = self.window[self.whole :]
            text = _decode(self.tokenizer, rest)
            if text and self.shown.endswith(text):
                self.window, self.shown = rest, text
        self.whole = len(self.window)


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    if tokenizer is None:
        return ""
    text = tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str), "decode gave no text"
    return text
