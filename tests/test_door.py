"""transformers' own door: the same tokens through `custom_generate` as without, as a callable, a folder, a pipeline."""

from __future__ import annotations

import functools
import inspect
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LogitsProcessor, StoppingCriteria, StopStringCriteria, pipeline

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Backbone
from headstart.heads.format import save_head
from headstart.heads.methods import METHODS
from headstart.inference.folder import write_door
from headstart.inference.generator import Generator

NEW = 16
PROMPT = [5, 6, 7, 8, 9, 10]


@functools.cache
def backbone() -> Backbone:
    made = zoo.backbone()
    made.model.generation_config.pad_token_id = 2
    return made


@functools.cache
def head() -> Any:
    torch.manual_seed(3)
    return METHODS["eagle3"].build(backbone())


def generator(**options: Any) -> Generator:
    return Generator(backbone(), head(), **options)


def batch(rows: int = 3, padding: int = 4) -> dict[str, torch.Tensor]:
    """Rows of different length, padded on the left."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(3, zoo.VOCAB, (rows, 9), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        ids[row, : padding * row // (rows - 1)], mask[row, : padding * row // (rows - 1)] = 2, 0
    return {"input_ids": ids, "attention_mask": mask}


def one() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, len(PROMPT), dtype=torch.long)}


def both(inputs: Callable[[], dict[str, torch.Tensor]], make: Callable[[], dict[str, Any]]) -> tuple[Any, Any]:
    """`generate` without the door and through it, with the same arguments."""
    model = backbone().model
    return (
        model.generate(**inputs(), do_sample=False, **make()),
        model.generate(**inputs(), do_sample=False, custom_generate=generator(), **make()),
    )


class Stateful(LogitsProcessor):
    """Forbids a token by how often it was called, and the last one of the text."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += input_ids.tolist()
        banned = torch.tensor([[len(self.calls) % zoo.VOCAB, self.calls[-1][-1]]])
        return scores.scatter(1, banned, -torch.inf)


