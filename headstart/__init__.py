"""Draft heads for a frozen causal LM: trained, verified, and decoded with exactly.

    import headstart as hs

    backbone = hs.load_backbone("smollm2-135m")
    gen = hs.Generator(backbone, hs.load_head("runs/eagle3/head"))
    print(gen.generate("Why is the sky blue?", max_new_tokens=128).text)

Names are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstart.errors import UserError as UserError
    from headstart.heads.backbone import Backbone as Backbone
    from headstart.heads.format import load_head as load_head
    from headstart.heads.load import load_backbone as load_backbone
    from headstart.inference.engine import Engine as Engine
    from headstart.inference.generator import Generator as Generator
    from headstart.training.loop import train as train

__version__ = "0.1.0"

_HOMES = {
    "Backbone": "headstart.heads.backbone",
    "Engine": "headstart.inference.engine",
    "Generator": "headstart.inference.generator",
    "UserError": "headstart.errors",
    "load_backbone": "headstart.heads.load",
    "load_head": "headstart.heads.format",
    "train": "headstart.training.loop",
}

__all__ = ["Backbone", "Engine", "Generator", "UserError", "__version__", "load_backbone", "load_head", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headstart' has no attribute {name!r}")
    import importlib

    found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
