"""A server on loopback that speaks the OpenAI protocol, and misbehaves as it is told.

    with Server(trouble=lambda number, request: "429") as server: ...server.url...

Its answer to a chat is `answer_to(messages)`: a text that depends on all that was said. `python tests/server.py PORT`
serves well, for tests whose process is killed.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

Trouble = Callable[[int, dict[str, Any]], Any]


def answer_to(messages: list[dict[str, Any]]) -> str:
    said = json.dumps([[one["role"], one.get("content")] for one in messages])
    return f"answer {hashlib.sha256(said.encode()).hexdigest()[:8]} to {messages[-1]['content']}"


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # with the usual five a busy client waits a second for its connection


class Server:
    """Args:
    trouble: (number of the request from 0, its body) to a kind of trouble, or None for a good answer.
    """

    def __init__(self, trouble: Trouble = lambda number, request: None, port: int = 0, pause: float = 0.0):
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.trouble, self.pause, self.lock = trouble, pause, threading.Lock()
        self.active = self.most = 0
        self.http = Listener(("127.0.0.1", port), self._handler())
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.http.shutdown()
        self.http.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                known = self.path == "/v1/models"
                self._send(200 if known else 404, {"data": [{"id": "tiny"}, {"id": "other"}]} if known else {})

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    number = len(server.requests)
                    server.requests.append(request)
                    server.headers.append(dict(self.headers))
                    server.active += 1
                    server.most = max(server.most, server.active)
                time.sleep(server.pause)
                with server.lock:  # before it answers, as its client may ask again before this thread goes on
                    server.active -= 1
                self._answer(number, request)

            def _answer(self, number: int, request: dict[str, Any]) -> None:
                trouble = server.trouble(number, request)
                if self.path != "/v1/chat/completions" or request["model"] != "tiny":
                    self._send(404, {"error": {"message": f"The model `{request['model']}` does not exist."}})
                elif trouble is None:
                    self._send(200, reply(answer_to(request["messages"])))
                elif isinstance(trouble, dict):  # what it says instead
                    self._send(200, trouble)
                elif isinstance(trouble, tuple):  # status, body, headers
                    self._send(*trouble)
                else:
                    getattr(self, trouble)()

            def hang(self) -> None:
                time.sleep(3)

            def stall(self) -> None:
                time.sleep(60)

            def drip(self) -> None:
                self.send_response(200)
                self.end_headers()
                for _ in range(60):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.05)

            def half(self) -> None:
                body = json.dumps(reply("half of it")).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) // 2])

            def half_chunk(self) -> None:
                self.protocol_version = "HTTP/1.1"
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b'400\r\n{"choices"')
                self.close_connection = True

            def gone(self) -> None:
                self.close_connection = True

            def nonsense(self) -> None:
                self.wfile.write(b"\x16\x03\x01 this is no HTTP\r\n\r\n")

            def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
                data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        return Handler


def reply(text: str | None, finish: str = "stop", **more: Any) -> dict[str, Any]:
    """The body of a good response."""
    message = {"role": "assistant", "content": text, **more}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"id": "x", "object": "chat.completion", "choices": [choice], "usage": {"completion_tokens": 7}}


if __name__ == "__main__":
    Server(port=int(sys.argv[1]), pause=0.01).http.serve_forever()
