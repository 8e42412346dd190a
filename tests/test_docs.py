"""What README.md and docs/ tell people to type is true.

Convention, for fenced blocks in Markdown:

- In every block marked `sh`, each line that starts with `headstart` is read by the command line (verb, flags, values;
  for `train` the recipe and its overrides, too) without being run, and each script that is called has to exist.
- Every block marked `python` has to compile, except `python sketch`.
- A block marked `sh run` or `python run` is run, the blocks of a page one after another in one folder that holds copies
  of configs/ and data/shipped/. There `smollm2-135m` stands for a tiny random backbone, so that a run takes seconds.
- Blocks without a language, or marked `text`, are output or a sketch.

Links between pages have to lead somewhere.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import zoo
from headstart import cli
from headstart.errors import UserError
from headstart.training.recipe import load_recipe

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SHELL = {"sh", "bash", "shell"}

Block = tuple[str, str, str]  # language, the word behind it, the text


def blocks(text: str) -> list[Block]:
    found = []
    for indent, info, body in FENCE.findall(text):
        language, mark, *_ = [*info.split(), "", ""]
        lines = [line.removeprefix(indent) for line in body.splitlines()]
        found.append((language, mark, "\n".join(lines) + "\n"))
    return found


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block as words, each up to its first pipe, redirection or `&&`."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        end = next((i for i, word in enumerate(words) if re.match(r"[|<>&]|\d>", word)), len(words))
        if words:
            found.append(words[:end])
    return found


def check(words: list[str]) -> None:
    """Refuse a command that the command line would refuse before it starts to work."""
    if words[0] == "headstart":
        cli.read(words[1:])
        if words[1] == "train" and "--help" not in words:
            load_recipe(words[2], [word for word in words[3:] if "=" in word and not word.startswith("-")])
    script = words[1] if words[0] in ("bash", "sh", "python") and len(words) > 1 else words[0]
    if script.removeprefix("./").startswith("scripts/"):
        assert (ROOT / script).is_file(), f"{script} is not there"


def test_the_convention(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (
        "x\n```sh run\nheadstart fetch \\\n  smollm2-135m | head\n# a comment\nA=1 scripts/setup.sh dev >x\n```\n"
        "  ```python\n  x = 1\n  if x:\n      y\n  ```\n```\noutput\n```\n"
    )
    found = blocks(text)
    assert [one[:2] for one in found] == [("sh", "run"), ("python", ""), ("", "")]
    assert found[1][2] == "x = 1\nif x:\n    y\n"
    assert commands(found[0][2]) == [["headstart", "fetch", "smollm2-135m"], ["scripts/setup.sh", "dev"]]
    for words in commands(found[0][2]):
        check(words)
    for wrong in ("headstart fech x", "headstart fetch x --no-such-flag", "headstart generate x --backbone b --seed x"):
        with pytest.raises(UserError):
            check(wrong.split())
    with pytest.raises(AssertionError):
        check(["bash", "scripts/nothing.sh"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_code_are_well_formed(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for language, mark, text in blocks(page.read_text(encoding="utf-8")):
        if language in SHELL:
            for words in commands(text):
                check(words)
        if language == "python" and mark != "sketch":
            compile(text, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in link and not link.startswith("mailto:"):
            assert (page.parent / link).exists(), f"{page.name}: {link} is not there"


def test_every_recipe_can_be_read(monkeypatch):
    monkeypatch.chdir(ROOT)
    recipes = sorted((ROOT / "configs").glob("*.yaml"))
    for path in recipes:
        load_recipe(path)
        assert path.read_text(encoding="utf-8").startswith("#"), f"{path.name}: a recipe starts with what it is for"
    assert recipes


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("backbone") / "tiny"
    zoo.model(max_position_embeddings=2048).save_pretrained(folder)
    zoo.tokenizer().save_pretrained(folder)
    return folder


RUNNABLE = [page for page in PAGES if any(mark == "run" for _, mark, _ in blocks(page.read_text(encoding="utf-8")))]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_marked_blocks_run(page, backbone, tmp_path):
    work = tmp_path / "work"
    for folder in ("configs", "data/shipped"):
        shutil.copytree(ROOT / folder, work / folder)
    for recipe in work.glob("configs/*.yaml"):
        recipe.write_text(recipe.read_text(encoding="utf-8").replace("smollm2-135m", str(backbone)), encoding="utf-8")
    environment = {**os.environ, "HEADSTART_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    for language, mark, text in blocks(page.read_text(encoding="utf-8")):
        if mark != "run":
            continue
        text = text.replace("smollm2-135m", str(backbone))
        if language in SHELL:
            shell = f'headstart() {{ "{sys.executable}" -m headstart "$@"; }}\n'
            command = ["bash", "-euo", "pipefail", "-c", shell + text]
        else:
            command = [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{page.name}\n{text}\n{done.stdout}\n{done.stderr}"
