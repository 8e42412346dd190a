"""A head as it goes to the Hub: its files, a card, `custom_generate/generate.py`, and nothing of this machine.

- `staged`: all of that in a folder.
- `publish`: such a folder sent to a repository.

Figures on the card are those of a bench of this very head: the report names the hash of the weights that it measured.
"""

from __future__ import annotations

import json
import shlex
import tempfile
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml

from ..errors import UserError
from ..files import write_whole
from ..heads import hub
from ..heads.adapter import FOLDER as ADAPTER
from ..heads.backbone import Backbone
from ..heads.base import DraftHead
from ..heads.card import Card
from ..heads.exchange import FORMATS, written
from ..heads.fetch import BUILT_IN
from ..heads.format import card_of, is_own, load_head, place_of
from ..heads.forms import weights_hash
from ..heads.inspection import inspect
from ..heads.layouts import BackboneNeededError
from ..heads.leaks import leaks, stripped
from ..heads.weights import weight_files
from ..settings import dump
from .folder import write_door

_COPIED = ("*.index.json", "tokenizer*", "special_tokens_map.json", "chat_template*", "generation_config.json",
           "vocab.json", "merges.txt")  # fmt: skip
"""What may lie beside a config and weights, where a whole model is pushed with its heads."""


@dataclass
class PushSettings:
    """A head for the Hub."""

    head: str
    """Folder of the head, in any format, or of the run that trained it."""
    repo: str
    """Where to: user/name. The token is that of HF_TOKEN or of `hf auth login`."""
    private: bool = False
    """A new repository is private."""
    revision: str | None = None
    """Branch; it is made if need be. Without it, main."""
    report: Path | None = None
    """report.json of a bench of this very head, or its folder: what the table of results is made of."""
    license: str | None = None
    """Licence of the head as the Hub names it, such as apache-2.0."""
    base_model: str | None = None
    """Hub id of the backbone, where the head was trained beside a folder or a built-in backbone."""
    backbone: str | None = None
    """The backbone itself (name, folder or Hub id), where whether an engine can serve the head depends on it."""
    out: Path | None = None
    """Write what would be pushed into this folder, and push nothing."""


def publish(settings: PushSettings, backbone: Backbone | None = None) -> str:
    """Push a head; returns the address of the commit, or the folder that was written instead.

    Args:
        backbone: the loaded one, if `settings.backbone` names any.

    Raises:
        UserError: it is no head, it would not load, something of this machine or a secret is in it, the report is of
            another head, or the Hub refuses.
    """
    if settings.out is not None:
        if settings.out.is_dir() and any(settings.out.iterdir()):
            raise UserError(f"{settings.out}: is not empty; give a new or empty folder")
        return str(staged(settings, settings.out, backbone))
    if not hub.is_id(settings.repo) or "@" in settings.repo:
        raise UserError(f"{settings.repo}: is no name of a repository; it has to be like user/name")
    hub.login(settings.repo)
    with tempfile.TemporaryDirectory() as scratch:
        folder = staged(settings, Path(scratch) / "head", backbone)
        return hub.send(folder, settings.repo, private=settings.private, revision=settings.revision)


def staged(settings: PushSettings, folder: Path, backbone: Backbone | None = None) -> Path:
    """Write into a folder what is pushed; weights are links to where they lie."""
    if hub.is_id(settings.head) and not Path(settings.head).exists():
        raise UserError(f"{settings.head}: no such folder; what is pushed lies on this machine")
    source = place_of(settings.head)
    head = load_head(source, backbone, adapter=False if (source / ADAPTER).is_dir() else None)
    notes = _copied(source, folder)
    recipe = _recipe(source, folder, notes)
    card = _card(settings, source, head, recipe)
    write_whole(folder / "README.md", str(card))
    if card.door:
        write_door(folder, settings.repo + (f"@{settings.revision}" if settings.revision else ""))
    for note in notes:
        warnings.warn(note, stacklevel=2)
    if found := leaks(folder):
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise UserError(f"{source}: cannot be pushed as it is; {'; '.join(found[:5])}{more}. Take that out first")
    return folder


