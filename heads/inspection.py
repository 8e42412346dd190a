"""What kind of head a folder holds, and what would go wrong with it: here, and in an engine that is to serve it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from .backbone import Backbone
from .engines import Engine, engine_of, outside
from .exchange import FORMATS, import_head
from .format import load_head
from .kinds import TITLES, kind_of, wrapper_of
from .layouts import BackboneNeededError
from .reading import Files, Finding
from .weights import read_config, read_tensors, tensor_shapes, weight_files


@dataclass
class Report:
    """What there is to say of a head."""

    kind: str
    """A key of `TITLES`."""
    facts: dict[str, Any]
    """Its shape and its backbone, in words."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether nothing of it would be read wrongly."""
        return not any(one.wrong for one in self.findings)

    def __str__(self) -> str:
        lines = [TITLES[self.kind], *(f"  {name}: {value}" for name, value in self.facts.items())]
        for one in self.findings:
            lines += [f"{'WRONG' if one.wrong else 'note'}: {one.what}", f"  fix: {one.fix}"]
        return "\n".join([*lines, "all right" if self.right else "would load wrong"])


def inspect(source: str | Path, engine: str | None = None, backbone: Backbone | None = None) -> Report:
    """Look at a head.

    Args:
        source: folder or file of a head in any format.
        engine: a name in `ENGINES`, perhaps with a version ("vllm:0.33.0"); None: only whether it loads here.
        backbone: what it was trained on; without one, less can be said.

    Raises:
        UserError: nothing can be read there, or there is no such engine.
    """
    path = Path(source)
    if not path.exists():
        raise UserError(f"{source}: no such folder or file")
    if engine:
        engine_of(engine)
    config, files = read_config(path), weight_files(path)
    named = tensor_shapes(files)
    wrapper = wrapper_of(named)
    shapes = {name.removeprefix(wrapper): shape for name, shape in named.items()}
    try:
        kind = kind_of(config, shapes)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    report = Report(kind, _facts(config, shapes))
    taps = _loads_here(path, kind, backbone, report)
    if engine:
        found, version, title = engine_of(engine)
        report.facts["engine"] = title
        if wrapper:
            what = f"every name begins with {wrapper}, which {title} does not know: nothing would be loaded"
            report.findings.append(Finding(what, f"take {wrapper} away from the names"))
        biases = read_tensors(files, lambda name: name.endswith(".bias"))
        zeros = frozenset(name.removeprefix(wrapper) for name, one in biases.items() if not one.any())
        looked = Files(config, shapes, zeros, taps, version)
        report.findings += [*_served(kind, found, engine.partition(":")[0], looked), *outside(found, version)]
    return report


def _served(kind: str, engine: Engine, name: str, files: Files) -> list[Finding]:
    if kind == "headstart":
        able = ", ".join(to for to in FORMATS if to in (name, "speculators")) or name
        return [Finding(f"{engine.title} does not read headstart's own format", f"headstart export --to {able}")]
    if name == "vllm" and kind.startswith("medusa") and not files.before(0, 33):
        return list(engine.checks["medusa"](files))
    if kind in engine.never:
        return [Finding(f"{engine.title} cannot serve it: {engine.never[kind]}", _instead(kind, name))]
    return list(engine.checks[kind](files))


def _instead(kind: str, name: str) -> str:
    if kind in ("hydra", "mlp_speculator"):
        return "serve it with headstart, or train an eagle3 head"
    to = {"tensorrt-llm": "modelopt", "sglang": "sglang"}.get(name, name)
    return (
        f"headstart export --to {to}" if kind in ("speculators", "medusa-2", "medusa-trt") else f"train for {name} anew"
    )


def _loads_here(path: Path, kind: str, backbone: Backbone | None, report: Report) -> tuple[int, ...] | None:
    """Whether our own loader takes it, and which hidden states it reads."""
    try:
        head = load_head(str(path)) if kind == "headstart" else import_head(path, backbone)
        if backbone is not None:
            head.bind(backbone)
    except BackboneNeededError as error:
        report.findings.append(Finding(f"not loaded here: {error}", "give --backbone", wrong=False))
        return None
    except UserError as error:
        report.findings.append(Finding(str(error), "see above: the files contradict themselves or are incomplete"))
        return None
    report.facts["method"] = head.method
    report.facts["backbone"] = head.config.backbone or "not named"
    positions = getattr(head.config, "max_position_embeddings", None)
    if backbone is not None and positions and positions < min(backbone.max_positions, 1 << 30):
        report.findings.append(
            Finding(
                f"max_position_embeddings is {positions}, and the backbone's {backbone.max_positions}: engines cut "
                "texts there, or accept little behind it",
                "raise it in config.json, if the rotary embedding allows",
                wrong=False,
            )
        )
    return head.taps or None


def _facts(config: dict[str, Any], shapes: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {"tensors": len(shapes)}
    facts["parameters"] = sum(torch.Size(shape).numel() for shape, _ in shapes.values())
    facts["stored as"] = ", ".join(sorted({kind for _, kind in shapes.values()}))
    for key in (
        "architectures",
        "hidden_size",
        "vocab_size",
        "draft_vocab_size",
        "medusa_num_heads",
        "num_hidden_layers",
    ):
        if config.get(key) is not None:
            facts[key] = config[key]
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    named = config.get("base_model_name_or_path") or verifier.get("name_or_path")
    return facts | ({"backbone": named} if named else {})
