"""Synthesis: whole conversations from nothing, planned, resumed without a trace, dropped rows counted, and a card."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from headstart.data import writing as module
from headstart.data.plans import Plan, plan_of
from headstart.data.quality import NearDuplicates, answer_fault, user_fault
from headstart.data.synthesize import SynthesizeSettings, synthesize
from headstart.data.topics import (
    ABOUT,
    CODE,
    LANGUAGES,
    NEXT,
    PERSONAS,
    PLAIN,
    QUESTIONS,
    SECTIONS,
    entries,
    read_topics,
)
from headstart.data.writing import UserOpening, Writer
from headstart.errors import UserError
from headstart.files import read_jsonl
from headstart.heads.backbone import Backbone
from headstart.inference.stats import repeats_last, repeats_ngram


def writer(**changes: Any) -> Backbone:
    """A backbone that ends its turns now and then."""
    made = zoo.backbone(tie_word_embeddings=False, **changes)
    with torch.no_grad():
        made.model.lm_head.weight[0] = 1.2 * made.model.lm_head.weight.mean(0) + 0.4
    return made


class Interrupted(Exception):
    """Stands for a kill."""


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model says nothing sensible: only turns that were cut count as bad here."""
    monkeypatch.setattr(
        module, "user_fault", lambda words, tokens, ends, special, language: "cut" if tokens[-1] not in ends else ""
    )
    monkeypatch.setattr(module, "answer_fault", lambda text, tokens, special, language: "")
    monkeypatch.setattr(module, "repeats_last", lambda tokens, n: False)


def settings(out: Path, **changes: Any) -> SynthesizeSettings:
    fields = {"count": 6, "group_size": 8, "max_user_tokens": 40, "max_answer_tokens": 8, "user_top_p": 1.0,
              "user_temperature": 1.0, "follow_up_share": 0.5, "max_turns": 2, "dtype": "float32",
              "long_share": 0.0}  # fmt: skip
    return SynthesizeSettings(backbone="tiny", out=str(out), **{**fields, **changes})


