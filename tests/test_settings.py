"""Settings: strict files, overrides, and the same fields as help and flags."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from headstart.errors import UserError
from headstart.flags import add_flags, describe, given, spelled
from headstart.settings import build, dump, dump_text, load


@dataclass
class Optim:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: Literal["cosine", "linear"] = "cosine"


@dataclass
class Run:
    backbone: str
    steps: int = 100
    clip: float | None = 0.5
    taps: list[int] | None = None
    files: list[Path] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    wandb: bool = False
    optim: Optim = field(default_factory=Optim)
    depth: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"steps is {self.steps}; expected at least 1")


@pytest.fixture
def write(tmp_path):
    def written(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return written


def refusal(*arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(Run, *arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e-4", 1e-4), ("1E-4", 1e-4), ("1.e3", 1e3), ("-2e+3", -2e3), (".5", 0.5), ("3", 3.0), ("1_000", 1000.0)]
    + [('"1e-4"', 1e-4), (".inf", math.inf), ("+0.25", 0.25)],
)
def test_numbers(write, text, number):
    assert load(Run, write(f"backbone: x\noptim:\n  lr: {text}\n")).optim.lr == number
    assert load(Run, None, ["backbone=x", f"optim.lr={text.strip(chr(34))}"]).optim.lr == number


def test_whole_file(write):
    path = write(
        "backbone: models/no\nsteps: 1e3\nclip: null\ntaps: [2, 9]\nfiles: [a.jsonl, b.jsonl]\nwandb: yes\n"
        "weights: {a: 1}\noptim:\n  betas: [0.9, 0.99]\n  schedule: linear\ndepth: 4\n"
    )
    run = load(Run, path)
    assert run == Run(
        "models/no", 1000, None, [2, 9], [Path("a.jsonl"), Path("b.jsonl")], {"a": 1.0}, True,
        Optim(betas=(0.9, 0.99), schedule="linear"), 4,
    )  # fmt: skip
    assert isinstance(run.steps, int)
    assert isinstance(run.weights["a"], float)


def test_text_stays_text(write):
    assert load(Run, write("backbone: no")).backbone == "no"
    assert load(Run, write("backbone: 2025-01-31")).backbone == "2025-01-31"
    assert load(Run, write('backbone: "123"')).backbone == "123"
    assert load(Run, None, ["backbone=123"]).backbone == "123"
    assert load(Run, None, ["backbone=a=b: [c"]).backbone == "a=b: [c"
    assert load(Run, write("backbone: x\nsteps: 010")).steps == 10  # not octal


def test_overrides_win(write):
    path = write("backbone: x\nsteps: 5\noptim: {lr: 1}\n")
    run = load(Run, path, ["optim.lr=2", "taps=[1, 2]", "clip=null", "wandb=true", "depth=auto"])
    assert (run.optim.lr, run.steps, run.taps, run.clip, run.wandb, run.depth) == (2, 5, [1, 2], None, True, "auto")
    assert load(Run, path, {"optim.lr": 1e-4, "optim.betas": (0.5, 0.6)}).optim == Optim(1e-4, (0.5, 0.6))
    assert load(Run, path, {"optim": {"lr": 3}}).optim.lr == 3
    assert load(Run, write("backbone: x\noptim:\n"), ["optim.lr=2"]).optim.lr == 2


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("backbone: x\nstep: 3", ["recipe.yaml", "step", "did you mean steps?"]),
        ("backbone: x\noptim:\n  lrr: 3", ["recipe.yaml", "optim.lrr", "did you mean optim.lr?"]),
        ("backbone: x\nlr: 3", ["unknown setting lr", "did you mean optim.lr?"]),
        ("backbone: x\noptim.lr: 3", ["optim.lr", "block"]),
        ("backbone: x\nzzzzqq: 3", ["zzzzqq", "expected one of", "backbone", "optim.lr"]),
        ("backbone: x\n3: 3", ["unknown setting 3"]),
        ("steps: 3", ["recipe.yaml", "backbone is missing"]),
        ("backbone: 3", ["backbone is 3", "expected text", "quotes"]),
        ("backbone:", ["backbone is empty", "expected text"]),
        ("backbone: x\nsteps: many", ["recipe.yaml", "steps is 'many'", "expected a whole number (int)"]),
        ("backbone: x\nsteps: 1.5", ["steps is 1.5", "whole number"]),
        ("backbone: x\nsteps: .inf", ["steps", "whole number"]),
        ("backbone: x\nsteps: true", ["steps is True", "whole number"]),
        ("backbone: x\nwandb: 1", ["wandb is 1", "true or false"]),
        ("backbone: x\noptim:\n  lr: fast", ["optim.lr is 'fast'", "expected a number (float)"]),
        ("backbone: x\noptim: 3", ["optim is 3", "block with lr, betas, schedule"]),
        ("backbone: x\noptim: {schedule: cosin}", ["optim.schedule is 'cosin'", "cosine, linear", "mean cosine?"]),
        ("backbone: x\noptim: {betas: [1]}", ["optim.betas has 1 values", "2 values"]),
        ("backbone: x\noptim: {betas: [1, b]}", ["optim.betas[1] is 'b'", "a number"]),
        ("backbone: x\ntaps: 3", ["taps is 3", "a list"]),
        ("backbone: x\ntaps: [1, x]", ["taps[1] is 'x'", "whole number"]),
        ("backbone: x\nweights: {a: b}", ["weights.a is 'b'", "number"]),
        ("backbone: x\ndepth: deep", ["depth is 'deep'", "whole number", "auto"]),
        ("backbone: x\nbackbone: y", ["recipe.yaml, line 2", "backbone stands twice"]),
        ("backbone: x\noptim:\n  lr: 1\n  lr: 2", ["line 4", "lr stands twice"]),
        ("backbone: [x", ["recipe.yaml, line"]),
        ("backbone: \t@x", ["recipe.yaml"]),
        ("- 1\n- 2", ["recipe.yaml", "expected a mapping"]),
        ("backbone: !!python/object/apply:os.system [ls]", ["recipe.yaml, line 1"]),
        ("backbone: x\nsteps: 0", ["recipe.yaml", "steps is 0; expected at least 1"]),
    ],
)
def test_refused(write, text, parts):
    message = refusal(write(text))
    assert all(part in message for part in parts), message


def test_refused_overrides(write, tmp_path):
    path = write("backbone: x")
    assert "override: unknown setting optim.lrr; did you mean optim.lr?" in refusal(path, ["optim.lrr=1"])
    assert "override: steps is 'x', text; expected" in refusal(path, ["steps=x"])
    assert "key=value" in refusal(path, ["steps"])
    assert "no such file" in refusal(tmp_path / "other.yaml")
    assert "cannot be read" in refusal(tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    assert "recipe.yaml" in refusal(path)
    path.write_text("[" * 3000)
    assert "nested too deeply" in refusal(path)


@dataclass
class Loose:
    head: dict[str, Any] = field(default_factory=dict)


def test_overrides_of_anything(write):
    typed = ["head.c=1e-4", "head.d=[1, x]", "head.e=no", "head.f=true", "head.g=: ["]
    run = load(Loose, write('head: {a: "3", b: 3}'), typed)
    assert run.head == {"a": "3", "b": 3, "c": 1e-4, "d": [1, "x"], "e": "no", "f": True, "g": ": ["}
    assert load(Loose, write(dump_text(run))) == run


def test_dump_and_back(write):
    run = Run("1e-4", 7, None, [1], [Path("a b")], {"no": 1e-5}, True, Optim(3e-5, schedule="linear"), 2)
    assert load(Run, write(dump_text(run))) == run
    assert dump(run)["optim"] == {"lr": 3e-5, "betas": [0.9, 0.95], "schedule": "linear"}
    assert load(Run, write(dump_text(Run("on"))), ["steps=3"]) == dataclasses.replace(Run("on"), steps=3)


SOURCE = '''
"""A room's module. It must never be imported for its help."""
raise ImportError("imported")
from dataclasses import dataclass, field
from typing import ClassVar, Literal
from .{other} import Optim
Way = Literal["one", "two"]
WIDTH = 8

