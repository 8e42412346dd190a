"""A draft model with another tokenizer: its drafts come back as the backbone's tokens, or not at all."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Backbone
from headstart.heads.base import Step
from headstart.inference.draft_model import DraftModel
from headstart.inference.generator import Generator
from headstart.inference.translate import TranslatedDrafter, Translation

TEXT = (
    "the red sun and the blue moon; über den Wölken 日本語 🙂 naïve café, the red sun goes down, the moon comes up.\n"
)
NO_END = {"eos_token_id": -1}


@functools.cache
def bpe(size: int, metaspace: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level with merges, or like SentencePiece: spaces as signs, one before the text, rare characters as bytes."""
    special = ["<end>", "<begin>"]
    raw = Tokenizer(models.BPE(byte_fallback=metaspace, unk_token="<unk>" if metaspace else None))
    if metaspace:
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        raw.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special += ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, limit_alphabet=30)
    else:
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    raw.train_from_iterator([TEXT] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", bos_token="<begin>")


TOKENIZERS = {"bytes": lambda: bpe(258), "merges": lambda: bpe(330), "signs": lambda: bpe(340, True)}


@functools.cache
def model(which: str, seed: int = 0) -> Backbone:
    tokenizer = TOKENIZERS[which]()
    return Backbone(zoo.model(seed=seed, vocab_size=len(tokenizer) + 3, max_position_embeddings=512), tokenizer, which)


def ids_of(which: str, text: str) -> list[int]:
    return list(TOKENIZERS[which]()(text, add_special_tokens=False)["input_ids"])


PAIRS = [(a, b) for a in TOKENIZERS for b in TOKENIZERS if a != b]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_answers_are_those_of_plain_decoding(ours: str, theirs: str) -> None:
    """Random tokens are no text: broken characters, merges that no text has, special tokens in the middle."""
    backbone = model(ours)
    drafted = Generator(backbone, model(theirs, seed=3), tree="chain:3")
    for options in ({}, {"temperature": 1.0, "seed": 5}):
        for prompt in ([7], ids_of(ours, TEXT)[:30], [0, 1, 0, 1]):
            for limit in (14,):
                wanted = Generator(backbone).generate(prompt, max_new_tokens=limit, **options, **NO_END)
                found = drafted.generate(prompt, max_new_tokens=limit, **options, **NO_END)
                assert found.tokens == wanted.tokens


class Knowing(DraftModel):
    """Guesses how a given text goes on behind what it was given, as its own tokenizer writes that."""

    def __init__(self, backbone: Backbone, text: str) -> None:
        super().__init__(backbone, backbone.vocab_size)
        self.answer, self.plan = text, list[int]()

    def read(self, known: Any, text: Any) -> Step:
        super().read(known, text)
        said = self.backbone.tokenizer.decode(list(text)).removeprefix("<begin>")
        assert self.answer.startswith(said), "the text goes over as it is"
        self.plan = [*self._written(self.answer[len(said) :]), 0]
        return self._told()

    def step(self, known: Any, ids: torch.Tensor, parents: torch.Tensor) -> Step:
        super().step(known, ids, parents)
        return self._told()

    def _written(self, rest: str) -> list[int]:
        """The tokens of a text that goes on in the middle, without the space that some put before a text."""
        tokenizer = self.backbone.tokenizer
        for letter in "auomkwde":  # one that does not merge with what follows
            with_more = list(tokenizer(letter + rest, add_special_tokens=False)["input_ids"])
            for k in (1, 2):
                if tokenizer.decode(with_more[:k]) == letter:
                    return with_more[k:]
        raise AssertionError(f"{rest!r} cannot be written behind any letter")

    def _told(self) -> Step:
        logits = torch.zeros(1, 1, self.vocab.size)
        logits[..., self.plan.pop(0) if self.plan else 0] = 9.0
        return Step(logits, None)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@torch.inference_mode()
def test_drafts_of_a_knowing_model_are_the_true_tokens(ours: str, theirs: str) -> None:
    """The drafted text is how the true one goes on, and its tokens are the true ones up to the last, cut-off word."""
    text, tokenizer = ids_of(ours, TEXT), TOKENIZERS[ours]()
    drafter = TranslatedDrafter(model(ours), Knowing(model(theirs), TEXT), 4)
    drafted = whole = 0
    drafter.start(text[:1])
    for at in range(1, len(text) - 6):
        tree = drafter.draft(4)
        tree.check(text[at - 1], model(ours).vocab_size, 4)
        guess = list(tree.tokens[1:])
        words = tokenizer.decode([*text[:at], *guess]).rstrip("\ufffd")
        assert TEXT.startswith(words), "the text of the drafts is the true one"
        sign = ids_of(ours, "\ufffd")[-2:]  # what stands for a broken character is no text to draft
        assert all(guess[place : place + len(sign)] != sign for place in range(len(guess)))
        marks = [place for place, token in enumerate(tokenizer.convert_ids_to_tokens(guess)) if token[0] in "Ġ▁"]
        complete = marks[-1] if marks else 0
        assert guess[:complete] == text[at : at + complete]
        drafted, whole = drafted + len(guess), whole + complete
        drafter.advance(None, [text[at]])
    assert drafted > len(text) / 2
    assert whole > 0


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@torch.inference_mode()
def test_the_cache_is_that_of_the_translated_text(ours: str, theirs: str) -> None:
    generator, text = random.Random(1), ids_of(ours, TEXT * 2)
    draft_model = model(theirs)
    drafter = TranslatedDrafter(model(ours), DraftModel(draft_model, draft_model.vocab_size), 3)
    drafter.start(text[:1])
    at, compared = 1, 0
    while at < len(text):
        run = text[at : at + generator.randint(1, 4)]
        drafter.advance(None, run)
        at += len(run)
        drafter.draft(3)
        known, fresh = drafter.known, draft_model.new_cache()
        if drafter.translation.there(drafter.text) is None:
            continue  # within a character: nothing was read
        assert known.ids == drafter.translation.there(drafter.text)
        draft_model.forward(torch.tensor([known.ids]), cache=fresh)
        for mine, true in zip(known.cache.keys, fresh.keys, strict=True):
            torch.testing.assert_close(mine[:, :, : len(known.ids)], true[:, :, : len(known.ids)], atol=1e-4, rtol=1e-3)
        compared += 1
    assert compared > 10


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_long_texts_are_translated_piece_by_piece_to_the_same(ours: str, theirs: str) -> None:
    tokenizer, text = TOKENIZERS[theirs](), ids_of(ours, TEXT * 8)
    translation = Translation(TOKENIZERS[ours](), tokenizer)
    for end in range(1, len(text), 7):
        found = translation.there(text[:end])
        words = TOKENIZERS[ours]().decode(text[:end])
        if found is not None and not words.endswith("\ufffd"):
            assert found == list(tokenizer(words, add_special_tokens=False)["input_ids"])
    if ours != "signs":  # those drop the space before a piece: no place to cut
        assert translation.done > len(text) // 2, "the older part is left behind"


def test_an_end_is_translated_and_a_character_in_the_middle_is_waited_for() -> None:
    text = ids_of("merges", "the red sun")
    drafter = TranslatedDrafter(model("merges"), Knowing(model("bytes"), "the red sun"), 4)
    with torch.inference_mode():
        drafter.start(text)
        drafter.advance(None, text[1:])
        assert drafter.draft(4).tokens == [text[-1], 0]  # <end> of ours
        moon = ids_of("bytes", "🙂")
        waiting = TranslatedDrafter(model("bytes"), DraftModel(model("merges"), 333), 4)
        waiting.start(moon)
        waiting.advance(None, moon[1:3])
        assert waiting.draft(4).tokens == [moon[2]]
        waiting.advance(None, moon[3:])
        assert waiting.draft(0).tokens == [moon[3]]


def test_trees_are_refused() -> None:
    with pytest.raises(UserError, match="another tokenizer and drafts chains"):
        Generator(model("bytes"), model("merges"), tree="dynamic:3x3x6")
