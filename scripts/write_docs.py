"""Write the tables of flags and settings into the pages of docs/, from the source that `--help` is made of.

    python scripts/write_docs.py

In a page, a table stands between two comments, the first of which names what it holds:

    <!-- flags of train -->                                          the flags of a verb
    <!-- keys of headstart.training.recipe:Recipe -->                the keys of a settings class
    <!-- keys of head in headstart.heads.medusa:MedusaConfig -->     the same as `head.KEY`, without what every head has
    <!-- fields of headstart.inference.stats:Stats -->               names and docstrings alone
    <!-- end -->

All else in a page is written by hand.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from headstart.flags import Setting, add_flags, describe, spelled
from headstart.verbs import VERBS

DOCS = Path(__file__).resolve().parent.parent / "docs"
COMMAND = "python scripts/write_docs.py"
TABLE = re.compile(r"^(<!-- (flags|keys|fields) of (.*?) -->\n)(.*?)^(<!-- end -->)$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^<!--", re.MULTILINE)
EVERY_HEAD = "headstart.heads.base:HeadConfig"

Row = Sequence[str]


def renewed(page: str) -> str:
    """The text of a page with its tables as they have to be.

    Raises:
        ValueError: a comment names no verb or class, or is not closed.
    """
    if len(COMMENT.findall(page)) != 2 * len(TABLE.findall(page)):
        raise ValueError("a comment is no `<!-- flags of VERB -->` and the like, and no end of one")
    return TABLE.sub(lambda found: f"{found[1]}\n{_table(found[2], found[3])}\n\n{found[5]}", page)


def _table(kind: str, name: str) -> str:
    if kind == "flags":
        return _lines(("flag", "what it does"), _flags(name))
    if kind == "fields":
        return _lines(("field", "what it is"), ((f"`{one.key}`", one.help) for one in _settings(name)))
    return _lines(("key", "default", "what it is"), _keys(name))


def _flags(name: str) -> Iterable[Row]:
    """What `--help` lists, in its order, but what goes without a flag first."""
    if name not in VERBS:
        raise ValueError(f"no verb {name!r}; there is {', '.join(VERBS)}")
    parser = argparse.ArgumentParser(add_help=False)
    for one in VERBS[name].settings:
        add_flags(parser, _settings(one), VERBS[name].positional)
    for action in sorted(parser._actions, key=lambda action: bool(action.option_strings)):
        value = str(action.metavar or "")
        value = {"+": f"{value} [{value} ...]", "*": f"[{value} ...]"}.get(str(action.nargs), value)
        spelling = ", ".join(action.option_strings) if action.nargs == 0 else " ".join([*action.option_strings, value])
        yield f"`{spelling}`", str(action.help).replace("%%", "%")


def _keys(name: str) -> Iterable[Row]:
    block, _, cls = name.rpartition(" in ")
    settings = _settings(cls)  # which says what is wrong with the name
    module, _, name = cls.partition(":")
    follows = _from_backbone(getattr(importlib.import_module(module), name))
    of_every_head = {one.key for one in _settings(EVERY_HEAD)} if block else set()
    for one in settings:
        if one.key not in of_every_head:
            default = "required" if one.default is None else f"`{spelled(one.default)}`"
            key = f"{block}.{one.key}" if block else one.key
            yield f"`{key}`", "from the backbone" if one.key in follows else default, one.help


def _from_backbone(cls: type) -> set[str]:
    """The fields of a head's config that are read off the backbone: the keys that its `shape` writes."""
    sources = (inspect.getsource(vars(one)["shape"]) for one in cls.__mro__ if "shape" in vars(one))
    return {name for source in sources for name in re.findall(r'"(\w+)":', source)}


def _settings(name: str) -> list[Setting]:
    module, _, cls = name.partition(":")
    try:
        return describe(module, cls)
    except (LookupError, ModuleNotFoundError) as error:
        raise ValueError(f"{name}: {error}") from None


def _lines(head: Row, rows: Iterable[Row]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    for path in sorted(DOCS.glob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = renewed(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"{path.name}: renewed")


if __name__ == "__main__":
    main()
