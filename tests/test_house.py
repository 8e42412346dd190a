"""The house: folders, packages and their description say the same, and what is built is whole."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TOOL = SETUP["tool"]["setuptools"]
ROOMS = ["heads", "inference", "data", "training"]
NO_PACKAGES = {"tests", "docs", "scripts", "build", "dist", "runs"}


def test_folders_packages_and_mapping_agree():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - NO_PACKAGES
    assert folders == {"headstart", "configs", *ROOMS}
    mapping = {("headstart" if folder == "headstart" else f"headstart.{folder}"): folder for folder in folders}
    assert TOOL["package-dir"] == mapping
    assert sorted(TOOL["packages"]) == TOOL["packages"] == sorted(mapping)


def test_rooms_are_flat_and_complete():
    for folder in ("headstart", "configs", *ROOMS):
        nested = {path.parent for path in (ROOT / folder).rglob("*.py")} - {ROOT / folder}
        assert not nested, f"{nested}: a nested package would have to be listed, too"


def test_every_file_has_its_line():
    """The table of docs/architecture.md names every module of the package, and nothing else."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("## Files")[2].partition("\n## ")[0]
    lines = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for line in lines for name in re.findall(r"`([^`]+)`", line)}
    rooms = ("headstart", *ROOMS)
    found = {f"{path.parent.name}/{path.name}" for room in rooms for path in (ROOT / room).glob("*.py")}
    unnamed = {f"{room}/__init__.py" for room in ROOMS} | {"headstart/__main__.py"}
    assert {name for name in named if name.endswith(".py")} == found - unnamed
    assert all((ROOT / name).exists() for name in named)


def test_files_stay_small():
    """One noun a file, and one that can be read at a sitting."""
    for folder in ("headstart", *ROOMS, "scripts"):
        for path in (ROOT / folder).glob("*.py"):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, f"{path} wants to be two files"


def test_the_licence_is_the_whole_one():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert all(f"\n   {number}. " in text for number in range(1, 10))
    assert SETUP["project"]["license"] == "Apache-2.0"


def test_scripts_can_be_run():
    for path in [*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"]:
        assert os.access(path, os.X_OK), f"{path} is not executable"
        subprocess.run(["bash", "-n", path], check=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """sdist from a copy of the tree, wheel from the unpacked sdist: (sdist names, wheel path)."""
    folder = tmp_path_factory.mktemp("built")
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "runs", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, folder / "tree", ignore=ignored)
    (folder / "tree" / "heads" / "shipped").mkdir(exist_ok=True)
    (folder / "tree" / "heads" / "shipped" / "probe.safetensors").write_bytes(b"probe")
    (folder / "tree" / "configs" / "probe.yaml").write_text("probe: 1\n")
    (folder / "tree" / "data" / "shipped").mkdir(exist_ok=True)
    (folder / "tree" / "data" / "shipped" / "probe.jsonl.gz").write_bytes(b"probe")
    code = "import sys, setuptools.build_meta as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"

    def build(what: str, where: Path) -> Path:
        command = [sys.executable, "-c", code, what, str(folder)]
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return folder / done.stdout.splitlines()[-1]

    sdist = build("build_sdist", folder / "tree")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(folder / "unpacked", filter="data")
    return names, build("build_wheel", next((folder / "unpacked").iterdir()))


def test_the_sdist_holds_everything(built):
    names, _ = built
    wanted = {"pyproject.toml", "LICENSE", "README.md", "heads/shipped/probe.safetensors", "configs/probe.yaml"}
    wanted |= {"tests/test_house.py", "docs/architecture.md", "scripts/setup.sh", ".ci/run", "headstart/py.typed"}
    wanted |= {f"{room}/{path.name}" for room in (*ROOMS, "headstart") for path in (ROOT / room).glob("*.py")}
    assert wanted <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_the_wheel_holds_the_package_alone(built):
    _, wheel = built
    names = set(zipfile.ZipFile(wheel).namelist())
    rooms = {room: f"headstart/{room}" for room in ("configs", *ROOMS)} | {"headstart": "headstart"}
    wanted = {f"{place}/{path.name}" for room, place in rooms.items() for path in (ROOT / room).glob("*.py")}
    wanted |= {"headstart/py.typed", "headstart/configs/probe.yaml", "headstart/data/shipped/probe.jsonl.gz"}
    assert wanted <= names
    assert {name.split("/")[0] for name in names} == {"headstart", "headstart-0.1.0.dist-info"}
    assert not [name for name in names if "heads/shipped" in name]
    assert {name for name in names if name.endswith(".py")} == {name for name in wanted if name.endswith(".py")}


def test_the_wheel_works_from_another_folder(built, tmp_path):
    _, wheel = built
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    scripts = next((tmp_path / "site").glob("*.dist-info/entry_points.txt")).read_text()
    assert "headstart = headstart.cli:main" in scripts
    code = (
        "import headstart, importlib, pkgutil\n"
        "for room in ('configs', 'heads', 'inference', 'data', 'training'):\n"
        "    package = importlib.import_module(f'headstart.{room}')\n"
        f"    assert package.__file__.startswith({str(tmp_path)!r}), package.__file__\n"
        "from headstart.heads.backbone import Backbone\n"
        "assert headstart.Backbone is Backbone\n"
    )
    options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(tmp_path / "site")}, "timeout": 120}
    subprocess.run([sys.executable, "-c", code], check=True, **options)
    done = subprocess.run([sys.executable, "-m", "headstart", "--help"], capture_output=True, check=True, **options)
    assert b"headstart generate" in done.stdout


def test_a_checkout_that_hides_the_installed_package_says_so(built, tmp_path):
    _, wheel = built
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    shutil.copytree(ROOT / "headstart", tmp_path / "checkout" / "headstart")
    options = {"cwd": tmp_path / "checkout", "env": {**os.environ, "PYTHONPATH": str(tmp_path / "site")}}
    # without site, so that this environment's own editable install does not help out
    command = [sys.executable, "-S", "-m", "headstart", "data", "synthesize", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install -e ." in done.stderr
