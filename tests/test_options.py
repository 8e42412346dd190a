"""Options of generation against transformers' own generate: the tokens, scores and calls are the same."""

from __future__ import annotations

import functools
import itertools
import math
import re
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from test_generator import FORMS, LUCK, NEW, NO_END, Scripted, backbone, identity, own, prompt_of, reference
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Backbone
from headstart.heads.methods import METHODS
from headstart.inference.generator import Generator, Output
from headstart.inference.sampler import Sampler

DRAFTS = list(itertools.product(("right", "half"), FORMS))


def drafted(text: list[int], luck: str, form: str, on: Backbone | None = None) -> Generator:
    return Generator(on or backbone(), Scripted(text, LUCK[luck], FORMS[form]()))


# -- stop strings ----------------------------------------------------------------------------------------------------


@functools.cache
def lettered() -> Backbone:
    """Tokens of one to three letters of a, b, c, so that a stop string may lie anywhere in them."""
    pairs = list(itertools.product("abcdef", repeat=2))
    triples = list(itertools.product("abcd", repeat=3))[:52]
    words = ["<end>", *"abcdef", "\u0120", *map("".join, pairs), *map("".join, triples)]
    merges = [*pairs, *(("".join(letters[:2]), letters[2]) for letters in triples)]
    raw = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")
    return Backbone(zoo.model(seed=5), made, name="lettered")


@functools.cache
def stopped() -> tuple[list[int], list[tuple[str, list[int]]]]:
    """What would come without an end, and for stop strings all over it what generate makes of them."""
    prompt, tokenizer = [4, 17, 9], lettered().tokenizer
    whole = own(lettered(), prompt, max_new_tokens=NEW, eos_token_id=-1)
    text = "".join(tokenizer.convert_ids_to_tokens(whole))
    found = []
    for start, length in itertools.product(range(0, len(text) - 6, 7), (1, 2, 4, 6)):
        options = {"max_new_tokens": NEW, "eos_token_id": -1, "stop_strings": [text[start : start + length], "zz"]}
        found.append((text[start : start + length], own(lettered(), prompt, **options, tokenizer=tokenizer)))
    assert len({len(tokens) for _, tokens in found}) > 4
    return whole, found


@pytest.mark.parametrize(("luck", "form"), DRAFTS)
def test_stop_strings_cut_where_generate_cuts(luck: str, form: str) -> None:
    whole, found = stopped()
    generator = drafted([4, 17, 9, *whole], luck, form, lettered())
    for stop, expected in found:
        output = generator.generate([4, 17, 9], max_new_tokens=NEW, eos_token_id=-1, stop_strings=[stop, "zz"])
        assert output.tokens == expected
        identity(output)


def test_a_stop_string_needs_a_tokenizer_and_letters_that_it_knows() -> None:
    with pytest.raises(UserError, match="stop_strings need a tokenizer"):
        Generator(Backbone(zoo.model())).generate([5], stop_strings="a")
    with pytest.raises(UserError, match="top string"):
        Generator(backbone()).generate([5], stop_strings=["\u4e00"])
    for given in (5, ["a", 5], b"a"):
        words = re.escape(f"stop_strings is {given!r}; it has to be a string or a list of strings")
        with pytest.raises(UserError, match=words):
            Generator(backbone()).generate([5], stop_strings=given)
    expected = own(backbone(), [5, 6], stop_strings="e", tokenizer=zoo.tokenizer(), max_new_tokens=50)
    assert Generator(Backbone(backbone().model)).generate(
        [5, 6], stop_strings="e", tokenizer=zoo.tokenizer(), max_new_tokens=50
    ).tokens == expected  # fmt: skip


# -- criteria --------------------------------------------------------------------------------------------------------