def _copied(source: Path, folder: Path) -> list[str]:
    """The files of a head: what is JSON without paths, weights as links; notes on what was cut or left behind."""
    beside, notes = source if source.is_dir() else source.parent, list[str]()
    weights = weight_files(source)
    wanted = [beside / "config.json", *(path for pattern in _COPIED for path in beside.glob(pattern))]
    wanted += (beside / ADAPTER).iterdir() if is_own(beside) and (beside / ADAPTER).is_dir() else []
    (folder / ADAPTER if (beside / ADAPTER).is_dir() else folder).mkdir(parents=True, exist_ok=True)
    for path in [*weights, *wanted]:
        target = folder / path.relative_to(beside)
        if path.suffix == ".json" and path.is_file():
            said = json.loads(path.read_text(encoding="utf-8"))
            cut: list[str] = []
            clean = stripped(said, cut)
            write_whole(target, json.dumps(clean, indent=2, ensure_ascii=False) + "\n")
            notes += [f"{path.name}: {note}" for note in cut]
        elif path.is_file() and not target.exists():
            target.symlink_to(path.resolve())
    known = {path.relative_to(folder).parts[0] for path in folder.rglob("*")} | {"README.md", "custom_generate"}
    left = sorted(path.name for path in beside.iterdir() if path.name not in known)
    return [*notes, *([f"not pushed, as it is no part of the head: {', '.join(left[:8])}"] if left else [])]


def _recipe(source: Path, folder: Path, notes: list[str]) -> str:
    """The recipe of the run that a head lies in, without paths of this machine; empty where there is none."""
    path = source.parent / "recipe.yaml"
    if source.name != "head" or not path.is_file():
        return ""
    cut: list[str] = []
    try:
        clean = stripped(yaml.safe_load(path.read_text(encoding="utf-8")), cut)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as YAML ({error})") from None
    text = yaml.safe_dump(clean, sort_keys=False, allow_unicode=True)
    write_whole(folder / path.name, text)
    notes += [f"{path.name}: {note}" for note in cut]
    return text


def _card(settings: PushSettings, source: Path, head: DraftHead, recipe: str) -> Card:
    own = source.is_dir() and is_own(source)
    card = card_of(source) if own else Card(method=head.method, config=dump(head.config))
    card.provenance = stripped(dict(card.provenance), [])
    card.repo = settings.repo + (f"@{settings.revision}" if settings.revision else "")
    card.license, card.base_model, card.recipe = settings.license or "", settings.base_model or "", recipe
    card.door = not card.changed
    if not card.license:
        warnings.warn("the card states no licence; give one with --license apache-2.0 or the like", stacklevel=3)
    card.serving = {title: _serving(title, source, head, card, own) for title in ("vLLM", "SGLang")}
    if settings.report is not None:
        made = _report(settings.report, source, head)
        card.results, card.measured = model_index(made), measured(made)
    return card


# -- engines -----------------------------------------------------------------------------------------------------------


def _serving(title: str, source: Path, head: DraftHead, card: Card, own: bool) -> str:
    """How an engine serves the head, or why it does not; of a layout that it reads as it lies, directly."""
    engine = title.lower()
    name = card.repo.partition("@")[0]
    served_by = f"{engine}:0.32" if head.method == "medusa" and engine == "vllm" else engine
    if not own and inspect(source, served_by, head._backbone).right:
        return _command(engine, head, card, name)
    if head.method not in FORMATS[engine]:
        return f"{title} has no {head.method} heads."
    try:
        written(head, engine)
    except BackboneNeededError:
        more = f" --backbone {card.base}"
        return (
            f"Whether {title} can serve it, `headstart export --head {name} --to {engine} --out exported{more}` says."
        )
    except UserError as error:
        return f"{title} cannot serve this head: {error}."
    export = (
        f"Its layout is another one:\n\n```sh\nheadstart export --head {name} --to {engine} --out exported\n```\n\n"
    )
    return export + _command(engine, head, card, "exported")


