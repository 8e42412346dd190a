"""Answers by the backbone: those of a naive loop, in fixed groups that resume whole."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.data import answers as module
from headstart.data.chats import read_chats
from headstart.data.regenerate import RegenerateSettings, regenerate
from headstart.errors import UserError
from headstart.files import read_jsonl, write_jsonl
from headstart.heads.backbone import Backbone
from headstart.heads.chat import encode
from zoo import backbone, chats

SYSTEM = {"role": "system", "content": "sun"}


@pytest.fixture(scope="module")
def writer() -> Backbone:
    """A backbone that ends its answers now and then: the end token's weights lean towards what most states share."""
    made = backbone(tie_word_embeddings=False)
    with torch.no_grad():
        made.model.lm_head.weight[0] = 1.2 * made.model.lm_head.weight.mean(0) + 0.4
    return made


@pytest.fixture
def settings(tmp_path: Path) -> RegenerateSettings:
    rows: list[Any] = [{"messages": chat} for chat in chats(7)]
    rows[3]["messages"].insert(0, SYSTEM)
    rows.insert(2, {"prompt": "moon"})
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    return RegenerateSettings([str(tmp_path / "prompts.jsonl")], tmp_path / "out.jsonl", max_new_tokens=24, group=3)


def naive(writer: Backbone, settings: RegenerateSettings, keep_cut: bool) -> list[tuple[list[Any], str]]:
    """Greedy, a chat at a time and a whole forward a token."""
    found = []
    for one in read_chats(settings.input)[0]:
        said: list[Any] = []
        pending: list[Any] = []
        finish = "stop"
        for message in one.messages:
            if message["role"] == "assistant":
                continue
            pending.append(message)
            if message["role"] != "user":
                continue
            ids = encode(writer.tokenizer, said + pending, add_generation_prompt=True)
            start = len(ids)
            while len(ids) - start < settings.max_new_tokens and (
                len(ids) == start or ids[-1] not in writer.eos_token_ids
            ):
                with torch.no_grad():
                    ids.append(int(writer.model(torch.tensor([ids])).logits[0, -1].argmax()))
            ended = ids[-1] in writer.eos_token_ids
            text = writer.tokenizer.decode(ids[start:-1] if ended else ids[start:])
            if not text.strip():
                finish = "empty"
                break
            if ended or keep_cut:
                said += [*pending, {"role": "assistant", "content": text}]
            pending = []
            if not ended:
                finish = "length" if keep_cut else "dropped"
                break
        if said:
            found.append((said, finish))
    return found


@pytest.mark.parametrize("keep_cut", [False, True])
def test_greedy_answers_are_those_of_a_naive_loop(
    writer: Backbone, settings: RegenerateSettings, keep_cut: bool
) -> None:
    regenerate(writer, replace(settings, keep_cut=keep_cut))
    rows = list(read_jsonl(settings.out))
    expected = naive(writer, settings, keep_cut)
    assert [(row["messages"], row["finish"]) for row in rows] == expected
    assert {"stop", "length"} <= {finish for _, finish in naive(writer, settings, True)}  # both ends are seen
    assert any(len(said) > 2 for said, _ in expected)
    assert [row["source"] for row in rows] == sorted(row["source"] for row in rows)
    assert len({row["settings"] for row in rows}) == 1
    read_chats([settings.out], strict=True)


