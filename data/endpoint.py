"""Answers by an OpenAI-compatible endpoint (vLLM, SGLang, or a service): a request an answer, with retries.

What goes wrong is one of three things. Of a passing kind (429, 5xx, a time-out, a lost connection, half an answer, no
JSON) it is tried again, later each time. About one conversation (400, 413, 422) it is told with that conversation.
Anything else (a key that is refused, a model or path that is not there) is about all of them, and ends the run.

The key goes into the header of a request and nowhere else: not into files, messages, or the text of an answer.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import os
import random
import re
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..files import text_hash
from .messages import Message
from .talks import Answer

PASSING = {408, 409, 425, 429}
OF_ONE = {400, 413, 422}
OWN = ("model", "messages", "tools", "stream", "n")
"""Fields of a request that `--body` cannot change."""
PAUSE, LONGEST = 1.0, 60.0  # seconds before the first retry, and at most
PIECE = 1 << 16  # bytes
SHORTEST_KEY = 12  # characters; such a word is no chance word of a text


@dataclass
class EndpointSettings:
    """Answers by a server instead of a backbone in this process."""

    endpoint: str | None = None
    """URL of an OpenAI-compatible endpoint (vLLM, SGLang, ...), such as http://localhost:8000/v1. It answers instead of
    a backbone: none is loaded, and --dtype, --device, --attention and --revision say nothing."""
    model: str | None = None
    """Name of the model there; without it, the name given as --backbone."""
    api_key_env: str | None = None
    """The environment variable that holds the API key. The key itself is written nowhere."""
    concurrency: int = 16
    """Requests that are under way at once."""
    retries: int = 8
    """How often a request is repeated after 429, 5xx, a time-out, a lost connection or a broken answer; the pauses grow
    from one second to a minute."""
    timeout: float = 600.0
    """Seconds that an answer may take."""
    body: str | None = None
    """Further fields of each request as JSON, such as '{"chat_template_kwargs": {"enable_thinking": false}}'. They are
    recorded with the other settings."""
    skip_failed: bool = False
    """Leave out (and list) a conversation whose request fails after all retries, instead of stopping there."""

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("retries", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}; it has to be at least {least}")
        if not 0 < self.timeout < float("inf"):
            raise UserError(f"timeout is {self.timeout}; it has to be above 0")


class Failed(Exception):
    """A try that may be repeated, and the seconds that the server asks to wait."""

    def __init__(self, words: str, pause: float = 0.0):
        super().__init__(words)
        self.pause = pause


class Endpoint:
    """One model of one server.

    Raises:
        UserError: the settings name no server or model, or no key where they promise one.
    """

    def __init__(self, settings: EndpointSettings):
        self.settings, self.url = settings, _checked_url(settings.endpoint or "")
        self.extra = _checked_body(settings.body)
        self._key = _key_of(settings.api_key_env)
        if not settings.model:
            raise UserError(f"{self.url}: which model? Name it with --model{self._served()}")
        self.model, self.stopped = settings.model, threading.Event()
        self.on_retry: Callable[[], None] = lambda: None

    def answer(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> Answer:
        """The answer to a prompt.

        Args:
            options: further fields of the request: max_tokens, temperature and the like.

        Raises:
            Failed: it was tried as often as the settings say.
            UserError: no request can be answered.
        """
        asked: dict[str, Any] = {"model": self.model, "messages": wire(messages), **options, **self.extra}
        if tools:
            asked |= {"tools": list(tools), "tool_choice": "none"}
        for tried in range(self.settings.retries + 1):
            try:
                return self._tried(asked)
            except Failed as failure:
                if tried == self.settings.retries or self.stopped.is_set():
                    raise
                self.on_retry()
                longest = min(LONGEST, PAUSE * 2**tried)
                self.stopped.wait(max(random.uniform(longest / 2, longest), failure.pause))
        raise AssertionError("the last try returns or raises")

    def _tried(self, asked: Mapping[str, Any]) -> Answer:
        status, body, pause = self._sent("/chat/completions", asked)
        if status == 200:
            return _answer_of(body)
        words = f"HTTP {status}: {_words(body)}"
        if status in PASSING or status >= 500:
            raise Failed(words, min(pause, self.settings.timeout))
        if status in OF_ONE:
            return Answer("", "context" if _is_length(body) else "rejected", words)
        raise UserError(f"{self.url}: {words}{self._hint(status)}")

    def _sent(self, path: str, payload: Any = None) -> tuple[int, str, float]:
        """Status, body, and the seconds that the server asks to wait.

        Raises:
            Failed: there is no whole answer.
        """
        headers = {"Content-Type": "application/json", "User-Agent": "headstart"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        deadline = time.monotonic() + self.settings.timeout
        try:
            with _OPENER.open(request, timeout=self.settings.timeout) as response:
                return response.status, self._read(response, deadline), 0.0
        except urllib.error.HTTPError as error:
            with error:
                return error.code, self._read(error, deadline), _pause(error.headers.get("Retry-After"))
        except TimeoutError:
            raise Failed(f"no answer within {self.settings.timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise UserError(f"{self.url}: its certificate is not trusted ({reason.verify_message})") from None
            if isinstance(reason, TimeoutError):
                raise Failed(f"no answer within {self.settings.timeout:g} s") from None
            raise Failed(self._safe(f"no answer ({type(reason).__name__}: {reason})")) from None

    def _read(self, response: Any, deadline: float) -> str:
        pieces = []
        while piece := response.read1(PIECE):
            pieces.append(piece)
            if time.monotonic() > deadline:
                raise TimeoutError
        return self._safe(b"".join(pieces).decode("utf-8", "replace"))

    def _safe(self, text: str) -> str:
        return text.replace(self._key, "***") if len(self._key) >= SHORTEST_KEY else text

    def _hint(self, status: int) -> str:
        if status in (401, 403):
            return "\nThe environment variable with the key is named by --api-key-env"
        if status == 404:
            return f"\nThe URL mostly ends in /v1, and --model is a name that the server knows{self._served()}"
        return "\nGive the URL that it leads to" if 300 <= status < 400 else ""

    def _served(self) -> str:
        """The names of the models that the server offers, if it tells."""
        try:
            status, body, _ = self._sent("/models")
            names = [str(one["id"]) for one in json.loads(body)["data"]] if status == 200 else []
        except (Failed, UserError, ValueError, KeyError, TypeError):
            return ""
        return f": {', '.join(names[:20])}" if names else ""


def wire(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the protocol has them: calls numbered, arguments as text, no reasoning of earlier turns."""
    sent, open_calls = list[dict[str, Any]](), list[str]()
    for message in messages:
        one: dict[str, Any] = {
            name: message[name] for name in ("role", "content", "name", "tool_call_id") if name in message
        }
        if calls := message.get("tool_calls"):
            one["tool_calls"] = [_call(call, f"call_{len(sent)}_{place}") for place, call in enumerate(calls)]
            open_calls = [call["id"] for call in one["tool_calls"]]
        elif message["role"] == "tool":
            answered = one.setdefault("tool_call_id", open_calls[0] if open_calls else f"call_{len(sent)}")
            open_calls = [call for call in open_calls if call != answered]
        sent.append(one)
    return sent