class Counting(transformers.StoppingCriteria):
    """Stops behind so many calls, and keeps what it was given."""

    def __init__(self, calls: int) -> None:
        self.left, self.given = calls, list[list[int]]()
        self.scores: list[int | None] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.given.append(input_ids[0].tolist())
        self.scores.append(None if scores is None else len(scores))
        return torch.tensor([len(self.given) >= self.left])


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"output_logits": True}], ids=str)
@pytest.mark.parametrize(("luck", "form"), DRAFTS)
def test_criteria_see_each_token_once_and_cut_there(luck: str, form: str, options: dict[str, Any]) -> None:
    prompt = prompt_of(13)
    whole = own(backbone(), prompt, max_new_tokens=NEW, **{k: v for k, v in options.items() if k[0] == "r"}, **NO_END)
    for calls in (1, 7, 99):
        criterion, other = Counting(calls), Counting(999)
        output = drafted(prompt + whole, luck, form).generate(
            prompt, max_new_tokens=NEW, stopping_criteria=[criterion, other], **options, **NO_END
        )
        assert output.tokens == whole[:calls]
        assert criterion.given == other.given == [prompt + whole[: n + 1] for n in range(len(output.tokens))]
        assert set(criterion.scores) == {None}
        identity(output)


def test_criteria_are_given_scores_where_they_are_kept() -> None:
    criterion = Counting(5)
    Generator(backbone(), "ngram").generate(prompt_of(5), stopping_criteria=[criterion], output_scores=True)
    assert criterion.scores == [1, 2, 3, 4, 5]


def test_criteria_of_a_kind_that_options_make_replace_those() -> None:
    prompt = prompt_of(13)
    whole = list(reference("llama", 13))
    for criteria in (
        [transformers.MaxLengthCriteria(13 + 9)],
        [transformers.MaxLengthCriteria(3)],
        [transformers.EosTokenCriteria([whole[4], whole[9]])],
    ):
        options = {"max_new_tokens": 6, "stopping_criteria": transformers.StoppingCriteriaList(criteria), **NO_END}
        expected = own(backbone(), prompt, **options)
        assert drafted(prompt + whole, "right", "chain").generate(prompt, **options).tokens == expected


def test_the_drafter_and_the_cache_stay_right_where_a_run_is_cut_by_max_time() -> None:
    class Slow(Scripted):
        def draft(self, budget: int) -> Any:
            time.sleep(0.05)
            return super().draft(budget)

    prompt = prompt_of(13)
    whole = own(backbone(), prompt, max_new_tokens=200, **NO_END)
    for _ in range(2):  # each answer has its own time
        drafter = Slow(prompt + whole, LUCK["wrong"], FORMS["chain"]())
        outputs = Generator(backbone(), drafter).generate([prompt] * 2, max_new_tokens=200, max_time=0.4, **NO_END)
        for output in outputs:
            assert output.tokens == whole[: len(output.tokens)]
            assert 2 <= len(output.tokens) <= 9


# -- processors ------------------------------------------------------------------------------------------------------

CONSTRAINED: dict[str, dict[str, Any]] = {
    "suppress": {"suppress_tokens": [3, 4, 5]},
    "begin": {"begin_suppress_tokens": list(range(3, 60))},
    "words": {"bad_words_ids": [[7], [8, 9]]},
    "forced": {"forced_eos_token_id": 5},  # no end comes before, so that it has to come at the limit
    "minimum": {"min_new_tokens": 9, "eos_token_id": list(range(40))},
    "shortest": {"min_length": 20, "eos_token_id": list(range(40))},
    "bias": {"sequence_bias": {(7,): 4.0, (9, 9): -3.0}},
    "decay": {"exponential_decay_length_penalty": (5, 1.4), "eos_token_id": 9},
    "prefix": {"prefix_allowed_tokens_fn": lambda row, ids: [row, *range(3 + int(ids[-1]) % 7, 96, 7)]},
    "encoder": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "normal": {"renormalize_logits": True, "remove_invalid_values": True},
    "penalties": {"frequency_penalty": 0.8, "presence_penalty": 0.4},
    "all": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "min_new_tokens": 3, "presence_penalty": 0.3},
}


