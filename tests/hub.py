"""A small Hub on loopback, for the real client: repositories, branches, commits, large files, and its refusals.

    with Hub() as hub: ...HF_ENDPOINT=hub.url, HF_TOKEN=hub.token...

Large files (`.safetensors` and the like) go by the LFS protocol, others inside the commit. What is asked of it stands
in `asked`, which large files arrived in `arrived`. `trouble` answers requests with an error, or cuts them off.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin", ".pt")
Trouble = Callable[[str, str], int | str | None]
"""Method and path to a status that is answered instead, "cut" to end the connection, or None."""


@dataclass
class Repository:
    """One of them; commits are mappings of paths to bytes."""

    private: bool = False
    gated: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Put files on a branch, beside those that are there; what is None goes away."""
        held = self.commits.get(self.branches.get(branch, ""), {})
        files = {path: content for path, content in (held | files).items() if content is not None}
        made = hashlib.sha1(repr((branch, len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[made], self.branches[branch] = files, made
        return made

    def at(self, revision: str) -> str | None:
        """The commit that a branch or a hash names."""
        found = self.branches.get(revision, revision)
        return found if found in self.commits else None


class Hub:
    """The server; `user` owns `token`, and every repository whose name starts with it."""

    user, token = "ada", "hf_" + "q" * 34

    def __init__(self, trouble: Trouble = lambda method, path: None):
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.arrived: list[str] = []
        self.trouble = trouble
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.http.shutdown()
        self.http.server_close()

    def add(self, name: str, **facts: Any) -> Repository:
        """A repository with an empty first commit."""
        made = self.repositories[name] = Repository(**facts)
        made.commit({".gitattributes": b""})
        return made

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """What a repository holds."""
        found = self.repositories[name]
        return found.commits[found.branches[revision]]


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def handle_one(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path))
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            trouble = hub.trouble(self.command, path)
            if trouble == "cut":
                self.close_connection = True
                return
            if isinstance(trouble, int):
                self.reply(trouble, {"error": "told to"})
                return
            self.reply(*self.answer(self.command, path, body))

        do_GET = do_HEAD = do_POST = do_PUT = handle_one

        def reply(self, status: int, body: Any = b"", headers: dict[str, str] | None = None) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def answer(self, method: str, path: str, body: bytes) -> tuple[Any, ...]:
            said = self.headers.get("Authorization")
            if path.startswith("/large/"):
                return _stored(hub, path, body)
            if said and said != f"Bearer {hub.token}":
                return 401, {"error": "no"}, {"X-Error-Message": "Invalid credentials in Authorization header"}
            for method_, pattern, serve in _ROUTES:
                if method_ in (method, "GET" if method == "HEAD" else "") and (match := re.fullmatch(pattern, path)):
                    return serve(hub, bool(said), match, body)  # type: ignore[no-any-return]
            return 404, {"error": f"nothing at {method} {path}"}

    return Handler


def _stored(hub: Hub, path: str, body: bytes) -> tuple[Any, ...]:
    hub.large[hashlib.sha256(body).hexdigest()] = body
    hub.arrived.append(path.removeprefix("/large/"))
    return 200, b"", {"ETag": '"x"'}


def _who(hub: Hub, known: bool, match: re.Match[str], body: bytes) -> tuple[Any, ...]:
    if not known:
        return 401, {"error": "no"}, {"X-Error-Message": "Invalid username or password."}
    return 200, {"name": hub.user, "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}}


def _create(hub: Hub, known: bool, match: re.Match[str], body: bytes) -> tuple[Any, ...]:
    said = json.loads(body)
    name = f"{said.get('organization') or hub.user}/{said['name']}"
    if not known:
        return 401, {"error": "no"}
    if not name.startswith(f"{hub.user}/"):
        words = "You don't have the rights to create a model under this namespace"
        return 403, {"error": words}, {"X-Error-Message": words}
    if name in hub.repositories:
        return 409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"}
    hub.add(name, private=said.get("visibility") == "private" or bool(said.get("private")))
    return 200, {"url": f"{hub.url}/{name}", "id": name}


def _found(hub: Hub, known: bool, name: str, revision: str | None = None) -> tuple[Any, ...] | Repository:
    """A repository, or the refusal that the Hub has for it."""
    found = hub.repositories.get(name)
    mine = known and name.startswith(f"{hub.user}/")
    if found is None or (found.private and not mine):
        # without a token the Hub does not say whether there is such a thing
        return (404 if known else 401), {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
    if revision is not None and found.at(revision) is None:
        return 404, {"error": f"Invalid rev id: {revision}"}, {"X-Error-Code": "RevisionNotFound"}
    return found


def _info(hub: Hub, known: bool, match: re.Match[str], body: bytes) -> tuple[Any, ...]:
    name, revision = match["name"], match.groupdict().get("revision") or "main"
    found = _found(hub, known, name, revision)
    if isinstance(found, tuple):
        return found
    sha = found.at(revision)
    files = [{"rfilename": path} for path in found.commits[str(sha)]]
    facts = {"private": found.private, "gated": "manual" if found.gated else False, "disabled": False}
    return 200, {"id": name, "modelId": name, "sha": sha, "siblings": files, "tags": [], **facts}


def _tree(hub: Hub, known: bool, match: re.Match[str], body: bytes) -> tuple[Any, ...]:
    found = _found(hub, known, match["name"], match["revision"])
    if isinstance(found, tuple):
        return found
    listed = []
    for path, content in found.commits[str(found.at(match["revision"]))].items():
        lfs = {"lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 100}}
        entry = {"type": "file", "path": path, "size": len(content), "oid": _blob(content)}
        listed.append(entry | (lfs if path.endswith(LARGE) else {}))
    return 200, listed


def _file(hub: Hub, known: bool, match: re.Match[str], body: bytes) -> tuple[Any, ...]:
    found = _found(hub, known, match["name"], match["revision"])
    if isinstance(found, tuple):
        return found
    if found.gated and not (known and match["name"].startswith(f"{hub.user}/")):
        words = f"Access to model {match['name']} is restricted and you are not in the authorized list."
        return 403, {"error": words}, {"X-Error-Code": "GatedRepo", "X-Error-Message": words}
    sha = str(found.at(match["revision"]))
    content = found.commits[sha].get(match["path"])
    if content is None:
        return 404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}
    return 200, content, {"ETag": f'"{_blob(content)}"', "X-Repo-Commit": sha}


def _branch(hub: Hub, known: bool, match: re.Match[str], body: bytes) -> tuple[Any, ...]:
    found = _found(hub, known, match["name"])
    if isinstance(found, tuple):
        return found
    if match["branch"] in found.branches:
        return 409, {"error": "Reference already exists"}
    found.branches[match["branch"]] = found.branches["main"]
    return 200, {}


def _modes(hub: Hub, known: bool, match: re.Match[str], body: bytes) -> tuple[Any, ...]:
    found = _found(hub, known, match["name"], match["revision"])
    if isinstance(found, tuple):
        return found
    held = found.commits[str(found.at(match["revision"]))]
    return 200, {
        "files": [
            {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular",
             "shouldIgnore": False, "oid": _blob(held[one["path"]]) if one["path"] in held else None}
            for one in json.loads(body)["files"]
        ]
    }  # fmt: skip


def _batch(hub: Hub, known: bool, match: re.Match[str], body: bytes) -> tuple[Any, ...]:
    """Where large files go; those that are there already go nowhere."""
    objects: list[dict[str, Any]] = []
    for one in json.loads(body)["objects"]:
        there = one["oid"] in hub.large
        place = {} if there else {"actions": {"upload": {"href": f"{hub.url}/large/{one['oid']}"}}}
        objects.append({"oid": one["oid"], "size": one["size"], **place})
    return 200, {"transfer": "basic", "objects": objects}


def _commit(hub: Hub, known: bool, match: re.Match[str], body: bytes) -> tuple[Any, ...]:
    found = _found(hub, known, match["name"], match["revision"])
    if isinstance(found, tuple):
        return found
    files: dict[str, Any] = {}
    for line in map(json.loads, body.splitlines()):
        value = line["value"]
        if line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            files[value["path"]] = hub.large[value["oid"]]
        elif line["key"].startswith("deleted"):
            files[value["path"]] = None
    sha = found.commit(files, match["revision"])
    return 200, {"commitUrl": f"{hub.url}/{match['name']}/commit/{sha}", "commitOid": sha, "success": True}


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


_NAME = r"(?P<name>[^/]+/[^/]+)"
_ROUTES: tuple[tuple[str, str, Callable[[Hub, bool, re.Match[str], bytes], tuple[Any, ...]]], ...] = (
    ("GET", "/api/whoami-v2", _who),
    ("POST", "/api/repos/create", _create),
    ("POST", "/api/validate-yaml", lambda hub, known, match, body: (200, {"errors": [], "warnings": []})),
    ("GET", rf"/api/models/{_NAME}", _info),
    ("GET", rf"/api/models/{_NAME}/revision/(?P<revision>.+)", _info),
    ("GET", rf"/api/models/{_NAME}/tree/(?P<revision>[^/]+)", _tree),
    ("POST", rf"/api/models/{_NAME}/branch/(?P<branch>.+)", _branch),
    ("POST", rf"/api/models/{_NAME}/preupload/(?P<revision>.+)", _modes),
    ("POST", rf"/api/models/{_NAME}/commit/(?P<revision>.+)", _commit),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", _batch),
    ("GET", rf"/{_NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _file),
)
