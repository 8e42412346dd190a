"""Synthesis: whole conversations from nothing, resumed without a trace, dropped rows counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import zoo
from headstart.data import synthesize as module
from headstart.data.synthesize import NearDuplicates, SynthesizeSettings, UserOpening, summary, synthesize
from headstart.errors import UserError
from headstart.inference.stats import repeats_last, repeats_ngram


class Interrupted(Exception):
    """Stands for a kill."""


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model says nothing sensible: only turns that were cut count as bad here."""
    monkeypatch.setattr(
        module, "_user_fault", lambda words, tokens, opening: "cut" if tokens[-1] not in opening.end_tokens else ""
    )
    monkeypatch.setattr(module, "_answer_fault", lambda text, tokens: "")
    monkeypatch.setattr(module, "repeats_last", lambda tokens, n: False)


def settings(out: Path, **changes: Any) -> SynthesizeSettings:
    fields = {"count": 6, "group_size": 8, "max_user_tokens": 40, "max_answer_tokens": 8, "user_top_p": 1.0,
              "user_temperature": 3.0, "follow_up_share": 0.5, "dtype": "float32"}  # fmt: skip
    return SynthesizeSettings(backbone="tiny", out=str(out), **{**fields, **changes})


def test_conversations_appear_as_asked(tmp_path: Path, lenient: None) -> None:
    out = tmp_path / "made.jsonl.gz"
    counts = synthesize(zoo.backbone(), settings(out))
    rows = [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()]
    assert len(rows) == 6
    assert counts["kept"] == 6
    assert counts["cut"] > 0
    assert all(
        [m["role"] for m in row["messages"]] in (["user", "assistant"], ["user", "assistant"] * 2) for row in rows
    )
    assert {row["answers"] for row in rows} == {"greedy", "sampled"}
    assert "kept" in "\n".join(summary(counts))
    assert synthesize(zoo.backbone(), settings(out))["already_there"]


def test_greedy_answers_are_the_backbones(tmp_path: Path, lenient: None) -> None:
    import torch

    backbone, out = zoo.backbone(), tmp_path / "made.jsonl"
    synthesize(backbone, settings(out, sampled_share=0.0))
    for line in out.read_text().splitlines():
        question, answer = json.loads(line)["messages"][:2]
        prompt = torch.tensor([backbone.encode([question])])
        mask = torch.ones_like(prompt)  # generate would hide a <pad> that the random user said
        made = backbone.model.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False)
        tokens = made[0, prompt.shape[1] :]
        assert backbone.tokenizer.decode(tokens).removesuffix("<|im_end|>").strip() == answer["content"]


@pytest.mark.parametrize("stop_at", [1, 2, 3])
def test_an_interrupted_run_ends_as_an_undisturbed_one(
    tmp_path: Path, lenient: None, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    options = {"count": 12, "group_size": 4}
    synthesize(zoo.backbone(), settings(whole, **options))
    write, calls = module._write_group, []

    def fails(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == stop_at:
            raise Interrupted
        return write(*arguments)

    monkeypatch.setattr(module, "_write_group", fails)
    with pytest.raises(Interrupted):
        synthesize(zoo.backbone(), settings(broken, **options))
    assert not broken.exists()
    before = len(calls)
    synthesize(zoo.backbone(), settings(broken, **options))
    assert broken.read_bytes() == whole.read_bytes()
    undisturbed = len(list(range(0, 4 * (len(calls) - before + stop_at - 1), 4)))
    assert len(calls) - before == undisturbed - (stop_at - 1)  # finished groups were not done again


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
    first = zoo.tokenizer().decode(opening.ids([]))
    assert first == "<|im_start|>user\n"
    assert zoo.tokenizer().convert_tokens_to_ids("<|im_end|>") in opening.end_tokens
    chat = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "sun"}]
    assert zoo.tokenizer().decode(opening.ids(chat)).endswith("sun<|im_end|>\n<|im_start|>user\n")


def test_a_model_that_keeps_nothing_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only 0 can be kept"):
        synthesize(zoo.backbone(), settings(tmp_path / "none.jsonl", max_user_tokens=1))


@pytest.mark.parametrize("changes", [{"max_user_tokens": 400}, {"max_answer_tokens": 250}])
def test_a_context_without_room_is_counted(changes: dict[str, int], tmp_path: Path, lenient: None) -> None:
    with pytest.raises(UserError, match="only 0 can be kept .*no room in the context"):
        synthesize(zoo.backbone(), settings(tmp_path / "none.jsonl", **changes))


@pytest.mark.parametrize(
    "changes",
    [{"count": -3}, {"count": 0}, {"group_size": 0}, {"max_user_tokens": 0}, {"answer_temperature": -1.0},
     {"user_top_p": 0.0}, {"sampled_share": 2.0}, {"follow_up_share": -0.1}],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{next(iter(changes))} is .*; it has to be"):
        settings(tmp_path / "none.jsonl", **changes)


def test_what_is_dropped_and_why() -> None:
    opening = UserOpening(zoo.backbone())
    end = next(iter(opening.end_tokens))
    fault = module._user_fault
    assert fault("red blue green", [5, 6, end], opening) == ""
    assert fault("red blue green", [5, 6, 7], opening) == "user turn cut"
    assert fault("red", [5, end], opening) == "user turn too short"
    assert fault("red blue \ufffd", [5, end], opening) == "user turn not clean text"
    assert fault("red <|im_start|> blue", [5, end], opening) == "user turn not clean text"
    assert fault("red blue green", [*range(5, 15), *range(5, 15), end], opening) == "user turn loops"


def test_the_last_gram_tells_when_a_loop_begins() -> None:
    tokens = [*range(7), *range(3, 20), *range(4, 16)]
    first = next(end for end in range(len(tokens) + 1) if repeats_ngram(tokens[:end], 4))
    assert [end for end in range(first + 1) if repeats_last(tokens[:end], 4)] == [first]
