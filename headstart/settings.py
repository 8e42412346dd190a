"""Settings: nested dataclasses with a docstring under each field are the only schema.

- `load`: a strict YAML file and overrides (`a.b=c`) to an object; an unknown key names the nearest right one.
- `build`: a mapping to an object; text is read as the type it is meant for, so that flags need no types of their own.
- `dump`, `dump_text`: an object to a plain mapping, or to YAML that `load` reads back.

`headstart/flags.py` makes help and flags of the same fields.

YAML is read by its plain rules: `1e-4` is a number, `no` and `2025-01-31` are text, a key stands once.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import UserError, nearest

S = TypeVar("S")

INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def load(cls: type[S], path: str | Path | None = None, overrides: Mapping[str, Any] | Iterable[str] = ()) -> S:
    """Build `cls` from a YAML file (None: defaults only) and overrides, given as `a.b=c` texts or as `{"a.b": c}`.

    Raises:
        UserError: the file is missing or no YAML mapping, a key is unknown or stands twice, a value has the wrong type.
    """
    tree = {} if path is None else read_yaml(path)
    given = dict(overrides) if isinstance(overrides, Mapping) else dict(_split(text) for text in overrides)
    for key, value in given.items():
        _put(tree, key, value)
    source = "settings" if path is None else str(path)

    def origin(key: str) -> str:
        return "override" if any(key == name or key.startswith(name + ".") for name in given) else source

    return build(cls, tree, origin)


def build(cls: type[S], values: Mapping[str, Any], origin: Callable[[str], str] = lambda key: "settings") -> S:
    """Build a settings object from a nested mapping; `origin(key)` names where a key was written, for messages."""
    try:
        made = _Reader(cls, origin).block(cls, values, "")
    except _Refused as refused:
        raise UserError(f"{origin(refused.key)}: {refused}") from None
    assert isinstance(made, cls), f"{cls} was not built"
    return made


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; an empty file is an empty one.

    Raises:
        UserError: the file is missing, is not YAML, is no mapping, or has a key twice.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = yaml.load(text, Loader=_yaml_classes()[0])  # a SafeLoader with narrower rules
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: {error.problem or 'not YAML'}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML ({error})") from None
    except RecursionError:
        raise UserError(f"{path}: is nested too deeply to be read") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: holds {_kind(tree)}; expected a mapping of settings, one `key: value` a line")
    return tree


def dump(settings: Any) -> Any:
    """A settings object as plain mappings, lists and scalars."""
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        return {field.name: dump(getattr(settings, field.name)) for field in dataclasses.fields(settings) if field.init}
    if isinstance(settings, Mapping):
        return {key: dump(value) for key, value in settings.items()}
    if isinstance(settings, (list, tuple)):
        return [dump(value) for value in settings]
    return str(settings) if isinstance(settings, Path) else settings


def dump_text(settings: Any) -> str:
    """A settings object as YAML text that `load` reads back to an equal object."""
    import yaml

    return yaml.dump(dump(settings), Dumper=_yaml_classes()[1], sort_keys=False, allow_unicode=True)


@functools.cache
def _yaml_classes() -> tuple[Any, Any]:
    """A loader and a dumper with the rules above; made at first use, because help needs no YAML."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[Any, Any] = {}

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: list[Any] = []
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"key {key} stands twice", key_node.start_mark)
                seen.append(key)
            return super().construct_mapping(node, deep)

    class Dumper(yaml.SafeDumper):
        pass

    def number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | float:
        return _number(node.value)

    rules = {"null": "~|null|Null|NULL|", "bool": "true|True|TRUE|false|False|FALSE"}
    for name, pattern in {**rules, "int": INTEGER.pattern, "float": FLOAT.pattern}.items():
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"^(?:{pattern})$"), None)
    # text that our loader would take for a number is quoted; the dumper keeps its own rules for other readers
    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{FLOAT.pattern})$"), None)
    Loader.add_constructor("tag:yaml.org,2002:int", number)
    Loader.add_constructor("tag:yaml.org,2002:float", number)
    return Loader, Dumper


class _Refused(Exception):
    """A value that does not fit, and the dotted key it stands under."""

    def __init__(self, key: str, message: str):
        super().__init__(message)
        self.key = key


