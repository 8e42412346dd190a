"""Lay the rooms out as one package of symlinks under build/types/headstart/, for mypy and pyright.

python scripts/type_layout.py && mypy
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = ROOT / "build" / "types" / "headstart"


def lay_out() -> None:
    """Make the layout from pyproject.toml's package-dir; links that lead nowhere go."""
    mapping = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    LAYOUT.mkdir(parents=True, exist_ok=True)
    for link in LAYOUT.iterdir():
        if not link.exists():
            link.unlink()
    for package, folder in mapping.items():
        if package == "headstart":
            for path in [*(ROOT / folder).glob("*.py"), ROOT / folder / "py.typed"]:
                _link(path)
        else:
            _link(ROOT / folder)


def _link(source: Path) -> None:
    place = LAYOUT / source.name
    if not place.exists():
        place.symlink_to(os.path.relpath(source, LAYOUT))


if __name__ == "__main__":
    lay_out()
