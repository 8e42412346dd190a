"""The command line: verbs found, flags read, help printed, errors told. What each verb does stands in `verbs.py`.

Help reads the settings classes from source, so that it imports no room and no torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from headstart.errors import UserError, nearest
from headstart.flags import Setting, add_flags, describe, given, spelled
from headstart.settings import build
from headstart.verb import Verb
from headstart.verbs import VERBS

SHADOWED = (
    "the folder headstart/ of a checkout hides the installed package. "
    "Run from another folder, or install the checkout: pip install -e ."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, 1 for a proof that failed, 2 for what the user can put right, 130 when
    interrupted."""
    warnings.formatwarning = lambda message, *_rest, **_more: f"headstart: note: {message}\n"
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return code
    except UserError as error:
        return _told(str(error), 2)
    except KeyboardInterrupt:
        return _told("interrupted", 130)
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ModuleNotFoundError as error:
        if not re.fullmatch(r"headstart\.[a-z]+", error.name or ""):
            raise
        return _told(f"{error.name} is missing: {SHADOWED}", 2)


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["--version"]:
        from headstart import __version__

        print(f"headstart {__version__}")
    elif (command := read(arguments)) is not None:
        verb, made = command
        return verb.run(*made) or 0
    return 0


def read(arguments: list[str]) -> tuple[Verb, list[object]] | None:
    """The verb of a command and the settings objects that its flags make; None if it asks for help, which is printed.

    Raises:
        UserError: there is no such verb or flag, or a value does not fit.
    """
    if arguments[:1] in (["help"], ["-h"], ["--help"]):
        arguments = [*arguments[1:], "--help"]
    name, rest = _verb(arguments)
    if name not in VERBS:
        print(_overview(name))
        return None
    verb = VERBS[name]
    described = [describe(*one.split(":")) for one in verb.settings]
    typed = _typed(name, verb, [one for settings in described for one in settings], rest)
    if typed is None:
        return None
    return verb, [
        build(_imported(one), given(typed, settings), _origin(name, verb))
        for one, settings in zip(verb.settings, described, strict=True)
    ]


def _verb(arguments: list[str]) -> tuple[str, list[str]]:
    """The verb and what follows it; a name that is no verb (empty, or a group such as `data`) asks for an overview."""
    if not arguments or arguments[0] in ("-h", "--help"):
        return "", []
    first, *rest = arguments
    if first.startswith("-"):
        raise UserError(f"{first} comes after a verb; see headstart --help")
    if first not in {name.split()[0] for name in VERBS if " " in name}:
        return _known(first), rest
    if not rest or rest[0].startswith("-"):
        return first, []
    return _known(f"{first} {rest[0]}"), rest[1:]


def _known(name: str) -> str:
    if name in VERBS:
        return name
    last = {verb.split()[-1]: verb for verb in VERBS}  # `prepare` for `data prepare`
    near = nearest(name, VERBS) or last.get(nearest(name.split()[-1], last) or "")
    hint = f"did you mean {near}?" if near else f"there is {', '.join(VERBS)}"
    raise UserError(f"no verb {name!r}; {hint}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def _typed(name: str, verb: Verb, settings: list[Setting], rest: list[str]) -> argparse.Namespace | None:
    """What was typed after the verb; None if that was a wish for help, which is printed."""
    parser = _Parser(
        prog=f"headstart {name}",
        usage=_usage(name, verb, settings),
        description=verb.summary,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=_width()),
        allow_abbrev=False,
        add_help=False,
    )
    if "-h" in rest or "--help" in rest:
        parser.epilog = _epilog(verb)
        add_flags(parser, settings, verb.positional)
        print(parser.format_help().rstrip())
        return None
    add_flags(parser, settings)
    cut = rest.index("--") if "--" in rest else len(rest)
    typed, words = parser.parse_known_args(rest[:cut])
    for word in words:
        if re.match("--|-[a-zA-Z]", word):
            flag = word.split("=")[0]
            near = nearest(flag, parser._option_string_actions)
            hint = f"did you mean {near}?" if near else f"see {parser.prog} --help"
            raise UserError(f"{name} takes no {flag}; {hint}")
    _place([*words, *rest[cut + 1 :]], name, verb, settings, typed)
    return typed


def _place(words: list[str], name: str, verb: Verb, settings: list[Setting], typed: argparse.Namespace) -> None:
    """Give the words without a flag to the settings that go without one; a list takes all that are left."""
    kinds = {one.key: one.kind for one in settings}
    for key in verb.positional:
        if words and not hasattr(typed, key):
            many = kinds[key].startswith("list")
            setattr(typed, key, words if many else words[0])
            words = [] if many else words[1:]
    if words:
        raise UserError(f"{name} takes no {words[0]!r}; see headstart {name} --help")


def _origin(name: str, verb: Verb) -> Callable[[str], str]:
    def origin(key: str) -> str:
        flag = "" if not key or key in verb.positional else " --" + key.replace("_", "-")
        return f"{name}{flag}"

    return origin


def _imported(name: str) -> type:
    """The class that `module:Class` names; this is where torch comes in."""
    import importlib

    module, cls = name.split(":")
    found: type = getattr(importlib.import_module(module), cls)
    return found


# --- what is printed ------------------------------------------------------------------------------------------------


def _overview(group: str) -> str:
    """All verbs, or those of a group, a line each."""
    lines = [f"  headstart {name:<18} {verb.summary}" for name, verb in VERBS.items() if name.startswith(group)]
    title = "Draft heads for a frozen causal LM: trained, verified, decoded with exactly."
    head = [title, ""] if not group else []
    first = next(verb.examples[0] for name, verb in VERBS.items() if name.startswith(group) and verb.examples)
    return "\n".join([*head, *lines, "", "Flags and examples: headstart VERB --help. For a start:", f"  {first}"])


def _usage(name: str, verb: Verb, settings: list[Setting]) -> str:
    kinds = {one.key: one.kind for one in settings}
    words = [f"[{key.upper()} ...]" if kinds[key].startswith("list") else key.upper() for key in verb.positional]
    return " ".join(["headstart", name, *words, "[flags]"])


def _epilog(verb: Verb) -> str:
    return "\n".join([*_recipe_lines(verb), "examples:", *(f"  {example}" for example in verb.examples)])


def _recipe_lines(verb: Verb) -> Iterator[str]:
    """The keys of the file that a verb reads, as `key=value` takes them."""
    if verb.recipe is None:
        return
    yield "recipe keys (in the file, or as key=value behind it):"
    for one in describe(*verb.recipe.split(":")):
        default = "required" if one.default is None else spelled(one.default)
        yield f"  {one.key}: {default}"
        yield from textwrap.wrap(one.help, _width() - 8, initial_indent=" " * 6, subsequent_indent=" " * 6)
    yield ""


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 120) - 2


def _told(message: str, code: int) -> int:
    print(f"headstart: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