class _Reader:
    """Reads values as the types of a schema says; remembers the root, whose keys are what a typo is compared with."""

    def __init__(self, root: type, origin: Callable[[str], str]):
        self.root, self.origin = root, origin

    def block(self, cls: type, values: Any, key: str) -> Any:
        """A dataclass from a mapping; `key` is where it stands, dotted, empty for the root."""
        if not isinstance(values, Mapping):
            names = ", ".join(_fields(cls))
            raise _Refused(key, f"{key} is {_kind(values)}; expected a block with {names}")
        hints, fields = get_type_hints(cls), _fields(cls)
        for name in values:
            if name not in fields:
                raise _Refused(_join(key, name), self.unknown(_join(key, name)))
        missing = [name for name, field in fields.items() if name not in values and _required(field)]
        if missing:
            name = _join(key, missing[0])
            raise _Refused(name, f"{name} is missing; expected {_wanted(hints[missing[0]])}")
        read = {name: self.value(hints[name], value, _join(key, name)) for name, value in values.items()}
        try:
            return cls(**read)
        except UserError as error:  # a check of the class itself
            raise UserError(f"{self.origin(key)}: {error}") from None

    def value(self, kind: Any, value: Any, key: str) -> Any:
        """One value as `kind`: a plain type, Literal, union, list, tuple, dict or dataclass."""
        origin, arguments = get_origin(kind), get_args(kind)
        if kind is Any or kind is object:
            return _parsed(value) if isinstance(value, _Typed) else value
        if origin in (Union, types.UnionType):
            return self.union(kind, arguments, value, key)
        if origin is Literal:
            return self.choice(arguments, value, key)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return value if isinstance(value, kind) else self.block(kind, {} if value is None else value, key)
        if (origin or kind) in (list, tuple, dict, set):
            spelled = isinstance(value, str) and value.strip()[:1] in ("[", "{")
            return self.container(kind, _parsed(value) if spelled else value, key)
        read = _scalar(kind, value)
        if read is None:
            raise _Refused(key, f"{key} is {_kind(value)}; expected {_wanted(kind)}{_hint(kind, value)}")
        return read

    def union(self, kind: Any, kinds: Sequence[Any], value: Any, key: str) -> Any:
        if types.NoneType in kinds and (value is None or value == "null"):
            return None
        kinds = [one for one in kinds if one is not types.NoneType]
        if len(kinds) == 1:
            return self.value(kinds[0], value, key)
        # a value that is of one of the types already is not read as another
        for one in sorted(kinds, key=lambda one: not (isinstance(one, type) and type(value) is one)):
            try:
                return self.value(one, value, key)
            except _Refused:
                continue
        raise _Refused(key, f"{key} is {_kind(value)}; expected {_wanted(kind)}")

    def choice(self, choices: Sequence[Any], value: Any, key: str) -> Any:
        for one in choices:
            read = _scalar(type(one), value)
            if read is not None and read == one:
                return one
        near = _near(str(value), [str(one) for one in choices])
        raise _Refused(key, f"{key} is {_kind(value)}; choose one of {', '.join(map(str, choices))}{near}")

    def container(self, kind: Any, value: Any, key: str) -> Any:
        made, arguments = get_origin(kind) or kind, get_args(kind)
        if made is dict and isinstance(value, Mapping):
            names, kinds = arguments or (Any, Any)
            return {self.value(names, k, key): self.value(kinds, v, _join(key, k)) for k, v in value.items()}
        if kind == list[str] and isinstance(value, str):
            value = [value]  # `data.train=chats.jsonl`: a list of one
        if made is dict or not isinstance(value, (list, tuple, set)):
            raise _Refused(key, f"{key} is {_kind(value)}; expected {_wanted(kind)}")
        fixed = made is tuple and arguments and arguments[-1] is not ...
        kinds = arguments if fixed else (arguments[0] if arguments else Any,) * len(value)
        if len(kinds) != len(value):
            raise _Refused(key, f"{key} has {len(value)} values; expected {_wanted(kind)}")
        return made(self.value(one, v, f"{key}[{i}]") for i, (one, v) in enumerate(zip(kinds, value, strict=True)))

    def unknown(self, key: str) -> str:
        known = list(_dotted(self.root))
        if key in known:
            return f"{key} is written with dots; write it as a block, one level of indentation a dot"
        return f"unknown setting {key}{_near(key, known) or '; expected one of ' + ', '.join(known)}"


