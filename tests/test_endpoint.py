"""Answers by an OpenAI-compatible endpoint: what is sent, what goes wrong, and what is never written."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server import Server, answer_to, reply

from headstart import cli
from headstart.data import endpoint as module
from headstart.data.chats import read_chats
from headstart.data.endpoint import Endpoint, EndpointSettings, wire
from headstart.data.regenerate import RegenerateSettings, regenerate
from headstart.errors import UserError
from headstart.files import read_jsonl, write_jsonl

SECRET = "sk-0123456789abcdef-very-secret"
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.001)
    monkeypatch.setenv("KEY", SECRET)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def settings(tmp_path: Path) -> RegenerateSettings:
    """20 prompts; every fourth is a chat of two questions, one of these behind a system message."""
    rows: list[Any] = [{"prompt": f"question {number}"} for number in range(20)]
    for number in range(0, 20, 4):
        rows[number] = [
            {"role": "user", "content": f"first {number}"},
            {"role": "assistant", "content": "somebody else's answer"},
            {"role": "user", "content": f"second {number}"},
        ]
    rows[4].insert(0, {"role": "system", "content": "be brief"})
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    return RegenerateSettings([str(tmp_path / "prompts.jsonl")], tmp_path / "out.jsonl", group=4)


def run(server: Server, settings: RegenerateSettings, **changes: Any) -> list[dict[str, Any]]:
    given = {"endpoint": server.url, "model": "tiny", "retries": 3, "timeout": 5.0, **changes}
    regenerate(Endpoint(EndpointSettings(**given)), settings)
    return list(read_jsonl(settings.out))


def expected(settings: RegenerateSettings) -> list[list[dict[str, Any]]]:
    """What the server answers, asked by hand."""
    found = []
    for one in read_chats(settings.input)[0]:
        said: list[dict[str, Any]] = []
        for message in one.messages:
            if message["role"] != "assistant":
                said.append(message)
            if message["role"] == "user":
                said.append({"role": "assistant", "content": answer_to(said)})
        found.append(said)
    return found


def test_each_turn_is_answered_behind_its_own_answers(settings: RegenerateSettings) -> None:
    with Server() as server:
        rows = run(server, settings)
    assert [row["messages"] for row in rows] == expected(settings)
    assert {row["finish"] for row in rows} == {"stop"}
    assert rows[4]["messages"][0] == {"role": "system", "content": "be brief"}
    assert len(server.requests) == 25
    assert server.requests[0] == {
        "model": "tiny", "max_tokens": 512, "temperature": 0.0, "messages": server.requests[0]["messages"],
    }  # fmt: skip
    record = json.loads(settings.out.with_name("out.jsonl.settings.json").read_text())
    assert record["settings"]["model"] == "tiny"
    assert record["notes"]["endpoint"] == server.url
    assert "backbone" not in record["settings"]
    read_chats([settings.out], strict=True)


@pytest.mark.parametrize(
    "kind",
    [(429, {"error": "slow down"}), (500, "oh"), (503, {"detail": "starting"}), (408, ""), "half", "half_chunk", "gone",
     "nonsense", (200, "<html>busy</html>"), (200, ""), (200, {"choices": []}), (200, []), (200, {"error": "x"}),
     (200, {"choices": [{"message": None}]}), (200, {"choices": [{"message": {"content": 3}}]}), (200, "[" * 100000),
     reply("partly", "abort"), (200, '{"choices":[{"message":{"content":"\\ud83d"}}]}')],
)  # fmt: skip
def test_passing_trouble_changes_nothing(kind: Any, settings: RegenerateSettings) -> None:
    with Server(lambda number, _: kind if number % 3 == 1 else None) as server:
        rows = run(server, settings, retries=8)
    assert [row["messages"] for row in rows] == expected(settings)
    asked = Counter(json.dumps(request) for request in server.requests)
    assert len(asked) == 25
    assert len(server.requests) > 25


@pytest.mark.parametrize("kind", ["hang", "drip"])
def test_an_answer_that_does_not_come_is_asked_for_again(kind: str, settings: RegenerateSettings) -> None:
    with Server(lambda number, _: kind if number in (0, 5, 7) else None) as server:
        start = time.monotonic()
        rows = run(server, settings, timeout=0.4)
    assert time.monotonic() - start < 2.9
    assert [row["messages"] for row in rows] == expected(settings)


def test_a_server_that_says_how_long_is_waited_for(settings: RegenerateSettings) -> None:
    busy = (429, "later", {"Retry-After": "0.5"})
    with Server(lambda number, _: busy if number == 0 else None) as server:
        start = time.monotonic()
        run(server, settings)
        assert time.monotonic() - start > 0.5
    assert module._pause("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert module._pause("soon") == module._pause(None) == 0


def test_requests_run_side_by_side(settings: RegenerateSettings) -> None:
    settings.group = 2  # more than one group is under way
    with Server(pause=0.05) as server:
        run(server, settings, concurrency=6)
    assert 3 <= server.most <= 6


def test_what_never_works_stops_the_run_and_keeps_what_is_done(settings: RegenerateSettings) -> None:
    def trouble(number: int, request: dict[str, Any]) -> Any:
        return (500, {"error": {"message": "CUDA error"}}) if "question 19" in str(request) and failing else None

    failing = True
    with Server(trouble) as server:
        with pytest.raises(UserError, match=r"HTTP 500: CUDA error, in 3 tries .*row 20.*the same command goes on"):
            run(server, settings, retries=2)
        assert not settings.out.exists()
        done = len(server.requests)
        failing = False
        rows = run(server, settings, retries=2)
        assert len(server.requests) - done < 25
    assert [row["messages"] for row in rows] == expected(settings)


def test_what_never_works_can_be_left_out(settings: RegenerateSettings, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(lambda _, request: (500, "oh") if "question 19" in str(request) else None) as server:
        rows = run(server, settings, retries=1, skip_failed=True)
    assert [row["messages"] for row in rows] == expected(settings)[:-1]
    assert "row 20: not answered by the endpoint (HTTP 500: oh)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "words"),
    [((401, {"error": {"message": "Incorrect API key"}}), "HTTP 401: Incorrect API key\nThe environment variable"),
     ((403, "no"), "HTTP 403: no"), ((302, "", {"Location": "http://127.0.0.1:9/v1"}), "HTTP 302.*leads to"),
     ((402, {"message": "pay first"}), "HTTP 402: pay first"), ((405, ""), "HTTP 405")],
)  # fmt: skip
def test_a_refusal_of_all_is_told_at_once(kind: Any, words: str, settings: RegenerateSettings) -> None:
    with Server(lambda *_: kind) as server, pytest.raises(UserError, match=f"(?s){words}"):
        run(server, settings, concurrency=1)
    assert len(server.requests) == 1


def test_a_model_that_is_not_there_is_told_with_those_that_are(settings: RegenerateSettings) -> None:
    with Server() as server:
        with pytest.raises(UserError, match=r"HTTP 404: The model `wrong` does not exist(?s:.*)tiny, other"):
            run(server, settings, model="wrong")
        with pytest.raises(UserError, match="--model: tiny, other"):
            run(server, settings, model=None)
        with pytest.raises(UserError, match="/v1"):
            run(server, settings, endpoint=server.url.removesuffix("/v1"))


def test_a_refusal_of_one_chat_is_told_with_it(
    settings: RegenerateSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    def trouble(number: int, request: dict[str, Any]) -> Any:
        if "question 1'" in str(request):
            return 400, {"error": {"message": "This model's maximum context length is 20 tokens"}}
        if "second 8" in str(request):
            return 400, {"object": "error", "message": "roles must alternate"}
        return reply("", "content_filter") if "question 2'" in str(request) else None

    with Server(trouble) as server:
        rows = run(server, settings)
    out = capsys.readouterr().out
    assert "row 2: ended at the backbone's context (answer 1: HTTP 400: This model's maximum" in out
    assert "row 9: refused by the endpoint (answer 2: HTTP 400: roles must alternate)" in out
    assert "row 3: refused by the endpoint (answer 1: finish_reason is content_filter)" in out
    assert len(rows) == 18
    assert [len(row["messages"]) for row in rows if row["source"].endswith("row 9")] == [2]


@pytest.mark.parametrize("keep_cut", [False, True])
def test_cut_answers_are_those_of_keep_cut(keep_cut: bool, settings: RegenerateSettings) -> None:
    cut, empty = reply("as far as it", "length"), reply(None)
    settings.keep_cut = keep_cut
    with Server(lambda _, asked: cut if "first 4'" in str(asked) else empty if "second" in str(asked) else None) as one:
        rows = run(one, settings)
    found = {row["source"].split()[-1]: row for row in rows}
    assert ("5" in found) is keep_cut
    if keep_cut:
        assert found["5"]["finish"] == "length"
        assert found["5"]["messages"][-1]["content"] == "as far as it"
    assert found["1"]["finish"] == "empty"


def test_reasoning_is_kept_and_not_sent_back(settings: RegenerateSettings) -> None:
    with Server(lambda _, asked: reply("yes", reasoning_content="hmm")) as server:
        rows = run(server, settings)
    assert rows[0]["messages"][1] == {"role": "assistant", "content": "yes", "reasoning_content": "hmm"}
    assert all("hmm" not in json.dumps(request) for request in server.requests)


def test_sampling_is_sent_and_recorded(settings: RegenerateSettings) -> None:
    sampled = replace(settings, temperature=0.7, top_p=0.9, top_k=20, seed=5)
    with Server() as server:
        run(server, sampled, body='{"min_p": 0.1, "chat_template_kwargs": {"enable_thinking": false}}')
    assert {request["temperature"] for request in server.requests} == {0.7}
    assert {request["top_p"] for request in server.requests} == {0.9}
    assert {request["top_k"] for request in server.requests} == {20}
    assert {request["min_p"] for request in server.requests} == {0.1}
    assert len({request["seed"] for request in server.requests}) == 25
    record = json.loads(settings.out.with_name("out.jsonl.settings.json").read_text())["settings"]
    assert (record["temperature"], record["seed"], record["body"]["min_p"]) == (0.7, 5, 0.1)


def test_tools_and_their_results_stay(tmp_path: Path, settings: RegenerateSettings) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "how is it in Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Sunny, they say."},
        {"role": "user", "content": "thanks"},
    ]
    write_jsonl(tmp_path / "prompts.jsonl", [{"messages": messages, "tools": tools}])
    with Server() as server:
        (row,) = run(server, settings)
    said = row["messages"]
    assert [one["role"] for one in said] == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert said[2]["tool_calls"] == [CALL]
    assert said[2]["weight"] == 0
    assert row["tools"] == tools
    assert said[4]["content"] == answer_to(server.requests[0]["messages"]) != "Sunny, they say."
    sent = server.requests[1]
    assert sent["tools"] == tools
    assert sent["tool_choice"] == "none"
    assert sent["messages"][2]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
    assert "weight" not in sent["messages"][2]
    (again,), _ = read_chats([settings.out], strict=True)
    assert again.muted == (2,)


def test_calls_without_numbers_get_them() -> None:
    call = {"type": "function", "function": {"name": "a", "arguments": {}}}
    sent = wire(
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call, call]},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2", "name": "a"},
        ]
    )
    assert [one["id"] for one in sent[1]["tool_calls"]] == [sent[2]["tool_call_id"], sent[3]["tool_call_id"]]
    assert sent[2]["tool_call_id"] != sent[3]["tool_call_id"]


def test_the_key_is_sent_and_written_nowhere(
    tmp_path: Path, settings: RegenerateSettings, capfd: pytest.CaptureFixture[str]
) -> None:
    def echo(number: int, request: dict[str, Any]) -> Any:
        if number % 5 == 1:
            return 500, {"error": {"message": f"bad gateway for Bearer {SECRET}"}}
        if number % 5 == 2:
            return 400, {"error": {"message": f"key {SECRET} may not do that"}}
        return reply(f"you sent {SECRET}") if number % 5 == 3 else None

    with Server(echo) as server:
        with pytest.raises(UserError) as error:
            run(server, settings, api_key_env="KEY", retries=0, concurrency=1)
        rows = run(server, settings, api_key_env="KEY", skip_failed=True, retries=0)
    assert rows
    assert {one["Authorization"] for one in server.headers} == {f"Bearer {SECRET}"}
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    for text in (*written, str(error.value), *capfd.readouterr()):
        assert SECRET not in text
    with Server(lambda *_: (401, f"wrong key {SECRET}")) as server, pytest.raises(UserError) as error:
        run(server, replace(settings, restart=True), api_key_env="KEY")
    assert SECRET not in str(error.value)


def test_a_key_that_cannot_be_used_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, held in (
        (SECRET, None),
        ("sk_live_abc", None),
        ("KEY", "two words\nand lines"),
        ("KEY", ""),
        ("KEY", "ü"),
    ):
        if held is not None:
            monkeypatch.setenv("KEY", held)
        with pytest.raises(UserError) as error:
            Endpoint(EndpointSettings(endpoint="http://127.0.0.1:9/v1", model="x", api_key_env=given))
        assert "--api-key-env" in str(error.value)
        assert not {given, held} - {"KEY", None, ""} & set(str(error.value).split())
        assert given == "KEY" or given not in str(error.value)
    with pytest.raises(UserError, match="without name, password") as error:
        Endpoint(EndpointSettings(endpoint="https://me:hunter2@example.org/v1", model="x"))
    assert "hunter2" not in str(error.value)


def test_settings_that_cannot_work() -> None:
    for changes in (
        {"concurrency": 0}, {"retries": -1}, {"timeout": 0.0}, {"endpoint": "localhost:8000"}, {"endpoint": "http://"},
        {"endpoint": "http://a:b/v1"}, {"body": "{"}, {"body": "[1]"}, {"body": '{"model": "x"}'},
    ):  # fmt: skip
        with pytest.raises(UserError, match=next(iter(changes))):
            Endpoint(EndpointSettings(**{"endpoint": "http://127.0.0.1:9/v1", "model": "x", **changes}))  # type: ignore


def test_no_torch_is_loaded() -> None:
    """Answers by a server are had at once, on a machine without a GPU, too."""
    code = "import headstart.data.regenerate, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0


def test_nobody_there(settings: RegenerateSettings) -> None:
    with Server() as server:
        url = server.url
    with pytest.raises(UserError, match="no answer .*refused.*in 2 tries"):
        regenerate(Endpoint(EndpointSettings(endpoint=url, model="tiny", retries=1)), settings)
    assert not settings.out.exists()


def test_from_the_command_line(settings: RegenerateSettings, capsys: pytest.CaptureFixture[str]) -> None:
    verb = ["data", "regenerate", "--input", *settings.input, "--out", str(settings.out)]
    assert cli.main(verb) == 2
    assert "--backbone, or a server that has it with --endpoint" in capsys.readouterr().err
    assert cli.main([*verb, "--backbone", "none", "--model", "x"]) == 2
    with Server() as server:
        assert cli.main([*verb, "--endpoint", server.url, "--backbone", "tiny"]) == 0  # not loaded: there is none
    assert len(list(read_jsonl(settings.out))) == 20
    assert "20 conversations with 25 answers" in capsys.readouterr().out


RUN = """
import sys
from pathlib import Path
from headstart.data.endpoint import Endpoint, EndpointSettings
from headstart.data.regenerate import RegenerateSettings, regenerate
url, prompts, out = sys.argv[1:]
settings = EndpointSettings(endpoint=url, model="tiny", concurrency=3)
regenerate(Endpoint(settings), RegenerateSettings([prompts], Path(out), group=2))
"""


def started(tmp_path: Path, server: Server, settings: RegenerateSettings, out: Path) -> subprocess.Popen[bytes]:
    (tmp_path / "run.py").write_text(RUN)
    return subprocess.Popen([sys.executable, str(tmp_path / "run.py"), server.url, settings.input[0], str(out)])


def killed(tmp_path: Path, settings: RegenerateSettings, kills: int) -> None:
    """Kill runs at random moments; in the end the file is that of an undisturbed run."""
    undisturbed, out = tmp_path / "undisturbed.jsonl", tmp_path / "killed.jsonl"
    with Server(pause=0.02) as server:
        run(server, replace(settings, out=undisturbed, group=2))

        def start() -> subprocess.Popen[bytes]:
            return started(tmp_path, server, settings, out)

        source, done = random.Random(3), 0
        while done < kills:
            process, before = start(), len(server.requests)
            while process.poll() is None and len(server.requests) == before:
                time.sleep(0.002)
            time.sleep(source.random() * 0.12)
            process.send_signal(signal.SIGKILL)
            assert process.wait() in (0, -signal.SIGKILL)
            done += process.returncode != 0
            if (
                out.exists() and not (tmp_path / "killed.jsonl.parts").exists()
            ):  # it was done before the kill: from the start again
                for path in tmp_path.glob("killed.jsonl*"):
                    path.unlink()
        assert start().wait() == 0
    assert out.read_bytes() == undisturbed.read_bytes()
    assert not list(tmp_path.glob("*.parts"))


def test_two_kills(tmp_path: Path, settings: RegenerateSettings) -> None:
    killed(tmp_path, settings, 2)


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path, settings: RegenerateSettings) -> None:
    killed(tmp_path, settings, 20)


def test_ctrl_c_ends_at_once(tmp_path: Path, settings: RegenerateSettings) -> None:
    """Requests that are under way are not waited for."""
    with Server(lambda *_: "stall") as server:
        process = started(tmp_path, server, settings, settings.out)
        while not server.requests and process.poll() is None:
            time.sleep(0.01)
        start = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait() == -signal.SIGINT
        assert time.monotonic() - start < 20
