"""Help and flags of a settings class, read from its source without importing it, so that help needs no torch.

- `describe`: names, types, defaults and docstrings of the fields; blocks are spelled out with dots.
- `add_flags`: the same as flags of an `argparse` parser; `given` is what was typed, as `settings.build` takes it.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setting:
    """One field of a settings class, as its source writes it."""

    key: str  # dotted
    kind: str  # the annotation
    default: str | None  # source text; None: it has to be given
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")


def describe(module: str, name: str) -> list[Setting]:
    """The settings of class `name` of `module` (a dotted name), in the order they are written.

    Raises:
        LookupError: the module's file or the class is not there.
    """
    found = _settings(*_Source.of(module).find(name))
    return list({one.key: one for one in found}.values())  # what a class says again replaces what its base says


def add_flags(parser: argparse.ArgumentParser, settings: Iterable[Setting], positional: Sequence[str] = ()) -> None:
    """Add one flag a setting (`--max-new-tokens`, `--stream/--no-stream`); those named in `positional` go without."""
    for setting in settings:
        kind = setting.kind.removesuffix(" | None")
        text = f"{setting.help} {_default(setting)}".strip().replace("%", "%%")
        rest: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS}
        many = kind.startswith(("list", "tuple"))
        if setting.key in positional:
            rest |= {"metavar": setting.key.upper(), "nargs": "*" if many else "?"}
            parser.add_argument(setting.key, **rest)
        elif kind == "bool":
            parser.add_argument(setting.flag, dest=setting.key, action=argparse.BooleanOptionalAction, **rest)
        else:
            rest |= {"metavar": _metavar(kind)} | ({"nargs": "+"} if many else {})
            parser.add_argument(setting.flag, dest=setting.key, **rest)


def given(typed: argparse.Namespace, settings: Iterable[Setting]) -> dict[str, Any]:
    """What was typed of these settings, as a nested mapping."""
    tree: dict[str, Any] = {}
    for setting in settings:
        if hasattr(typed, setting.key):
            *blocks, name = setting.key.split(".")
            functools.reduce(lambda place, block: place.setdefault(block, {}), blocks, tree)[name] = getattr(
                typed, setting.key
            )
    return tree


def spelled(default: str) -> str:
    """A default's source as YAML and the command line spell it: `None` as null, `(1, 2)` as [1, 2], a path as text."""
    default = default.removeprefix("Path(").removesuffix(")") if default.startswith("Path('") else default
    try:
        value = ast.literal_eval(default)
    except ValueError:
        return default
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(spelled(repr(one)) for one in value) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def _default(setting: Setting) -> str:
    if setting.default is None:
        return "(required)"
    nothing = setting.default in ("None", "()", "[]", "{}", "''", "False")
    return "" if nothing else f"(default: {spelled(setting.default)})"


def _metavar(kind: str) -> str:
    if kind.startswith("Literal["):
        return "{" + ",".join(str(ast.literal_eval(one)) for one in _parts(kind)) + "}"
    inside = _parts(kind)[0] if kind.startswith(("list[", "tuple[")) else kind
    return {"int": "N", "float": "X", "Path": "PATH", "str": "TEXT"}.get(inside, "VALUE")


def _parts(kind: str) -> list[str]:
    """The arguments of an annotation such as `Literal['a', 'b']`, as source."""
    node = ast.parse(kind, mode="eval").body
    assert isinstance(node, ast.Subscript), f"{kind} has no arguments"
    inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return [ast.unparse(one) for one in inside]


@dataclass(frozen=True)
class _Source:
    """A module's source: what its top level defines, and where its imports lead."""

    module: str
    names: dict[str, ast.AST]

    @classmethod
    @functools.cache
    def of(cls, module: str) -> _Source:
        spec = importlib.util.find_spec(module)  # imports the room's __init__ alone, which is free of torch
        if spec is None or spec.origin is None:
            raise LookupError(f"no module {module}")
        names: dict[str, ast.AST] = {}
        for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                names[node.name] = node
            elif isinstance(node, ast.ImportFrom):
                names |= {alias.asname or alias.name: node for alias in node.names}
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                names[node.target.id] = node.value
        return cls(module, names)

    def find(self, name: str) -> tuple[_Source, ast.ClassDef]:
        """The class of this name, here or where it is imported from."""
        node = self.names.get(name)
        if isinstance(node, ast.ClassDef):
            return self, node
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("headstart")):
            path = importlib.util.resolve_name("." * node.level + (node.module or ""), self.module.rpartition(".")[0])
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            return _Source.of(path).find(original)
        raise LookupError(f"no class {name} in {self.module}")

    def resolved(self, node: ast.AST) -> ast.AST:
        """A name of this module's top level (`Method = Literal[...]`, `WIDTH = 8`) as what it stands for."""
        known = self.names.get(node.id) if isinstance(node, ast.Name) else None
        return known if isinstance(known, (ast.Constant, ast.Subscript, ast.List, ast.Tuple, ast.BinOp)) else node


def _settings(source: _Source, cls: ast.ClassDef, prefix: str = "") -> Iterator[Setting]:
    """Fields of a class, those of its bases first; the fields of a nested class in place of the block itself."""
    for base in cls.bases:
        if isinstance(base, ast.Name):
            yield from _settings(*source.find(base.id), prefix)
    following = [*cls.body[1:], None]
    for node, after in zip(cls.body, following, strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        kind = ast.unparse(source.resolved(node.annotation))
        if kind.startswith("ClassVar") or "init=False" in ast.unparse(node):
            continue
        key = prefix + node.target.id
        block = _block(source, kind)
        if block is not None:
            changed = _keywords(node.value)
            for one in _settings(*block, key + "."):
                yield replace(one, default=changed.get(one.key.removeprefix(key + "."), one.default))
        else:
            yield Setting(key, kind, _default_text(source, node.value), _docstring(after))


def _block(source: _Source, kind: str) -> tuple[_Source, ast.ClassDef] | None:
    name = kind.removesuffix(" | None")
    try:
        return source.find(name)
    except LookupError:
        return None


def _keywords(value: ast.AST | None) -> dict[str, str]:
    """The defaults that `field(default_factory=lambda: Block(a=1))` or `Block(a=1)` sets."""
    for node in ast.walk(value) if value is not None else ():
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id == "field"):
            return {one.arg: ast.unparse(one.value) for one in node.keywords if one.arg}
    return {}


def _default_text(source: _Source, value: ast.expr | None) -> str | None:
    """A field's default as source text; None if it has none."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field":
        options = {one.arg: one.value for one in value.keywords}
        made = options.get("default_factory")
        if isinstance(made, ast.Lambda):
            return ast.unparse(made.body)
        if made is not None:
            return {"list": "[]", "dict": "{}", "tuple": "()"}.get(ast.unparse(made), ast.unparse(made) + "()")
        value = options.get("default")
    return None if value is None else ast.unparse(source.resolved(value))


def _docstring(node: ast.AST | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(inspect.cleandoc(node.value.value).split())
    return ""