def _command(engine: str, head: DraftHead, card: Card, place: str) -> str:
    depth = head.max_depth or 3
    fetched = f"headstart fetch {card.base} --folder {card.base}\n" if card.base in BUILT_IN else ""
    if engine == "vllm":
        method = {"eagle1": "eagle"}.get(head.method, head.method)
        said = json.dumps({"method": method, "model": place, "num_speculative_tokens": depth})
        note = "\n\nvLLM up to 0.32; newer versions have no Medusa heads." if head.method == "medusa" else ""
        return f"```sh\n{fetched}vllm serve {card.base} --speculative-config '{said}'\n```{note}"
    algorithm = "EAGLE3" if head.method == "eagle3" else "EAGLE"
    return (
        f"```sh\n{fetched}python -m sglang.launch_server --model-path {card.base} \\\n"
        f"  --speculative-algorithm {algorithm} \\\n"
        f"  --speculative-draft-model-path {place} --speculative-num-steps {depth} \\\n"
        f"  --speculative-eagle-topk 1 --speculative-num-draft-tokens {depth + 1}\n```"
    )


# -- results -----------------------------------------------------------------------------------------------------------


def _report(path: Path, source: Path, head: DraftHead) -> dict[str, Any]:
    """A bench report, if it is one of this very head."""
    path = path / "report.json" if path.is_dir() else path
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
        setup, whole = made["setup"], made["all"]["overall"]
        dtype, measured_weights = getattr(torch, setup["dtype"]), setup["drafter_weights"]
        missing = [name for name in ("speedup", "acceptance_length", "identical", "answers") if name not in whole]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; it is the report.json of `headstart bench --head {source}`") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: is no report.json of headstart bench ({type(error).__name__}: {error})") from None
    if missing:
        raise UserError(f"{path}: is no report.json of headstart bench, it has no {', '.join(missing)}")
    ours = weights_hash(load_head(source, dtype=dtype, device="cpu") if head._backbone is None else head.to(dtype))
    if measured_weights != ours:
        raise UserError(
            f"{path}: measured a drafter with weights {measured_weights} in {setup['dtype']}, and {source} has {ours}; "
            f"bench this head: headstart bench --head {source} ..."
        )
    return dict(made)


def model_index(made: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of a model index: one entry, for the questions that were asked."""
    whole, setup = made["all"]["overall"], made["setup"]
    what = f"greedy, {setup['dtype']}, {setup['tree'] or 'default tree'}, {setup['device']}"
    metrics = [
        {"type": name, "name": f"{words} ({what})", "value": round(value, 4)}
        for name, words, value in (
            ("speedup", "speed-up over transformers' generate", whole["speedup"]),
            ("acceptance_length", "tokens a round", whole["acceptance_length"]),
            ("identical", "share of answers identical to generate", whole["identical"] / max(1, whole["answers"])),
            ("tokens_per_second", "tokens a second", whole.get("tokens_per_second")),
        )
        if value is not None
    ]
    task = {"type": "text-generation", "name": "Text generation"}
    return [{"task": task, "dataset": {"name": (suite := suite_of(made)), "type": suite}, "metrics": metrics}]


def suite_of(made: dict[str, Any]) -> str:
    """What the questions' file was called."""
    words = shlex.split(made.get("command") or "")
    named = next((two for one, two in pairwise(words) if one == "--suite"), "") or next(
        (word.partition("=")[2] for word in words if word.startswith("--suite=")), ""
    )
    return Path(named).name or "questions that the report does not name"


def measured(made: dict[str, Any]) -> str:
    """A bench report in a few lines."""
    setup, two = made["setup"], [made["all"]["overall"], made["without_loops"]["overall"]]
    rows = [("answers", "answers"), ("identical to transformers' `generate`", "identical"),
            ("tokens a second, transformers", "plain_tokens_per_second"), ("tokens a second", "tokens_per_second"),
            ("speed-up", "speedup"), ("tokens a round", "acceptance_length")]  # fmt: skip
    cells = [f"| {words} | {' | '.join(_figure(one.get(name)) for one in two)} |" for words, name in rows]
    how = ", ".join(
        f"{name} {setup[name]}" for name in ("dtype", "tree", "device", "torch", "transformers", "headstart")
    )
    limit = f"greedy, at most {setup['max_new_tokens']} tokens an answer"
    return (
        f"`headstart bench` of {made['date']} over `{suite_of(made)}`, {limit}; {how}. Verdict: {made['verdict']}.\n\n"
        "| | all | without looping answers |\n| --- | ---: | ---: |\n" + "\n".join(cells)
    )


def _figure(value: Any) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"
