"""`headstart` from this checkout, whether it is installed or not."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NEEDED = ("torch", "transformers", "tokenizers", "accelerate", "datasets", "safetensors", "huggingface_hub", "yaml")


def missing() -> list[str]:
    """What this Python lacks."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def make_importable() -> None:
    """Let `import headstart` mean this checkout, with all its rooms.

    Where it is not installed in editable form, the rooms are laid out as links under build/ (scripts/type_layout.py),
    with as much of a distribution beside them as tells its version.
    """
    if _finds_this_checkout():
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "headstart"]:
        del sys.modules[name]  # another one, which the search has loaded
    sys.path.insert(0, str(ROOT / "scripts"))
    import type_layout

    type_layout.lay_out()
    place = ROOT / "build" / "checkout"
    text = (ROOT / "headstart" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'__version__ = "(.+)"', text)
    assert found, "headstart/__init__.py says no version"
    info = place / f"headstart-{found[1]}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: headstart\nVersion: {found[1]}\n", encoding="utf-8")
    if not (place / "headstart").exists():
        (place / "headstart").symlink_to(os.path.relpath(type_layout.LAYOUT, place))
    sys.path.insert(0, str(place))
    importlib.invalidate_caches()


def _finds_this_checkout() -> bool:
    try:
        found = importlib.util.find_spec("headstart.heads")
    except ModuleNotFoundError:
        return False
    place = found.origin if found else None
    return place is not None and Path(place).resolve() == ROOT / "heads" / "__init__.py"