def test_sampled_answers_depend_on_seed_and_place_alone(writer: Backbone, settings: RegenerateSettings) -> None:
    def made(**changes: Any) -> list[Any]:
        regenerate(writer, replace(settings, temperature=1.5, keep_cut=True, restart=True, **changes))
        return [row["messages"] for row in read_jsonl(settings.out)]

    first = made(group=3)
    assert made(group=8) == first  # in fp32 a neighbour changes nothing
    assert made(group=3, seed=1) != first
    assert made(top_k=1) == [said for said, _ in naive(writer, settings, True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_interrupted_run_ends_with_the_same_bytes(
    writer: Backbone, dtype: torch.dtype, settings: RegenerateSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype != torch.float32:
        writer = Backbone(copy.deepcopy(writer.model).to(dtype), writer.tokenizer, name=writer.name)
    regenerate(writer, settings)
    whole = settings.out.read_bytes()
    settings.out.unlink()
    calls: list[list[int]] = []
    plain = module.decode_group

    def fragile(*arguments: Any, **options: Any) -> Any:
        calls.append(options["samples"])
        if len(calls) in (2, 5, 6):
            raise KeyboardInterrupt
        return plain(*arguments, **options)

    monkeypatch.setattr(module, "decode_group", fragile)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            regenerate(writer, settings)
        assert not settings.out.exists()
    regenerate(writer, settings)
    assert settings.out.read_bytes() == whole
    assert calls.count(calls[0]) == 1  # a finished group is not computed again
    assert calls[1] == calls[2]  # an interrupted one is, as a whole
    if dtype == torch.float32:
        assert calls[3:] == 5 * [calls[3]]  # from its first turn: one of the interruptions came in its second


def test_a_chat_whose_numbers_overflow_ends_there(
    writer: Backbone, settings: RegenerateSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = module.decode_group

    def overflowing(*arguments: Any, **options: Any) -> Any:
        answers = plain(*arguments, **options)
        return [[] if number == 2 else tokens for number, tokens in zip(options["samples"], answers, strict=True)]

    settings = replace(settings, keep_cut=True)
    expected = naive(writer, settings, True)
    monkeypatch.setattr(module, "decode_group", overflowing)
    regenerate(writer, settings)
    assert "row 3: left no token to choose" in capsys.readouterr().out
    assert [row["messages"] for row in read_jsonl(settings.out)] == [said for said, _ in expected[:2] + expected[3:]]


def test_the_same_again_is_there_already(
    writer: Backbone, settings: RegenerateSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    regenerate(writer, settings)
    monkeypatch.setattr(module, "decode_group", lambda *_, **__: pytest.fail("computed again"))
    regenerate(writer, settings)
    assert "already there" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"max_new_tokens was 24, is now 9.*--restart"):
        regenerate(writer, replace(settings, max_new_tokens=9))
    with pytest.raises(UserError, match="weights"):
        regenerate(backbone(seed=1), settings)


def test_turns_that_do_not_fit_or_are_refused(settings: RegenerateSettings, capsys: pytest.CaptureFixture[str]) -> None:
    made = backbone(max_position_embeddings=60)
    long = [{"role": "user", "content": "red " * 20}]
    write_jsonl(Path(settings.input[0]), [{"prompt": "red"}, long, [SYSTEM, *long], {"prompt": "blue"}])
    made.tokenizer = made.tokenizer.__class__(tokenizer_object=made.tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    made.tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    regenerate(made, replace(settings, keep_cut=True))
    assert [row["source"] for row in read_jsonl(settings.out)] == ["prompts.jsonl, row 1", "prompts.jsonl, row 4"]
    out = capsys.readouterr().out
    assert "row 2: ended at the backbone's context (turn 1 opens with 80 tokens)" in out
    assert "row 3: refused by the chat template" in out
    assert "no system" in out


def test_nothing_answered_is_an_error(settings: RegenerateSettings) -> None:
    """A backbone that never ends: every answer is cut, and nothing is written."""
    endless = backbone(tie_word_embeddings=False)
    with torch.no_grad():
        endless.model.lm_head.weight[0] = 0
    endless.model.generation_config.eos_token_id = 95
    with pytest.raises(UserError, match=r"no conversation has an answer; 8 rows ended early: 8 cut off at the limit"):
        regenerate(endless, replace(settings, max_new_tokens=1))
    assert not settings.out.exists()


def test_what_cannot_begin(writer: Backbone, settings: RegenerateSettings) -> None:
    with pytest.raises(UserError, match="no such file"):
        regenerate(writer, replace(settings, input=["missing.jsonl"]))
    without = backbone()
    without.tokenizer = None
    with pytest.raises(UserError, match="no tokenizer"):
        regenerate(without, settings)
    for changes in (
        {"group": 0},
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 2.0},
    ):
        with pytest.raises(UserError, match=next(iter(changes))):
            replace(settings, **changes)


def killed(writer: Backbone, settings: RegenerateSettings, kills: int) -> None:
    """Kill sampled runs at random moments behind their first parts; in the end the file is that of an undisturbed run.

    The runs are forks of this process, which has torch loaded already: most of their time they decode.
    """
    sampled = replace(settings, temperature=1.0, keep_cut=True, group=2)
    start = time.monotonic()
    regenerate(writer, replace(sampled, out=settings.out.with_name("undisturbed.jsonl")))
    took, source, done, resumed = time.monotonic() - start, random.Random(3), 0, 0
    parts = settings.out.with_name("out.jsonl.parts")
    while done < kills:
        child, wanted = os.fork(), source.choice([0, 1, 1, 2, 3])
        if child == 0:
            regenerate(writer, sampled)
            os._exit(0)
        while len(list(parts.glob("[0-9]*"))) < wanted and os.waitpid(child, os.WNOHANG)[0] == 0:
            time.sleep(0.001)
        time.sleep(source.random() * took / 8)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            done += os.waitpid(child, 0)[1] != 0
        resumed += 0 < len(list(parts.glob("[0-9]*"))) < 4
        if settings.out.exists() and not parts.exists():  # it was done before the kill: from the start again
            for path in settings.out.parent.glob("out.jsonl*"):
                path.unlink()
    regenerate(writer, sampled)
    assert resumed
    assert settings.out.read_bytes() == settings.out.with_name("undisturbed.jsonl").read_bytes()
    assert not parts.exists()


def test_two_kills(writer: Backbone, settings: RegenerateSettings) -> None:
    killed(writer, settings, 2)


@pytest.mark.slow
def test_twenty_kills(writer: Backbone, settings: RegenerateSettings) -> None:
    killed(writer, settings, 20)
