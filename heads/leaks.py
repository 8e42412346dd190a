"""What must not travel with a head: paths of one machine, and secrets.

- `leaks`: what a folder's files hold of either, by file and place.
- `stripped`: JSON values with paths cut down to their last part.

Tensors are not read: of safetensors their header, of pickles what describes the tensors.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from .weights import PICKLES

_ROOTS = "home|Users|root|tmp|var|private|mnt|media|opt|srv|scratch|data|work|workspace|gpfs|lustre|nfs|content|kaggle"
_PART = r"/[^\s\"'`,;:()\[\]{}<>|/\\]+"
_PATH = re.compile(
    rf"(?<![\w/.:~<])(?:(?:~|/(?:{_ROOTS}))(?:{_PART})+|(?:{_PART}){{3,}})/?"
    r"|file://[^\s\"'`)]+|\b[A-Za-z]:\\+[^\s\"'`]+"
)
_VOCABULARIES = {"tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json"}
"""Files whose tokens may look like a path."""
_NUMBER = r"(?=[\w./+=-]*\d)"
_SECRETS = {
    "a token of the Hub": re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{30,}"),
    "an API key": re.compile(r"\bsk-(?:[A-Za-z]+-)*[A-Za-z0-9_-]{20,}|\bAIza[\w-]{35}|\bwandb_v1_\w{20,}"),
    "a token of GitHub": re.compile(r"\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}"),
    "a key of AWS": re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a token of Slack": re.compile(r"\bxox[abprs]-[\w-]{10,}"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "a signed token": re.compile(r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}"),
    "a password in an address": re.compile(r"\b[a-z][a-z+]*://[^/\s:@\"']+:[^/\s:@\"']+@"),
    "a secret by its name": re.compile(
        r"(?i)(?:api[_-]?key|access[_-]?key|secret|passw(?:or)?d|(?<![a-z])token|authorization|wandb[_-]?key)"
        rf"[\"']?\s*[:=]\s*[\"']?(?:bearer\s+)?{_NUMBER}[A-Za-z0-9_./+=-]{{16,}}"
    ),
}
_NAMES = re.compile(r"(TOKEN|API_?KEY|SECRET|PASSWORD|PASSWD)$", re.IGNORECASE)
_LEAST = 12  # characters of a value of the environment that is taken for a secret


def leaks(folder: Path) -> list[str]:
    """Paths of this machine and secrets in the files of a folder, a line each: file, line (or header), what it is.

    Of a secret no more than its first characters is told.
    """
    known = [value for name, value in os.environ.items() if _NAMES.search(name) and len(value) >= _LEAST]
    known += [token] if (token := _login()) else []
    return [
        f"{path.relative_to(folder)}, {place}: {what}"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        for place, what in _found(path, known)
    ]


def stripped(value: Any, notes: list[str], place: str = "") -> Any:
    """A JSON value without paths of this machine: of a text that is one, its last part.

    Args:
        notes: gets a line for each that was cut.
        place: the key that leads there, for the notes.
    """
    if isinstance(value, dict):
        return {key: stripped(one, notes, f"{place}.{key}".lstrip(".")) for key, one in value.items()}
    if isinstance(value, list):
        return [stripped(one, notes, f"{place}[{number}]") for number, one in enumerate(value)]
    if isinstance(value, str) and "\n" not in value and _PATH.match(value):
        notes.append(f"{place} is a path of this machine, and travels as {_last(value)}")
        return _last(value)
    return value


def _last(path: str) -> str:
    return PureWindowsPath(path).name if "\\" in path else PurePosixPath(path).name


def _found(path: Path, known: list[str]) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        place = "header" if path.suffix == ".safetensors" else f"line {number}"
        for what, pattern in _SECRETS.items():
            if match := pattern.search(line):
                yield place, f"{what} ({_masked(match[0])})"
        for value in known:
            if value in line:
                yield place, f"a secret of this environment ({_masked(value)})"
        if path.name not in _VOCABULARIES and (match := _PATH.search(line)):
            yield place, f"a path of this machine ({match[0][:80]})"


def _text(path: Path) -> str:
    """What can be read in a file, its tensors left out."""
    if path.suffix == ".safetensors":
        with open(path, "rb") as file:
            return _lines(file.read(int.from_bytes(file.read(8), "little")).decode("utf-8", "replace"))
    if path.suffix in PICKLES and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            inside = [archive.read(name) for name in archive.namelist() if name.endswith(".pkl")]
        return "\n".join(part.decode("latin-1") for part in inside)
    return path.read_bytes().decode("utf-8", "replace")


def _lines(header: str) -> str:
    """The header of safetensors: what its writer said, a line each, without the places of the tensors."""
    try:
        said = json.loads(header)
        return "\n".join([*said, *map(str, said.get("__metadata__", {}).values())])
    except (ValueError, AttributeError):
        return header


def _masked(secret: str) -> str:
    return f"{secret[:6]}…, {len(secret)} characters"


def _login() -> str | None:
    from huggingface_hub import get_token

    return get_token()