def _scalar(kind: Any, value: Any) -> Any:
    """`value` as a str, Path, bool, int or float, or None where it is nothing of that kind."""
    text = value.strip() if isinstance(value, str) else ""
    if kind is bool:
        return value if isinstance(value, bool) else WORDS.get(text.lower())
    if isinstance(value, bool):
        return None
    if kind is str:
        return str(value) if isinstance(value, str) else None
    if kind is Path:
        return Path(value) if isinstance(value, (str, Path)) else None
    if FLOAT.fullmatch(text):
        value = _number(text)
    if kind is float and isinstance(value, (int, float)):
        return float(value)
    if kind is int and isinstance(value, (int, float)):
        return int(value) if value == value // 1 else None
    return None


def _number(text: str) -> int | float:
    text = text.replace("_", "").lower()
    return int(text) if INTEGER.fullmatch(text) else float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _parsed(text: str) -> Any:
    """What a text such as `[1, 2]`, `{a: 1}` or `1e-4` spells; the text itself if it is no YAML."""
    import yaml

    try:
        return yaml.load(str(text), Loader=_yaml_classes()[0])
    except yaml.YAMLError:
        return str(text)


class _Typed(str):
    """The value of an `a.b=c` override: text of which only the schema knows what it is meant for."""


def _split(text: str) -> tuple[str, _Typed]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"override {text!r}: expected key=value, such as optim.lr=1e-4")
    return key.strip(), _Typed(value.strip())


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *blocks, name = key.split(".")
    for block in blocks:
        if not isinstance(tree.get(block), dict):
            tree[block] = {}
        tree = tree[block]
    tree[name] = value


def _fields(cls: type) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(cls) if field.init}


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _dotted(cls: type, prefix: str = "") -> Iterable[str]:
    """Every key of a schema, blocks and what is in them."""
    hints = get_type_hints(cls)
    for name in _fields(cls):
        yield _join(prefix, name)
        for kind in (hints[name], *get_args(hints[name])):
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                yield from _dotted(kind, _join(prefix, name))


def _join(prefix: str, name: Any) -> str:
    return f"{prefix}.{name}" if prefix else str(name)


def _near(key: str, known: Sequence[str]) -> str:
    """`; did you mean …?` with the known key of the same last part, else the nearest; empty if none is near."""
    last, own = {name.rpartition(".")[2]: name for name in reversed(known)}, key.rpartition(".")[2]
    near = last.get(own) or nearest(key, known) or last.get(nearest(own, last) or "")
    return f"; did you mean {near}?" if near else ""


def _kind(value: Any) -> str:
    """A value and what it is, in words."""
    names = {str: "text", _Typed: "text", bool: "true or false", int: "a number", float: "a number", list: "a list",
             dict: "a block"}  # fmt: skip
    return "empty" if value is None else f"{value!r}, {names.get(type(value), type(value).__name__)}"


def _wanted(kind: Any) -> str:
    """A type in words."""
    names: dict[Any, str] = {
        str: "text (str)",
        bool: "true or false (bool)",
        int: "a whole number (int)",
        float: "a number (float)",
        Path: "a path",
        types.NoneType: "null",
    }
    arguments = get_args(kind)
    if kind in names:
        return names[kind]
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_wanted(one) for one in arguments)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if (get_origin(kind) or kind) in (list, tuple, set):
        inside = {_wanted(one): None for one in arguments if one is not ...}
        count = f"{len(arguments)} values" if get_origin(kind) is tuple and ... not in arguments else "a list"
        return f"{count}, each {' or '.join(inside)}" if inside else count
    return "a block" if dataclasses.is_dataclass(kind) or (get_origin(kind) or kind) is dict else str(kind)


def _hint(kind: Any, value: Any) -> str:
    return ", so put it in quotes" if kind is str and isinstance(value, (bool, int, float)) else ""