def test_conversations_appear_as_asked(tmp_path: Path, lenient: None) -> None:
    out = tmp_path / "made.jsonl.gz"
    asked = settings(out, count=8, follow_up_share=0.9, max_turns=3, max_answer_tokens=24)
    counts = synthesize(writer(), asked)
    rows = [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()]
    assert len(rows) == 8
    assert counts["kept"] == 8
    assert counts["cut"] > 0
    for row in rows:
        roles = [m["role"] for m in row["messages"] if m["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert max(len(row["messages"]) for row in rows) >= 4
    assert {row["answers"] for row in rows} == {"greedy", "sampled"}
    assert len({row["kind"] for row in rows}) > 1
    assert synthesize(writer(), asked)["already_there"]
    card = Path(f"{out}.card.md").read_text()
    assert "8 conversations that tiny wrote" in card
    assert f"| cut | {counts['cut']} (" in card
    assert f"| tokens of answers | {sum(row['tokens'] for row in rows)} |" in card


def test_greedy_answers_are_the_backbones(tmp_path: Path, lenient: None) -> None:
    backbone, out = writer(), tmp_path / "made.jsonl"
    synthesize(backbone, settings(out, sampled_share=0.0, system_share=1.0))
    roles = set()
    for row in read_jsonl(out):
        end = [m["role"] for m in row["messages"]].index("assistant")
        roles.add(row["messages"][0]["role"])
        prompt = torch.tensor([backbone.encode(row["messages"][:end])])
        mask = torch.ones_like(prompt)  # generate would hide a <pad> that the random user said
        made = backbone.model.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False)
        tokens = made[0, prompt.shape[1] :]
        said = row["messages"][end]["content"]
        assert backbone.tokenizer.decode(tokens).removesuffix("<|im_end|>").strip() == said
    assert roles == {"system", "user"}


def test_an_interrupted_run_ends_as_an_undisturbed_one(
    tmp_path: Path, lenient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole.jsonl"
    options = {"count": 6, "group_size": 4, "max_user_tokens": 24}
    write, calls, stop_at = Writer.group, [0], -1

    def fails(*arguments: Any) -> Any:
        calls[-1] += 1
        if calls[-1] == stop_at:
            raise Interrupted
        return write(*arguments)

    monkeypatch.setattr(Writer, "group", fails)
    synthesize(writer(), settings(whole, **options))
    groups = calls[0]
    assert groups >= 3
    for stop_at in (1, 2, 3):
        broken = tmp_path / f"broken{stop_at}.jsonl"
        calls.append(0)
        with pytest.raises(Interrupted):
            synthesize(writer(), settings(broken, **options))
        assert not broken.exists()
        synthesize(writer(), settings(broken, **options))
        assert calls[-1] == groups + 1  # the one that was interrupted, again; finished ones were not done again
        assert broken.read_bytes() == whole.read_bytes()
        card = Path(f"{broken}.card.md").read_text()
        assert card == Path(f"{whole}.card.md").read_text().replace("whole", broken.stem)


def test_long_texts_are_written_first(tmp_path: Path, lenient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECTION", 60)
    monkeypatch.setattr(Writer, "_section", lambda self, tokens: self.backbone.tokenizer.decode(tokens))
    out = tmp_path / "made.jsonl"
    made = writer(max_position_embeddings=2048)
    synthesize(
        made, settings(out, long_share=1.0, code_share=0.0, long_tokens=60, count=3, follow_up_share=0.9, max_turns=3)
    )
    for row in read_jsonl(out):
        question = next(one["content"] for one in row["messages"] if one["role"] == "user")
        text, _, asked = question.rpartition("\n\n")
        assert row["kind"] == "long"
        assert any(asked.startswith(opening) for opening in entries(QUESTIONS))
        assert len(made.tokenizer(text)["input_ids"]) > 10


def test_plans_depend_on_seed_and_number_and_keep_to_their_shares(tmp_path: Path) -> None:
    asked = settings(
        tmp_path / "x", code_share=0.2, long_share=0.1, language_share=0.1, languages=["de", "fr"], max_turns=4
    )
    topics = read_topics("own")
    plans = [plan_of(number, asked, topics) for number in range(3000)]
    assert plans == [plan_of(number, asked, topics) for number in range(3000)]
    assert plans != [plan_of(number, settings(tmp_path / "x", seed=1), topics) for number in range(3000)]
    kinds = Counter(plan.kind for plan in plans)
    for kind, share in {"code": 0.2, "long": 0.1, "language": 0.1, "free": 0.06}.items():
        assert abs(kinds[kind] / 3000 - share) < 0.025, kind
    assert Counter(plan.sampled for plan in plans)[True] == 1500
    assert len({plan.topic for plan in plans}) == len(topics) + 1
    assert {plan.language for plan in plans} == {"en", "de", "fr"}
    words = Counter(plan.openings[0].split()[0] for plan in plans if plan.openings[0])
    assert words.most_common(1)[0][1] < 0.2 * 3000  # the set that came first: a third of all questions began alike
    assert {len(plan.openings) for plan in plans} == {1, 2, 3, 4}
    without = [plan_of(number, settings(tmp_path / "x", long_share=0.5), []) for number in range(200)]
    assert {plan.kind for plan in without} == {"plain", "free", "code"}


def test_the_lists_are_what_they_should_be(tmp_path: Path) -> None:
    topics = read_topics("own")
    assert len(topics) == len(set(topics)) >= 100
    for listed in (ABOUT, PLAIN, CODE, PERSONAS, SECTIONS, QUESTIONS, NEXT, *LANGUAGES.values()):
        found = entries(listed)
        assert len(found) == len(set(found))
        assert all(found[:-1])
        assert not any("{" in one.replace("{topic}", "") or "  " in one for one in found)
    assert all("{topic}" in one for one in entries(SECTIONS))
    assert entries(NEXT)[-1] == ""
    assert any("\n```python\n" in one for one in entries(CODE))
    (tmp_path / "topics.txt").write_text("\ufefftea\n\n coffee \n")
    assert read_topics(str(tmp_path / "topics.txt")) == ["tea", "coffee"]
    assert read_topics("none") == []
    with pytest.raises(UserError, match="--topics missing.txt"):
        read_topics("missing.txt")
    (tmp_path / "topics.txt").write_text("\n")
    with pytest.raises(UserError, match="holds no topic"):
        read_topics(str(tmp_path / "topics.txt"))


def test_near_duplicates_are_words_not_letters() -> None:
    seen = NearDuplicates()
    text = "Can you explain to me how a bicycle stays upright while it moves forward on a road?"
    assert not seen.has_or_adds(text)
    assert seen.has_or_adds(text.upper().replace("?", "!"))
    assert seen.has_or_adds(text.replace("road", "street"))
    assert not seen.has_or_adds("How do I bake bread without yeast in a small oven?")
    assert not seen.has_or_adds("Tell me")
    assert seen.has_or_adds("tell  me.")


def test_the_user_turn_opens_where_the_template_puts_it() -> None:
    opening = UserOpening(zoo.backbone())
    decode = zoo.tokenizer().decode
    assert decode(opening.ids([])) == "<|im_start|>user\n"
    assert decode(opening.ids([], "How do")) == "<|im_start|>user\nHow do"
    assert zoo.tokenizer().convert_tokens_to_ids("<|im_end|>") in opening.end_tokens
    chat = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "sun"}]
    assert decode(opening.ids(chat)).endswith("sun<|im_end|>\n<|im_start|>user\n")


def test_a_template_without_system_prompts_is_steered_by_words_alone(tmp_path: Path, lenient: None) -> None:
    made = zoo.backbone()
    made.tokenizer = made.tokenizer.__class__(
        tokenizer_object=made.tokenizer.backend_tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>"
    )
    made.tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + zoo.TEMPLATE
    )
    out = tmp_path / "made.jsonl"
    synthesize(made, settings(out, system_share=1.0))
    assert all(row["messages"][0]["role"] == "user" for row in read_jsonl(out))