def seed_of(seed: int, number: int, turn: int) -> int:
    """The seed of an answer: 31 bits, which every server takes."""
    return int(text_hash(f"{seed} {number} {turn}")[:8], 16) >> 1


def _call(call: Mapping[str, Any], number: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    made = {"type": "function", "function": {"name": function["name"], "arguments": text}}
    return {"id": str(call.get("id") or number), **made}


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: the key is for one server."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_Stay)


def _answer_of(body: str) -> Answer:
    """The answer in the body of a response.

    Raises:
        Failed: there is none.
    """
    try:
        choice = json.loads(body)["choices"][0]
        said, finish = choice["message"], choice.get("finish_reason")
        text, thought = said.get("content"), said.get("reasoning_content") or said.get("reasoning") or ""
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise Failed(f"no answer in what it sent: {body[:80]!r}") from None
    if not isinstance(text, str | None) or not isinstance(thought, str) or finish in ("abort", "error"):
        raise Failed(f"no answer in what it sent: {body[:80]!r}")
    try:
        f"{text}{thought}".encode()
    except UnicodeEncodeError:
        raise Failed("half of a surrogate pair in the answer") from None
    if finish == "content_filter":
        return Answer("", "rejected", "finish_reason is content_filter")
    return Answer(text or "", "length" if finish == "length" else "stop", _length(body), thought)


def _length(body: str) -> str:
    tokens = (json.loads(body).get("usage") or {}).get("completion_tokens")
    return f"{tokens} tokens" if isinstance(tokens, int) else "as the endpoint says"


def _words(body: str) -> str:
    """What a server says of an error, in a line."""
    try:
        found = json.loads(body)
        while isinstance(found, dict):
            found = next((found[name] for name in ("error", "message", "detail") if found.get(name)), str(found))
        body = str(found)
    except (ValueError, RecursionError):
        pass
    return " ".join(body.split())[:300] or "(nothing is said)"


def _is_length(body: str) -> bool:
    return bool(
        re.search(r"context[ _]length|maximum context|longer than the maximum|exceeds? .*context", body, re.IGNORECASE)
    )


def _pause(given: str | None) -> float:
    """Seconds of a Retry-After header: a number, or a date."""
    try:
        return max(float(given or 0), 0.0)
    except ValueError:
        pass
    try:
        return max(email.utils.parsedate_to_datetime(str(given)).timestamp() - time.time(), 0.0)
    except ValueError:
        return 0.0


def _checked_url(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        whole = False
    if not whole:
        raise UserError("--endpoint is no URL such as http://localhost:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UserError(
            f"--endpoint {parts.scheme}://{parts.hostname}...: a URL without name, password and query is needed, as "
            "it is recorded; give a key by --api-key-env"
        )
    return url.rstrip("/").removesuffix("/chat/completions")


def _checked_body(body: str | None) -> dict[str, Any]:
    try:
        found = json.loads(body or "{}")
    except ValueError as error:
        raise UserError(f"--body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f'--body is a {type(found).__name__}; a JSON object is needed, such as {{"min_p": 0.1}}')
    if taken := [name for name in OWN if name in found]:
        raise UserError(f"--body has {', '.join(taken)}, which cannot be given that way")
    return found


def _key_of(variable: str | None) -> str:
    """The key that an environment variable holds. No message here repeats what was given: it may be the key itself."""
    if variable is None:
        return ""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
        raise UserError("--api-key-env takes the name of an environment variable, not the key itself")
    key = os.environ.get(variable, "").strip()
    if not key:
        name = variable if re.fullmatch(r"[A-Z0-9_]{1,40}", variable) else "it names"
        raise UserError(f"--api-key-env: the environment variable {name} is not set")
    if not re.fullmatch(r"[!-~]+", key):
        raise UserError("--api-key-env: the key holds blanks or signs that no header can carry")
    return key
