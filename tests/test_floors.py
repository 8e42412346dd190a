"""The floors: no import upward, no circle, rooms import relatively, and the face costs nothing until it is used."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {"heads": 1, "inference": 2, "data": 3, "training": 4}
GROUND = {"errors", "files", "settings", "flags", "progress"}
FACE = 5


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by dotted name."""
    found = {f"headstart.{path.stem}": path for path in (ROOT / "headstart").glob("*.py")}
    for room in ROOMS:
        found |= {f"headstart.{room}.{path.stem}": path for path in (ROOT / room).glob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


def floor(name: str) -> int:
    parts = name.split(".")
    if len(parts) > 1 and parts[1] in ROOMS:
        return ROOMS[parts[1]]
    return 0 if len(parts) > 1 and parts[1] in GROUND else FACE


def imports(name: str) -> Iterator[tuple[str, bool, bool]]:
    """(module of ours, written relatively, needed at run time) for each import in a module, functions included."""
    tree = ast.parse(modules()[name].read_text(encoding="utf-8"))
    types_only = {
        inner for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for part in node.body for inner in ast.walk(part)
    }  # fmt: skip
    package = name if modules()[name].stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "headstart":
                    yield alias.name, False, node not in types_only
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                target = ".".join([*base, node.module] if node.module else base)
            else:
                target = node.module or ""
            if target.split(".")[0] == "headstart":
                for alias in node.names:  # `from . import chat` names a module
                    whole = f"{target}.{alias.name}"
                    yield whole if whole in modules() else target, bool(node.level), node not in types_only


def test_modules_are_found():
    assert len(modules()) > 15
    assert ("headstart.errors", True, True) in set(imports("headstart.files"))
    assert floor("headstart") == floor("headstart.verbs") == FACE
    assert floor("headstart.errors") == 0


@pytest.mark.parametrize("name", modules())
def test_no_import_upward(name):
    for target, relative, _ in imports(name):
        same_room = floor(target) == floor(name)
        assert floor(target) < floor(name) or same_room, f"{name} imports {target} from a floor above"
        in_room = floor(name) != FACE
        assert relative == in_room, f"{name} imports {target}: rooms import relatively, the face absolutely"
        assert target in modules(), f"{name} imports {target}, which is not there"


def test_no_circle():
    graph = {name: {target for target, _, needed in imports(name) if needed} - {name} for name in modules()}
    graph = {name: targets for name, targets in graph.items() if floor(name) != FACE}
    while graph:
        leaves = {name for name, targets in graph.items() if not targets & graph.keys()}
        assert leaves, f"these import each other in a circle, or one that does: {sorted(graph)}"
        graph = {name: targets for name, targets in graph.items() if name not in leaves}


@pytest.mark.parametrize("name", [f"headstart.{room}" for room in ROOMS])
def test_rooms_open_without_work(name):
    body = ast.parse(modules()[name].read_text(encoding="utf-8")).body
    assert len(body) == 1, f"{name}/__init__.py holds more than its docstring"
    assert isinstance(body[0], ast.Expr)


def test_the_face_imports_no_torch():
    code = (
        "import sys, headstart, headstart.cli, headstart.verbs, headstart.progress\n"
        "import headstart.heads, headstart.inference, headstart.data, headstart.training\n"
        "assert 'load_backbone' in dir(headstart)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'yaml', 'datasets'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_transformers_caches_are_touched_in_one_place():
    """`cache_utils` and the forward argument that was renamed belong to heads/cache.py and heads/backbone.py."""
    allowed = {"headstart.heads.cache", "headstart.heads.backbone"}
    for name, path in modules().items():
        if name not in allowed:
            found = re.search(r"cache_utils|DynamicCache|past_key_values", path.read_text(encoding="utf-8"))
            assert not found, f"{name} mentions {found and found[0]}"


def test_others_import_absolutely():
    for path in [*(ROOT / "tests").glob("*.py"), *(ROOT / "scripts").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}, line {node.lineno}"