def own_with_penalties(prompt: list[int], **options: Any) -> list[int]:
    """generate, with the penalties that it does not have written out."""
    frequency, presence = options.pop("frequency_penalty", 0.0), options.pop("presence_penalty", 0.0)

    def penalise(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token in set(ids[0, len(prompt) :].tolist()):
            count = ids[0, len(prompt) :].tolist().count(token)
            scores[0, token] -= frequency * count + presence
        return scores

    return own(backbone(), prompt, logits_processor=[penalise], **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONSTRAINED)
def test_processors_act_as_in_generate(name: str, form: str) -> None:
    prompt, options = prompt_of(11), {**NO_END, "max_new_tokens": NEW, **CONSTRAINED[name]}
    expected = own_with_penalties(prompt, **options)
    for luck in ("right", "half"):
        output = drafted(prompt + expected, luck, form).generate(prompt, **options)
        assert output.tokens == expected
        identity(output)
    sampled = {**options, "temperature": 1.0, "seed": 4}
    plain = Generator(backbone()).generate(prompt, **sampled).tokens
    assert drafted(prompt + plain, "half", form).generate(prompt, **sampled).tokens == plain


def test_numbers_that_are_none_and_hardly_any_temperature() -> None:
    for options in ({"temperature": "0.5"}, {"temperature": True}, {"max_new_tokens": 2.5}):
        with pytest.raises(UserError, match=f"{next(iter(options))} is "):
            Generator(backbone()).generate([5, 6], **options)
    cold = {"do_sample": True, "temperature": 1e-6, "max_new_tokens": NEW, **NO_END}
    assert Generator(backbone()).generate(prompt_of(5), **cold).tokens == list(reference("llama", 5))
    with pytest.raises(UserError, match="do_sample=True with temperature 0"):
        Generator(backbone()).generate([5, 6], do_sample=True, temperature=0)


def test_a_forced_beginning() -> None:
    options = {"forced_bos_token_id": 7, "begin_suppress_tokens": list(range(50)), "max_new_tokens": 5, **NO_END}
    for prompt in ([5], [5, 6]):
        expected = own(backbone(), prompt, **options)
        assert drafted(prompt + expected, "right", "chain").generate(prompt, **options).tokens == expected


def test_the_prefix_function_is_told_which_prompt_it_is() -> None:
    rows: set[int] = set()

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        rows.add(row)
        return [10 + row, 20 + row]

    options = {"prefix_allowed_tokens_fn": allowed, "num_return_sequences": 2, "temperature": 1.0, "max_new_tokens": 3}
    outputs = Generator(backbone()).generate([[5], [6, 7]], **options)
    assert rows == {0, 1}
    for place, output in enumerate(outputs):
        assert {token % 10 for token in output.tokens} == {place // 2}


@pytest.mark.parametrize("form", FORMS)
def test_processors_with_a_state_and_stop_strings_together(form: str) -> None:
    """Not a call too many, even in the round in which the text ends."""
    prompt, calls = prompt_of(7), []

    def stateful(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(ids[0].tolist())
        return scores.scatter(1, torch.tensor([[len(calls) % zoo.VOCAB]]), -math.inf)

    whole = own(backbone(), prompt, logits_processor=[stateful], max_new_tokens=NEW, **NO_END)
    for count in (1, 4, 9):
        calls.clear()
        options = {"logits_processor": [stateful], "stopping_criteria": [Counting(count)], "max_new_tokens": NEW}
        output = drafted(prompt + whole, "right", form).generate(prompt, **options, **NO_END)
        assert output.tokens == whole[:count]
        assert calls == [prompt + whole[:n] for n in range(count)]


# -- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3, "min_new_tokens": 3}, {"stop_strings": ["e"]}])
def test_scores_logits_and_logprobs_are_those_of_generate(form: str, options: dict[str, Any]) -> None:
    prompt, ids = prompt_of(9), torch.tensor([prompt_of(9)])
    asked = {"max_new_tokens": 12, "output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    made = backbone().model.generate(
        ids, attention_mask=torch.ones_like(ids), tokenizer=zoo.tokenizer(), do_sample=False, **options, **asked
    )
    expected = made.sequences[0, len(prompt) :].tolist()
    chances = backbone().model.compute_transition_scores(made.sequences, made.scores, normalize_logits=True)[0]
    generator = drafted(prompt + expected, "half", form)
    output = generator.generate(prompt, output_logprobs=True, **options, **asked)
    assert output.tokens == expected
    torch.testing.assert_close(output.scores, torch.cat(made.scores), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output.logits, torch.cat(made.logits), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.tensor(output.logprobs), chances, rtol=1e-4, atol=1e-4)
    assert output.scores.dtype == output.logits.dtype == torch.float32
    nothing = generator.generate(prompt, return_dict_in_generate=True, **options)
    assert (nothing.scores, nothing.logits, nothing.logprobs) == (None, None, None)


# -- streamers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("drafter", [None, "right"])
def test_streamers_are_given_what_generate_gives(
    drafter: str | None, skip: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = prompt_of(9)
    ids = torch.tensor([prompt])
    made = transformers.TextStreamer(zoo.tokenizer(), skip_prompt=skip)
    options: dict[str, Any] = {"max_new_tokens": 40, **NO_END}
    whole = own(backbone(), prompt, streamer=made, **options)
    expected = capsys.readouterr().out
    generator = drafted(prompt + whole, drafter, "chain") if drafter else Generator(backbone())
    generator.generate(ids, streamer=transformers.TextStreamer(zoo.tokenizer(), skip_prompt=skip), **options)
    assert capsys.readouterr().out == expected
    iterator = transformers.TextIteratorStreamer(zoo.tokenizer(), skip_prompt=skip)
    thread = threading.Thread(target=generator.generate, args=(ids,), kwargs={"streamer": iterator, **options})
    thread.start()
    assert "".join(iterator) + "\n" == expected
    thread.join()


def test_a_streamer_takes_one_answer() -> None:
    streamer = transformers.TextStreamer(zoo.tokenizer())
    for prompt, options in (([[5], [6]], {}), ([5], {"num_return_sequences": 2, "temperature": 1.0})):
        with pytest.raises(UserError, match="takes one answer, and 2"):
            Generator(backbone()).generate(prompt, streamer=streamer, **options)
    with pytest.raises(UserError, match="gives the pieces itself"):
        Generator(backbone()).stream([5], streamer=streamer)
    for given, name in ((print, "builtin_function_or_method"), ("text", "str"), (SimpleNamespace(put=print), "Simple")):
        with pytest.raises(UserError, match=f"streamer is {name}.* without .*end.*has the methods put and end"):
            Generator(backbone()).generate([5], streamer=given)


def test_streams_and_stop_strings() -> None:
    options = {"stop_strings": ["e"], "max_new_tokens": 60}
    output = Generator(backbone(), "ngram").generate([5, 6], **options)
    pieces = list(Generator(backbone(), "ngram").stream([5, 6], **options))
    assert [token for piece in pieces for token in piece.tokens] == output.tokens
    assert "".join(map(str, pieces)) == output.text


# -- several answers -------------------------------------------------------------------------------------------------


def test_several_answers_are_samples_of_the_seed() -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_new_tokens": 9, **NO_END}
    alone = Generator(backbone()).generate([[5, 6]] * 3 + [[7, 8]] * 3, **options)
    several = Generator(backbone(), "ngram").generate([[5, 6], [7, 8]], num_return_sequences=3, **options)
    assert [output.tokens for output in several] == [output.tokens for output in alone]
    one = Generator(backbone()).generate([5, 6], num_return_sequences=3, **options)
    assert [output.tokens for output in one] == [output.tokens for output in alone[:3]]
    assert len({tuple(output.tokens) for output in one}) == 3
    assert isinstance(Generator(backbone()).generate([5, 6], num_return_sequences=1, **options), Output)
    with pytest.raises(UserError, match="one answer"):
        Generator(backbone()).stream([5, 6], num_return_sequences=2, **options)


# -- masks and positions ---------------------------------------------------------------------------------------------


def padded(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(lengths)
    ids = torch.tensor([[2] * (width - n) + prompt_of(n) for n in lengths])
    return ids, torch.tensor([[0] * (width - n) + [1] * n for n in lengths])


@pytest.mark.parametrize("options", [{"max_new_tokens": 8}, {"max_length": 40}, {"min_length": 39, "max_length": 40}])
def test_padded_batches_are_answered_as_generate_does(options: dict[str, Any]) -> None:
    ids, mask = padded((3, 9, 9, 30))
    ends = {"eos_token_id": list(range(40))} if "min_length" in options else NO_END
    made = backbone().model.generate(ids, attention_mask=mask, do_sample=False, **options, **ends)[:, ids.shape[1] :]
    positions = mask.cumsum(-1) - 1
    for given in ({"attention_mask": mask}, {"attention_mask": mask.tolist(), "position_ids": positions}, {}):
        outputs = Generator(backbone(), "ngram").generate(ids, **given, **options, **ends)
        for output, row in zip(outputs, made.tolist(), strict=True):
            assert output.tokens == row[: len(output.tokens)]
            assert set(row[len(output.tokens) :]) <= {2}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"attention_mask": [[0, 1, 0, 1]]}, "0 at position 2, behind the first true token at 1"),
        ({"attention_mask": [1, 1, 1, 0]}, "0 at position 3"),
        ({"attention_mask": [0, 0, 0, 0]}, "attention_mask has to hold ones"),
        ({"attention_mask": [1, 1, 1]}, "attention_mask has 3 positions for 4"),
        ({"attention_mask": torch.ones(2, 4)}, "attention_mask has 2 rows for 1"),
        ({"position_ids": torch.tensor([[0, 1, 3, 4]])}, "position_ids is 3 at position 2"),
        ({"attention_mask": [0, 1, 1, 1], "position_ids": [0, 1, 2, 3]}, "position_ids is 1 at position 1"),
        ({"position_ids": [0, 1]}, "position_ids has 2 positions for 4"),
    ],
)
def test_masks_and_positions_of_no_use_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Generator(backbone()).generate([5, 6, 7, 8], **given)


def test_what_a_tokenizer_gives_can_be_handed_on() -> None:
    inputs = zoo.tokenizer()(["red", "blue sun"], return_tensors="pt", padding=True, padding_side="left")
    inputs.pop("token_type_ids", None)
    options = {"max_new_tokens": 9, **NO_END}
    made = backbone().model.generate(**inputs, do_sample=False, **options)[:, inputs.input_ids.shape[1] :].tolist()
    assert [output.tokens for output in Generator(backbone(), "ngram").generate(**inputs, **options)] == made
    with pytest.raises(UserError, match="the prompt is empty"):
        Generator(backbone()).generate()


def test_masks_are_for_token_ids() -> None:
    with pytest.raises(UserError, match="attention_mask is for token ids"):
        Generator(backbone()).generate("red sun", attention_mask=[1, 1])
    with pytest.raises(UserError, match="prompt 1: attention_mask is 0"):
        Generator(backbone()).generate([[5, 6], [6, 7]], attention_mask=[[0, 1], [1, 0]])
    assert Generator(backbone()).generate([5, 6, 7], attention_mask=torch.ones(1, 3), position_ids=[[0, 1, 2]]).tokens


# -- nothing to choose -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "seed": 1},
        {"output_scores": True},
        {"top_h": 0.5, "seed": 1},
        {"eta_cutoff": 0.1, "seed": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize(("value", "words"), [(math.nan, "NaN"), (-math.inf, "every token is masked")])
def test_bad_logits_are_told_by_row_and_round(
    value: float, words: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Generator(backbone()).generate(prompt_of(5), max_new_tokens=9, **options, **NO_END).tokens
    generator = drafted(prompt_of(5) + whole, "wrong", "chain")
    for bad, place in ((0, "row 0, prefill: "), (2, "row 0, round 2: node 0 of the tree: ")):
        calls = iter(range(99))

        def broken(hidden: torch.Tensor, calls: Any = calls, bad: int = bad) -> torch.Tensor:
            logits = Backbone.logits(backbone(), hidden)
            return torch.full_like(logits, value) if next(calls) == bad else logits

        monkeypatch.setattr(backbone(), "logits", broken)
        with pytest.raises(UserError, match=f"^{place}.*{words}"):
            generator.generate(prompt_of(5), max_new_tokens=9, **options, **NO_END)


@pytest.mark.parametrize("answer", [None, "yes", {}], ids=str)
def test_a_criterion_that_gives_no_truth_is_named(answer: Any) -> None:
    def undecided(ids: torch.Tensor, scores: Any) -> Any:
        return answer

    words = re.escape(f"stopping_criteria: undecided gave {answer!r}; it has to give True or False")
    for prompt in ([5], prompt_of(9)):
        for luck in ("right", "wrong"):
            with pytest.raises(UserError, match=words):
                drafted(prompt, luck, "chain").generate(prompt, stopping_criteria=[undecided], max_new_tokens=3)
    with pytest.raises(UserError, match=words):
        ids = torch.tensor([[7, 5, 6], [0, 5, 6]])
        asked = {"attention_mask": (ids > 0).long(), "stopping_criteria": [undecided], "max_new_tokens": 3}
        backbone().model.generate(ids, custom_generate=Generator(backbone()), **asked)


def test_masks_of_the_options_are_told_too() -> None:
    with pytest.raises(UserError, match="row 1, prefill: prefix_allowed_tokens_fn allows no token"):
        Generator(backbone()).generate([[5], [6]], prefix_allowed_tokens_fn=lambda row, ids: [] if row else [7])


def test_a_seed_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    for options in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "seed": 3, "num_return_sequences": 2}):
        Generator(backbone(), "ngram").generate([5, 6], **options)
    assert torch.equal(before, torch.get_rng_state())


# -- what is not asked for costs nothing -----------------------------------------------------------------------------


def test_a_plain_greedy_round_asks_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers: list[str] = []
    for name in ("tolist", "item", "cpu", "__int__", "__float__", "__bool__", "numpy"):
        whole = getattr(torch.Tensor, name)

        def noted(self: torch.Tensor, *args: Any, whole: Callable[..., Any] = whole, name: str = name) -> Any:
            transfers.append(name)
            return whole(self, *args)

        monkeypatch.setattr(torch.Tensor, name, noted)
    counts = []
    for new in (10, 30):
        transfers.clear()
        rounds = Generator(backbone()).generate(prompt_of(5), max_new_tokens=new, **NO_END).stats.rounds
        counts.append((len(transfers), rounds))
    assert counts[1][0] - counts[0][0] == counts[1][1] - counts[0][1]


@pytest.mark.parametrize("method", METHODS)
def test_a_sampler_serves_its_request_again(method: str) -> None:
    """A request that is begun anew is not over before it starts."""
    sampler = Sampler.from_options(backbone(), [5], eos_token_id=[5], max_new_tokens=3)
    sampler.ended([5])
    assert sampler.over
    sampler.begin()
    assert not sampler.over


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stop_strings": []}, "stop_strings is .*has to be a string"),
        ({"stop_strings": "€"}, "stop_strings is '€'"),
        ({"stop_strings": "a", "tokenizer": 3}, "tokenizer a int"),
        ({"max_time": "x"}, "max_time is 'x'"),
        ({"eos_token_id": "a"}, "generation options"),
        ({"bad_words_ids": [[99_999]]}, "NoBadWordsLogitsProcessor.*99999"),
        ({"logits_processor": [lambda ids, scores: None]}, "logits_processor: <lambda> gave NoneType, not scores"),
        ({"logits_processor": [lambda ids, scores: scores[0]]}, r"gave \(\d+,\), not scores \(1, \d+\)"),
    ],
)
def test_what_no_text_can_be_made_with_is_told(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Generator(backbone()).generate(prompt_of(4), **{"max_new_tokens": 3, **options})