class Until(StoppingCriteria):
    """Ends a text at a number of tokens, padding included."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **rest: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 14)


def end_of(place: int) -> int:
    """The token that the plain greedy answer has there."""
    return int(backbone().model.generate(**one(), do_sample=False, max_new_tokens=NEW, eos_token_id=-1)[0, place])


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {"max_new_tokens": NEW},
    "default length": lambda: {},
    "max_length": lambda: {"max_length": 21},
    "one token": lambda: {"max_new_tokens": 1},
    "an end": lambda: {"max_new_tokens": NEW, "eos_token_id": [end_of(-5), 95]},
    "pad is end": lambda: {"max_new_tokens": NEW, "eos_token_id": end_of(-5), "pad_token_id": end_of(-5)},
    "min_new_tokens": lambda: {"max_new_tokens": NEW, "min_new_tokens": 14, "eos_token_id": end_of(-5)},
    "min_length": lambda: {"max_new_tokens": NEW, "min_length": 15, "eos_token_id": end_of(-5)},
    "penalties": lambda: {"max_new_tokens": NEW, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "of the prompt": lambda: {
        "max_new_tokens": NEW,
        "encoder_repetition_penalty": 1.5,
        "encoder_no_repeat_ngram_size": 2,
    },
    "bans": lambda: {"max_new_tokens": NEW, "bad_words_ids": [[end_of(-5)], [5, 6]], "suppress_tokens": [7, 9]},
    "begin": lambda: {"max_new_tokens": NEW, "begin_suppress_tokens": [end_of(6)], "forced_eos_token_id": 4},
    "bias": lambda: {"max_new_tokens": NEW, "sequence_bias": {(9,): 8.0, (9, 11): -9.0}},
    "prefix": lambda: {
        "max_new_tokens": NEW,
        "prefix_allowed_tokens_fn": lambda row, ids: list(range(10 + 20 * row, 30 + 20 * row)),
    },
    "criterion": lambda: {"max_new_tokens": NEW, "stopping_criteria": [Until()]},
    "config": lambda: {"generation_config": transformers.GenerationConfig(max_new_tokens=7, repetition_penalty=1.3)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("inputs", [one, batch, lambda: batch(2, 0)], ids=["one", "padded", "two"])
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
def test_the_same_tokens_as_without_it(inputs: Callable[[], dict[str, torch.Tensor]], name: str) -> None:
    without, through = both(inputs, OPTIONS[name])
    assert through.tolist() == without.tolist()


def test_ids_alone_in_a_row_without_a_mask() -> None:
    ids = batch()["input_ids"]
    model = backbone().model
    expected = model.generate(ids, do_sample=False, max_new_tokens=NEW)  # padding is told by the pad token
    assert model.generate(ids, do_sample=False, max_new_tokens=NEW, custom_generate=generator()).equal(expected)


def test_processors_with_a_state_see_each_token_once() -> None:
    first, second = Stateful(), Stateful()
    options = {"do_sample": False, "max_new_tokens": NEW}
    without = backbone().model.generate(**one(), logits_processor=[first], **options)
    through = backbone().model.generate(**one(), logits_processor=[second], custom_generate=generator(), **options)
    assert through.equal(without)
    assert second.calls == first.calls


@pytest.mark.parametrize("inputs", [one, batch], ids=["one", "padded"])
def test_a_dict_with_scores_and_logits(inputs: Callable[[], dict[str, torch.Tensor]]) -> None:
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    without, through = both(inputs, lambda: {**options, "repetition_penalty": 1.2, "eos_token_id": -1})
    assert type(through) is type(without)
    assert through.sequences.equal(without.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(through[name], without[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    bare = backbone().model.generate(
        **inputs(), max_new_tokens=3, do_sample=False, return_dict_in_generate=True, custom_generate=generator()
    )
    assert (bare.sequences.shape[1], bare.scores, bare.logits) == (inputs()["input_ids"].shape[1] + 3, None, None)


def test_scores_of_rows_that_have_ended_are_sure_of_the_pad_token() -> None:
    inputs, model = batch(), backbone().model
    free = model.generate(**inputs, do_sample=False, max_new_tokens=NEW, eos_token_id=-1)
    end = int(free[1, 12])
    options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": end, "return_dict_in_generate": True}
    found = model.generate(**inputs, **options, output_scores=True, custom_generate=generator())
    assert found.sequences.equal(model.generate(**inputs, **options).sequences)
    width = inputs["input_ids"].shape[1]
    length = found.sequences[1, width:].tolist().index(end) + 1
    assert len(found.scores) > length
    assert found.scores[length][1].argmax() == 2
    transitions = model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
    assert transitions[1, length:].tolist() == [0.0] * (len(found.scores) - length)


DRAWN = {"do_sample": True, "temperature": 0.9, "top_k": 20, "max_new_tokens": NEW}


def test_a_seed_draws_what_generator_draws() -> None:
    model, inputs = backbone().model, batch()
    rows = [row[mask.bool()].tolist() for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    expected = Generator(backbone()).generate(rows, seed=5, **DRAWN)
    found = model.generate(**inputs, seed=5, custom_generate=generator(), **DRAWN)
    width = inputs["input_ids"].shape[1]
    for row, output in zip(found, expected, strict=True):
        assert row[width : width + len(output.tokens)].tolist() == output.tokens
    torch.manual_seed(3)
    first = model.generate(**inputs, custom_generate=generator(), **DRAWN)
    assert not model.generate(**inputs, custom_generate=generator(), **DRAWN).equal(first)
    torch.manual_seed(3)
    assert model.generate(**inputs, custom_generate=generator(), **DRAWN).equal(first)
    several = model.generate(**one(), seed=5, num_return_sequences=3, custom_generate=generator(), **DRAWN)
    answers = Generator(backbone()).generate([PROMPT], seed=5, num_return_sequences=3, **DRAWN)
    for row, output in zip(several, answers, strict=True):
        assert row[len(PROMPT) : len(PROMPT) + len(output.tokens)].tolist() == output.tokens


def test_other_rules_may_be_asked_for() -> None:
    model = backbone().model
    found = model.generate(**one(), seed=5, rule="typical", custom_generate=generator(), **DRAWN)
    output = generator().generate(PROMPT, seed=5, rule="typical", **DRAWN)
    assert found[0, len(PROMPT) :].tolist() == output.tokens
    with pytest.raises(UserError, match="rule=traversal looks ahead"):
        model.generate(**one(), rule="traversal", logits_processor=[Stateful()], custom_generate=generator(), **DRAWN)


# -- what a callable cannot receive ------------------------------------------------------------------------------------


class Streamer(transformers.generation.BaseStreamer):
    def __init__(self) -> None:
        self.put_: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.put_.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_is_given_the_prompt_and_never_the_end() -> None:
    """transformers does not hand it over: docs/transformers.md says what to do instead."""
    streamer = Streamer()
    backbone().model.generate(**one(), max_new_tokens=4, streamer=streamer, custom_generate=generator())
    assert (streamer.put_, streamer.ended) == ([PROMPT], False)


def test_stop_strings_are_refused_by_transformers_and_taken_as_a_criterion() -> None:
    model, tokenizer = backbone().model, zoo.tokenizer()
    plain = model.generate(**one(), do_sample=False, max_new_tokens=NEW)[0, len(PROMPT) :]
    word = tokenizer.decode(plain[4:6])
    options = {"do_sample": False, "max_new_tokens": NEW}
    with pytest.raises(ValueError, match="stop strings"):
        model.generate(**one(), stop_strings=[word], tokenizer=tokenizer, custom_generate=generator(), **options)
    expected = model.generate(**one(), stop_strings=[word], tokenizer=tokenizer, **options)
    criterion = StopStringCriteria(tokenizer, [word])
    found = model.generate(**one(), stopping_criteria=[criterion], custom_generate=generator(), **options)
    assert found.equal(expected)
    assert found.shape[1] == len(PROMPT) + 6


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_another_model_is_refused_with_both_names() -> None:
    other = zoo.model("qwen2")
    with pytest.raises(UserError, match=r"Qwen2ForCausalLM.* belongs to tiny-llama \(LlamaForCausalLM\)"):
        other.generate(**one(), max_new_tokens=3, custom_generate=generator())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states=True"),
        ({"guidance_scale": 2.0}, "guidance_scale=2.0"),
        ({"inputs_embeds": torch.zeros(1, 6, 32)}, "inputs_embeds"),
        ({"position_ids": torch.arange(6)[None] + 3}, "position_ids is 3 at position 0"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]])}, "padding is taken on the left only"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    given = {**one(), "max_new_tokens": 3, **options}
    with pytest.raises(UserError, match=words):
        backbone().model.generate(**given, custom_generate=generator())


def test_a_cache_of_another_text_is_refused() -> None:
    """What is taken over: tests/test_guards.py."""
    model = backbone().model
    name = "cache" if "cache" in inspect.signature(inspect.unwrap(model.forward)).parameters else "past_key_values"
    cache = transformers.DynamicCache(config=model.config)
    model(torch.tensor([PROMPT[1:4]]), **{name: cache})
    with pytest.raises(UserError, match="it belongs to another text or model"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.generate(**one(), max_new_tokens=3, custom_generate=generator(), **{name: cache})


# -- the folder --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A head with its door."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    save_head(head(), tmp_path / "head")
    return write_door(tmp_path / "head", tree="chain:3")


def test_the_folder_holds_little(folder: Path) -> None:
    text = (folder / "custom_generate" / "generate.py").read_text()
    assert len(text.splitlines()) < 10
    assert str(folder) in text
    assert (folder / "custom_generate" / "requirements.txt").read_text() == "headstart\n"


@pytest.mark.parametrize("name", ["default length", "pad is end", "penalties", "prefix", "criterion", "config"])
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
def test_the_folder_gives_the_same_tokens(folder: Path, name: str) -> None:
    model = backbone().model
    for inputs in (one, batch):
        without = model.generate(**inputs(), do_sample=False, **OPTIONS[name]())
        door = {"custom_generate": str(folder), "trust_remote_code": True}
        assert model.generate(**inputs(), do_sample=False, **door, **OPTIONS[name]()).equal(without)


def test_the_folder_needs_trust(folder: Path) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        backbone().model.generate(**one(), max_new_tokens=3, custom_generate=str(folder), trust_remote_code=False)


def test_the_folder_takes_streamers_and_stop_strings_and_seeds(folder: Path) -> None:
    model, tokenizer = backbone().model, zoo.tokenizer()
    door = {"custom_generate": str(folder), "trust_remote_code": True}
    first, second = Streamer(), Streamer()
    options = {"do_sample": False, "max_new_tokens": NEW}
    plain = model.generate(**one(), streamer=first, **options)
    assert model.generate(**one(), streamer=second, **options, **door).equal(plain)
    assert second.ended
    assert second.put_ == first.put_
    options |= {"stop_strings": tokenizer.decode(plain[0, 10:12]), "tokenizer": tokenizer}
    expected = model.generate(**one(), **options)
    assert expected.shape[1] == 12
    assert model.generate(**one(), **options, **door).equal(expected)
    with pytest.raises(UserError, match="stop_strings need a tokenizer"):
        model.generate(**one(), max_new_tokens=3, stop_strings="a", **door)
    with pytest.raises(UserError, match=r"stop_strings is \['a', 5\]; it has to be"):
        model.generate(**one(), max_new_tokens=3, stop_strings=["a", 5], tokenizer=tokenizer, **door)
    found = model.generate(**one(), seed=5, **DRAWN, **door)
    assert found[0, len(PROMPT) :].tolist() == Generator(backbone()).generate(PROMPT, seed=5, **DRAWN).tokens
    other = model.generate(**one(), seed=5, head="ngram", tree="chain:2", **DRAWN, **door)
    assert other.equal(found)


def test_stop_strings_of_a_config(folder: Path) -> None:
    model, tokenizer = backbone().model, zoo.tokenizer()
    plain = model.generate(**one(), do_sample=False, max_new_tokens=NEW)
    config = transformers.GenerationConfig(max_new_tokens=NEW, stop_strings=[tokenizer.decode(plain[0, 10:12])])
    options = {"generation_config": config, "tokenizer": tokenizer, "do_sample": False}
    door = {"custom_generate": str(folder), "trust_remote_code": True}
    expected = model.generate(**one(), **options)
    assert expected.shape[1] == 12
    assert model.generate(**one(), **options, **door).equal(expected)
    assert config.stop_strings


def test_a_model_that_comes_with_its_door(folder: Path, tmp_path: Path) -> None:
    """Loaded with trust, its own `generate` is this function, which must not call itself."""
    model = zoo.model()
    model.save_pretrained(tmp_path / "model")
    write_door(tmp_path / "model", head=folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    expected = model.generate(**one(), max_new_tokens=NEW, do_sample=False)
    assert loaded.generate(**one(), max_new_tokens=NEW, do_sample=False).equal(expected)
    assert "head" in loaded.generate.func.__code__.co_varnames


# -- pipelines ---------------------------------------------------------------------------------------------------------


def test_the_same_text_through_a_pipeline(folder: Path) -> None:
    tokenizer = zoo.tokenizer()
    tokenizer.padding_side = "left"
    pipe = pipeline("text-generation", model=backbone().model, tokenizer=tokenizer)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    texts = ["red sun", "blue", "one two three"]
    chat = [{"role": "user", "content": "red sun"}]
    doors = [{"custom_generate": generator()}, {"custom_generate": str(folder), "trust_remote_code": True}]
    for door in doors:
        for prompt in ("red sun", chat):
            assert json.dumps(pipe(prompt, **options, **door)) == json.dumps(pipe(prompt, **options))
        assert pipe(texts, batch_size=3, **options, **door) == pipe(texts, batch_size=3, **options)
    drawn = {**DRAWN, "return_full_text": False}
    outputs = Generator(backbone()).generate(zoo.tokenizer()("red sun").input_ids, seed=4, **DRAWN)
    assert pipe("red sun", seed=4, custom_generate=generator(), **drawn)[0]["generated_text"] == outputs.text
