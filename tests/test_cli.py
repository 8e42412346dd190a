"""The command line: help at once, one message for the user, exit codes."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headstart import cli
from headstart.errors import UserError
from headstart.flags import describe
from headstart.verb import Verb
from headstart.verbs import VERBS

COMMAND = [sys.executable, "-m", "headstart"]


def run(*arguments: str, **options):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, **options)


def script(action: str) -> subprocess.CompletedProcess[str]:
    """A process whose verb `fetch` does something else."""
    return subprocess.run([sys.executable, "-c", ACTING.format(action)], capture_output=True, text=True, timeout=60)


ACTING = """
import dataclasses, sys, time, warnings
import headstart.cli as cli
cli.VERBS["fetch"] = dataclasses.replace(cli.VERBS["fetch"], run=lambda settings: {})
sys.exit(cli.main(["fetch", "x"]))
"""


@pytest.fixture
def verb(monkeypatch):
    """Put a verb of one's own into the table."""

    def put(action) -> None:
        monkeypatch.setitem(VERBS, "fetch", Verb(action, "A test.", VERBS["fetch"].settings, ("name",)))

    return put


def told(capsys, *arguments: str) -> str:
    """What a refused command says; one message and nothing else."""
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("headstart: ")
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize("arguments", [["--help"], *([*name.split(), "--help"] for name in VERBS)], ids=" ".join)
def test_help_answers_at_once(arguments):
    """In under 0.3 s of a core; the clock on the wall would measure what else runs on this machine."""
    taken = []
    while len(taken) < 5 and not any(seconds < 0.2 for seconds in taken):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run(*arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert min(taken) < 0.3


@pytest.mark.parametrize("name", VERBS)
def test_help_teaches(name, capsys):
    assert cli.main([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    verb = VERBS[name]
    assert verb.summary in text
    assert verb.examples
    for example in verb.examples:
        assert re.match(rf"(accelerate launch( --\w+ \S+)* -m )?headstart {name}\b", example)
        assert example in text
    squeezed = " ".join(text.split())
    for settings in verb.settings:
        for setting in describe(*settings.split(":")):
            assert setting.help, f"{settings}: {setting.key} has no docstring"
            assert setting.key in verb.positional or setting.flag in text or f"--no-{setting.flag[2:]}" in text
            assert setting.help.split(". ")[0][:40] in squeezed
    assert len(text.splitlines()) > 5


def test_the_overview_names_every_verb(capsys):
    for arguments in ([], ["--help"], ["-h"], ["help"]):
        assert cli.main(arguments) == 0
        text = capsys.readouterr().out
        assert all(f"headstart {name}" in text and verb.summary in text for name, verb in VERBS.items())
    assert cli.main(["data", "--help"]) == 0
    text = capsys.readouterr().out
    assert "headstart data synthesize" in text
    assert "headstart generate" not in text
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "headstart 0.1.0\n"


def test_what_was_meant(capsys):
    assert "did you mean generate?" in told(capsys, "genrate", "x")
    assert "did you mean data synthesize?" in told(capsys, "data", "synthesise")
    assert "did you mean data synthesize?" in told(capsys, "synthesize")
    assert "there is fetch, " in told(capsys, "xyzzy")
    assert "did you mean --max-new-tokens?" in told(capsys, "generate", "--max-tokens", "3", "hello")
    assert "takes no --max-new" in told(capsys, "generate", "--max-new", "3", "hello")  # no silent abbreviations
    assert "takes no 'two'" in told(capsys, "fetch", "one", "two")
    assert "comes after a verb" in told(capsys, "--backbone", "x", "generate")
    assert "--folder" in told(capsys, "fetch", "smollm2-135m", "--folder")


def test_values_are_checked(capsys):
    assert "name is missing" in told(capsys, "fetch")
    assert "generate --backbone: backbone is missing" in told(capsys, "generate", "hello")
    message = told(capsys, "generate", "hello", "--backbone", "b", "--max-new-tokens", "many")
    assert "--max-new-tokens" in message
    assert "'many'" in message
    assert "whole number (int)" in message
    message = told(capsys, "generate", "hello", "--backbone", "b", "--dtype", "bfloat")
    assert "choose one of float32, bfloat16, float16; did you mean bfloat16?" in message


def test_settings_arrive(verb, capsys):
    seen = []
    verb(seen.append)
    assert cli.main(["fetch", "smollm2-135m", "--folder", "a b"]) == 0
    assert (seen[0].name, seen[0].folder) == ("smollm2-135m", Path("a b"))
    assert cli.main(["fetch", "--folder=x", "--", "-dash"]) == 0
    assert (seen[1].name, seen[1].folder) == ("-dash", Path("x"))
    assert cli.main(["fetch", "--folder", "x", "-"]) == 0
    assert cli.main(["fetch", "-5"]) == 0
    assert [one.name for one in seen[2:]] == ["-", "-5"]


def test_how_it_ends(verb, capsys):
    def refuse(settings):
        raise UserError(f"{settings.name}: no such thing; do that")

    def interrupt(settings):
        raise KeyboardInterrupt

    verb(refuse)
    assert told(capsys, "fetch", "x") == "headstart: x: no such thing; do that\n"
    verb(interrupt)
    assert cli.main(["fetch", "x"]) == 130
    assert capsys.readouterr().err.count("\n") == 1
    verb(lambda settings: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a fault of ours is no user error
        cli.main(["fetch", "x"])
    verb(lambda settings: __import__("headstart.inference.nowhere"))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["fetch", "x"])
    verb(lambda settings: __import__("headstart.cellar.wine"))  # a room that is not there
    assert "pip install -e ." in told(capsys, "fetch", "x")


def test_notes_are_one_line():
    done = script("warnings.warn('cut to 3', stacklevel=1)")
    assert (done.returncode, done.stderr) == (0, "headstart: note: cut to 3\n")


def test_as_a_process():
    done = run("fetch", "nothing-of-this-name")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    for module in ("headstart", "headstart.cli"):
        done = subprocess.run([sys.executable, "-m", module, "fetch"], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (2, "")


def acting(action: str) -> subprocess.Popen[str]:
    code = ACTING.format(action)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_reader_that_goes_away():
    with acting("print('x' * 1_000_000)") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_control_c():
    process = acting("(print('ready', flush=True), time.sleep(60))")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.count("\n") == 1
    assert "interrupted" in errors