def test_a_model_that_keeps_nothing_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only 0 can be kept"):
        synthesize(zoo.backbone(), settings(tmp_path / "none.jsonl", max_user_tokens=1))


@pytest.mark.parametrize("changes", [{"max_user_tokens": 100}, {"max_user_tokens": 8, "max_answer_tokens": 60}])
def test_a_context_without_room_is_counted(changes: dict[str, int], tmp_path: Path, lenient: None) -> None:
    with pytest.raises(UserError, match="only 0 can be kept .*no room in the context"):
        synthesize(zoo.backbone(max_position_embeddings=64), settings(tmp_path / "none.jsonl", **changes))


@pytest.mark.parametrize(
    "changes",
    [{"count": -3}, {"count": 0}, {"group_size": 0}, {"max_user_tokens": 0}, {"answer_temperature": -1.0},
     {"user_top_p": 0.0}, {"sampled_share": 2.0}, {"follow_up_share": -0.1}, {"max_turns": 0}, {"long_tokens": 0},
     {"long_tokens": 9999}, {"free_share": 1.5}, {"system_share": -1.0}],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{next(iter(changes))} is .*; it has to be"):
        settings(tmp_path / "none.jsonl", **changes)


def test_shares_and_languages_that_do_not_go_together(tmp_path: Path) -> None:
    for changes, words in (
        ({"languages": ["german"]}, "'german'; known are de"),
        ({"language_share": 0.2}, "name the languages"),
        ({"code_share": 0.7, "long_share": 0.4}, "more than 1 together"),
    ):
        with pytest.raises(UserError, match=words):
            settings(tmp_path / "none.jsonl", **changes)


def test_what_is_dropped_and_why() -> None:
    ends, special = frozenset({0}), ["<|im_start|>"]

    def fault(words: str, tokens: list[int], language: str = "en") -> str:
        return user_fault(words, tokens, ends, special, language)

    def said(text: str, language: str = "en") -> str:
        return answer_fault(text, [5], special, language)

    assert fault("red blue green", [5, 6, 0]) == ""
    assert fault("red blue green", [5, 6, 7]) == "user turn cut"
    assert fault("red", [5, 0]) == "user turn too short"
    assert fault("red blue \ufffd", [5, 0]) == "user turn not clean text"
    assert fault("red <|im_start|> blue", [5, 0]) == "user turn not clean text"
    assert fault("red blue green", [*range(5, 15), *range(5, 15), 0]) == "user turn loops"
    assert fault("Sure, here is what you want", [5, 0]) == "user turn speaks as the assistant"
    assert fault("Wie kann ich das hier machen?", [5, 0]) == "user turn in another language"
    assert fault("Wie kann ich das hier machen?", [5, 0], "de") == ""
    assert fault("什么是人工智能？", [5, 0], "zh") == ""
    assert said("I'm sorry, but I can't help with that.", "en") == "answer refuses"
    assert said("As an AI language model, I do not eat.", "en") == "answer refuses"
    assert said("I'm sorry for the confusion, but no.", "en") == "answer refuses"
    assert said("I can assist you with that.", "en") == ""
    assert said("The sky is blue because of the light.", "de") == "answer in another language"
    assert said("Der Himmel ist blau, weil das Licht gestreut wird.", "de") == ""
    assert said("yes") == "answer too short"
    assert said("It is blue.<|im_start|>user") == "answer not clean text"


def test_sections_end_with_a_sentence(tmp_path: Path) -> None:
    made = zoo.backbone()
    writer = Writer(made, settings(tmp_path / "x"))
    whole = "red sun. " * 20
    tokens = made.tokenizer(whole + "blue mo")["input_ids"]
    assert writer._section(tokens) == ""  # it loops from the start
    words = " ".join("abcdefghijklmnopqrstuvwxyz"[n % 26] + "abcdefgh"[n // 26] for n in range(60))
    cut = made.tokenizer(f"{words}. and th")["input_ids"]
    assert writer._section(cut) == f"{words}."
    looped = made.tokenizer(f"{words}. ba ca da")["input_ids"]  # as "ba ca da " stands in the words already
    assert repeats_last(looped[:-1], 7)
    assert writer._section(looped) == f"{words}."
    assert writer._section(made.tokenizer(words)["input_ids"] + [0]) == words
    assert writer._section(made.tokenizer(words)["input_ids"]) == ""


def test_a_plan_without_words_is_free() -> None:
    assert Plan("free").openings == ("",)


def test_the_last_gram_tells_when_a_loop_begins() -> None:
    tokens = [*range(7), *range(3, 20), *range(4, 16)]
    first = next(end for end in range(len(tokens) + 1) if repeats_ngram(tokens[:end], 4))
    assert [end for end in range(first + 1) if repeats_last(tokens[:end], 4)] == [first]