@dataclass
class Base:
    seed: int = 0
    """Where noise
    starts."""

@dataclass
class Settings(Base):
    """What a run takes."""
    prompt: str
    """What to ask; 100% yours."""
    kind: ClassVar[str] = "x"
    way: Way = "one"
    """Which way."""
    width: int = WIDTH
    """How wide."""
    stream: bool = True
    """Write as it comes."""
    taps: list[int] = field(default_factory=list)
    """Which layers."""
    undocumented: float | None = None
    optim: Optim = field(default_factory=lambda: Optim(lr=5e-4))
    """The optimizer."""
    made: int = field(init=False)
'''
OTHER = '''
raise ImportError("imported")
@dataclass
class Optim:
    lr: float = 1e-3
    """Peak rate."""
    warmup: int = 10
'''


@pytest.fixture
def source(tmp_path, monkeypatch):
    package = tmp_path / "sourced"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "main.py").write_text(SOURCE.format(other="parts"))
    (package / "parts.py").write_text(OTHER)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield describe("sourced.main", "Settings")
    sys.modules.pop("sourced", None)


def test_describe(source):
    seen = {one.key: (one.kind, one.default, one.help) for one in source}
    assert seen == {
        "seed": ("int", "0", "Where noise starts."),
        "prompt": ("str", None, "What to ask; 100% yours."),
        "way": ("Literal['one', 'two']", "'one'", "Which way."),
        "width": ("int", "8", "How wide."),
        "stream": ("bool", "True", "Write as it comes."),
        "taps": ("list[int]", "[]", "Which layers."),
        "undocumented": ("float | None", "None", ""),
        "optim.lr": ("float", "0.0005", "Peak rate."),
        "optim.warmup": ("int", "10", ""),
    }
    with pytest.raises(LookupError):
        describe("sourced.main", "Missing")


def test_defaults_are_spelled_as_they_are_typed():
    seen = {"None": "null", "True": "true", "'soft'": "soft", "(0.9, None)": "[0.9, null]", "1e-4": "0.0001"}
    seen |= {"Block(3)": "Block(3)", "Path('a.png')": "a.png"}
    assert {source: spelled(source) for source in seen} == seen
    assert spelled("0") == "0"


def test_flags(source):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, source, ("prompt",))
    assert given(parser.parse_args([]), source) == {}  # defaults are the class's own
    typed = parser.parse_args(["hello", "--no-stream", "--taps", "1", "2", "--optim.lr", "1e-4", "--way", "two"])
    assert given(typed, source) == {
        "prompt": "hello", "stream": False, "taps": ["1", "2"], "optim": {"lr": "1e-4"}, "way": "two",
    }  # fmt: skip
    text = parser.format_help()
    assert "100% yours." in text
    assert "{one,two}" in text
    assert "(default: 8)" in text


def test_flags_build():
    """Everything a command line types is text; the class says what it means."""
    typed = {"backbone": "x", "steps": "3", "taps": ["1", "2"], "optim": {"lr": "1e-4"}, "clip": "0.1", "depth": "5"}
    assert build(Run, typed) == Run("x", 3, 0.1, [1, 2], optim=Optim(1e-4), depth=5)
