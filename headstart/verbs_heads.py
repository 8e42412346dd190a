"""The verbs of `heads/`: what each takes, and the function that turns files into arguments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headstart.verb import Verb


@dataclass
class FetchSettings:
    """A built-in backbone as a folder."""

    name: str
    """Which one: smollm2-135m."""
    folder: Path | None = None
    """Where to put it; without it, the cache ($HEADSTART_CACHE, or ~/.cache/headstart)."""


def fetch(settings: FetchSettings) -> None:
    from headstart.heads.fetch import fetch

    print(fetch(settings.name, folder=settings.folder))


@dataclass
class ExportSettings:
    """A head for another tool, or from one."""

    head: str
    """Folder, file or Hub id of the head, in any format that can be read."""
    to: str
    """The format: eagle, specforge, sglang, modelopt, vllm, speculators, medusa, medusa-v2, medusa-2, tensorrt-llm,
    hydra; or headstart, the own one."""
    out: Path
    """Folder to write; new or empty."""
    backbone: str | None = None
    """Its backbone, where a format holds something of it; without it, the one that the head names."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Number format of the weights; without it, that in which they are stored (with --backbone, the backbone's)."""


def export(settings: ExportSettings) -> None:
    import torch

    from headstart import load_backbone, load_head
    from headstart.heads.exchange import export_head
    from headstart.heads.layouts import BackboneNeededError
    from headstart.options import silence

    silence()
    if settings.to == "headstart":
        print(_own(settings))
        return
    head = load_head(settings.head)
    changed = head.config.adapter_hash != ""
    if changed and settings.to == "medusa-2":  # the one format that holds the changed backbone, too
        backbone = load_backbone(settings.backbone or head.config.backbone)
        head = load_head(settings.head, backbone, adapter=True)
    elif settings.backbone and not changed:
        head = load_head(settings.head, load_backbone(settings.backbone))
    if settings.dtype:
        head = head.to(getattr(torch, settings.dtype))
    try:
        folder = export_head(head, settings.to, settings.out)
    except BackboneNeededError:
        if settings.backbone or not head.config.backbone:
            raise
        folder = export_head(head.bind(load_backbone(head.config.backbone)), settings.to, settings.out)
    print(folder)


def _own(settings: ExportSettings) -> Path:
    """The head in headstart's own format, with what it says of its training."""
    import torch

    from headstart import load_backbone, load_head
    from headstart.heads.exchange import check_empty
    from headstart.heads.format import provenance_of, save_head

    check_empty(settings.out)
    backbone = load_backbone(settings.backbone) if settings.backbone else None
    dtype = getattr(torch, settings.dtype) if settings.dtype else None
    head = load_head(settings.head, backbone, dtype=dtype)
    return save_head(head, settings.out, provenance=provenance_of(settings.head))


@dataclass
class InspectSettings:
    """What a folder holds, and whether an engine would load it right."""

    path: Path
    """Folder or file of a head, in any format that can be read."""
    engine: str | None = None
    """vllm, sglang, tensorrt-llm or eagle (its authors' code), perhaps with a version, vllm:0.32.0, else the newest one
    that was looked at; without it, only whether it loads here."""
    backbone: str | None = None
    """What it was trained on; without it, less can be said."""


def inspect(settings: InspectSettings) -> int:
    """Exit code 1 where it would load wrong, 2 where nothing can be read."""
    from headstart import load_backbone
    from headstart.heads.inspection import inspect
    from headstart.options import silence

    silence()
    backbone = load_backbone(settings.backbone) if settings.backbone else None
    report = inspect(settings.path, settings.engine, backbone)
    print(report)
    return 0 if report.right else 1


HEADS: dict[str, Verb] = {
    "fetch": Verb(
        fetch,
        "Get a built-in backbone as an ordinary Hugging Face folder, once.",
        ("headstart.verbs_heads:FetchSettings",),
        ("name",),
        ("headstart fetch smollm2-135m", "headstart fetch smollm2-135m --folder models/smollm2"),
    ),
    "export": Verb(
        export,
        "Write a head in the format of another tool, or say why that tool would read another head.",
        ("headstart.verbs_heads:ExportSettings",),
        examples=(
            "headstart export --head runs/eagle3 --to vllm --out exported/vllm",
            "headstart export --head user/medusa-head --to tensorrt-llm --backbone user/model --out exported/trt",
            "headstart export --head runs/eagle3 --to headstart --dtype bfloat16 --out heads/eagle3-bf16",
        ),
    ),
    "inspect": Verb(
        inspect,
        "Say what kind of head this is, and what an engine would drop, leave at random or read otherwise.",
        ("headstart.verbs_heads:InspectSettings",),
        ("path",),
        ("headstart inspect exported/vllm --engine vllm", "headstart inspect medusa_lm_head.pt --backbone user/model"),
    ),
}
