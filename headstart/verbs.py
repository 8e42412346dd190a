"""The verbs: what each takes, and the small function that turns files into arguments for the rooms.

Nowhere else are backbones, heads and files loaded by name. The rooms are imported inside the functions: `VERBS` itself
costs nothing, and help reads the settings classes from source.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from headstart.data.prepare import PrepareSettings
    from headstart.data.preview import PreviewSettings
    from headstart.data.regenerate import RegenerateSettings
    from headstart.data.synthesize import SynthesizeSettings
    from headstart.heads.backbone import Backbone
    from headstart.inference.bench import BenchSettings
    from headstart.inference.suite import Question


@dataclass(frozen=True)
class Verb:
    """One verb of the command line."""

    run: Callable[..., None]
    """Called with one object for each class in `settings`."""
    summary: str
    settings: tuple[str, ...]
    """Settings classes as `module:Class`; their fields are the flags."""
    positional: tuple[str, ...] = ()
    """Fields that are given without a flag, in this order."""
    examples: tuple[str, ...] = ()
    recipe: str | None = None
    """The settings class of the file that this verb reads; help lists its keys."""


# --- backbones, heads and tokenizers by name -------------------------------------------------------------------------


@dataclass
class BackboneOptions:
    """Which backbone, and how it is loaded."""

    backbone: str
    """The frozen model: a built-in name (smollm2-135m), a folder, or a Hub id."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Number format of its weights; without it, the one they are stored in."""
    device: str | None = None
    """Where it runs, such as cpu or cuda; without it, a GPU if there is one."""
    attention: Literal["sdpa", "eager"] | None = None
    """Attention implementation; without it, transformers chooses."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""


@dataclass
class TokenizerOptions:
    """Whose tokenizer and chat template; no weights are loaded."""

    backbone: str
    """The model whose tokenizer and chat template are used: a built-in name (smollm2-135m), a folder, or a Hub id."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""


def backbone_of(settings: Any) -> Backbone:
    """The backbone that a verb's settings name, on a GPU if there is one and nothing else was said."""
    import torch

    from headstart import load_backbone

    _silence()
    given = {name: getattr(settings, name) for name in ("dtype", "attention", "revision") if hasattr(settings, name)}
    device = getattr(settings, "device", None) or ("cuda" if torch.cuda.is_available() else None)
    return load_backbone(settings.backbone, device=device, **given)


def _silence() -> None:
    """Keep transformers' progress bars away: one status line at a time."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def tokenizer_of(options: TokenizerOptions) -> Any:
    """The tokenizer that the options name."""
    from headstart.heads.load import load_tokenizer

    return load_tokenizer(options.backbone, revision=options.revision)


def drafter_of(name: str, backbone: Backbone) -> Any:
    """What drafts: a head from its folder or Hub id, in the backbone's dtype; the name of a drafter without weights; or
    None."""
    if name in ("none", "ngram"):
        return None if name == "none" else name
    from headstart import load_head

    return load_head(name, backbone)


# --- fetch ----------------------------------------------------------------------------------------------------------


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


# --- generate -------------------------------------------------------------------------------------------------------


@dataclass
class GenerateSettings:
    """One prompt, answered."""

    prompt: str
    """What to ask, as one user turn; - reads it from standard input."""
    head: str = "none"
    """What drafts: the folder or Hub id of a head, ngram, or none (plain decoding). The answer is the same."""
    tree: str | None = None
    """Form of the drafts, such as chain:4 or dynamic:4x4x8 (depth, children of a node, nodes in all)."""
    max_new_tokens: int = 256
    """Stop after this many tokens."""
    temperature: float | None = None
    """0 is greedy; without it, the backbone's own generation settings decide."""
    top_p: float | None = None
    """Draw from the likeliest tokens that hold this share of probability."""
    top_k: int | None = None
    """Draw from this many likeliest tokens."""
    seed: int | None = None
    """The same seed draws the same tokens, with any head and tree."""
    raw: bool = False
    """Take the prompt as it stands, without the chat template."""
    stream: bool = True
    """Write the answer as it comes."""
    compare: bool = False
    """Answer twice, plainly and with the head, and show both side by side with their speed."""


def generate(options: BackboneOptions, settings: GenerateSettings) -> None:
    """The answer to standard output, what it took to standard error."""
    from headstart import Generator
    from headstart.inference.sides import compared

    text = sys.stdin.read() if settings.prompt == "-" else settings.prompt
    backbone = backbone_of(options)
    generator = Generator(backbone, drafter_of(settings.head, backbone), tree=settings.tree)
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")
    asked = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
    prompt = backbone.tokenizer(text).input_ids if settings.raw and backbone.tokenizer else text
    if settings.compare:
        print(compared(Generator(backbone), generator, prompt, settings.head, asked))
        return
    if not settings.stream:
        output = generator.generate(prompt, **asked)
        print(output.text)
        print(output.stats, file=sys.stderr)
        return
    for piece in generator.stream(prompt, **asked):
        print(piece.text, end="", flush=True)
    print(flush=True)
    print(piece.stats, file=sys.stderr)


# --- data -----------------------------------------------------------------------------------------------------------


def synthesize(settings: SynthesizeSettings) -> None:
    from headstart.data.synthesize import synthesize

    counts = synthesize(backbone_of(settings), settings)
    print(f"{settings.out}: " + ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items()))


def regenerate(options: BackboneOptions, settings: RegenerateSettings) -> None:
    from headstart.data.regenerate import regenerate

    regenerate(backbone_of(options), settings)


def prepare(options: TokenizerOptions, settings: PrepareSettings) -> None:
    from headstart.data.prepare import prepare

    prepare(tokenizer_of(options), settings)


def preview(options: TokenizerOptions, settings: PreviewSettings) -> None:
    from headstart.data.preview import preview

    preview(tokenizer_of(options), settings)


# --- train ----------------------------------------------------------------------------------------------------------


@dataclass
class TrainSettings:
    """A training run."""

    recipe: Path
    """The recipe, a YAML file such as configs/smollm2-eagle3.yaml."""
    overrides: list[str] = field(default_factory=list)
    """Settings of the recipe that are to be otherwise, as key=value."""
    check: bool = False
    """Load everything, run one step, print what the run would be, and leave nothing behind."""


def train(settings: TrainSettings) -> None:
    from headstart.training.loop import train
    from headstart.training.sheet import check, told

    _silence()
    if settings.check:
        result = told(check(settings.recipe, settings.overrides))
    else:
        result = str(train(settings.recipe, settings.overrides))
    if os.environ.get("RANK", "0") == "0":  # the first of the processes that accelerate launched
        print(result)


# --- bench ----------------------------------------------------------------------------------------------------------


def questions_of(suite: str) -> list[Question]:
    """The questions of a file; for `shipped`, the first user turns of what recipes hold out by default."""
    from headstart.inference.suite import question, read_suite

    if suite != "shipped":
        return read_suite(suite)
    from headstart.data.chats import read_chats
    from headstart.training.batches import split
    from headstart.training.recipe import DataSettings

    chats, _ = read_chats([suite])
    _, held_out = split([chat.key for chat in chats], DataSettings().held_out)
    return [question(chats[place].messages, number, suite) for number, place in enumerate(held_out, 1)]


def bench(options: BackboneOptions, settings: BenchSettings) -> None:
    from headstart.inference.bench import bench
    from headstart.inference.report import summary

    questions, backbone = questions_of(settings.suite), backbone_of(options)
    command = f"headstart {shlex.join(sys.argv[1:])}"
    print(summary(bench(backbone, drafter_of(settings.head, backbone), questions, settings, command=command)))
    print(settings.out / "report.md")


# --- the table ------------------------------------------------------------------------------------------------------

VERBS: dict[str, Verb] = {
    "fetch": Verb(
        fetch,
        "Get a built-in backbone as an ordinary Hugging Face folder, once.",
        ("headstart.verbs:FetchSettings",),
        ("name",),
        ("headstart fetch smollm2-135m", "headstart fetch smollm2-135m --folder models/smollm2"),
    ),
    "data synthesize": Verb(
        synthesize,
        "Let the backbone write whole conversations, from nothing.",
        ("headstart.data.synthesize:SynthesizeSettings",),
        (),
        ("headstart data synthesize --backbone smollm2-135m --count 3000 --out chats.jsonl.gz",),
    ),
    "data regenerate": Verb(
        regenerate,
        "Let the backbone answer given prompts, so that a head learns what it really says.",
        ("headstart.verbs:BackboneOptions", "headstart.data.regenerate:RegenerateSettings"),
        (),
        ("headstart data regenerate --backbone smollm2-135m --input prompts.jsonl --out answered.jsonl.gz",),
    ),
    "data prepare": Verb(
        prepare,
        "Turn chats into token ids and loss masks, by the backbone's own chat template.",
        ("headstart.verbs:TokenizerOptions", "headstart.data.prepare:PrepareSettings"),
        (),
        (
            "headstart data prepare --backbone smollm2-135m --input shipped --out rows",
            "headstart data prepare --backbone smollm2-135m --input a.jsonl b.jsonl.gz --out rows --max-length 1024",
        ),
    ),
    "data preview": Verb(
        preview,
        "Show in colour what is trained on.",
        ("headstart.verbs:TokenizerOptions", "headstart.data.preview:PreviewSettings"),
        (),
        ("headstart data preview --backbone smollm2-135m --input shipped --rows 3",),
    ),
    "train": Verb(
        train,
        "Train a head by a recipe; a run that is there goes on where it was.",
        ("headstart.verbs:TrainSettings",),
        ("recipe", "overrides"),
        (
            "headstart train configs/smollm2-eagle3.yaml",
            "headstart train configs/smollm2-eagle3.yaml optim.lr=2e-4 run=runs/other",
            "headstart train configs/smollm2-eagle3.yaml --check",
        ),
        recipe="headstart.training.recipe:Recipe",
    ),
    "generate": Verb(
        generate,
        "Answer a prompt with the backbone, sooner with a head.",
        ("headstart.verbs:BackboneOptions", "headstart.verbs:GenerateSettings"),
        ("prompt",),
        (
            'headstart generate --backbone smollm2-135m --head runs/eagle3/head "Why is the sky blue?"',
            'headstart generate --backbone smollm2-135m --head ngram --temperature 0.7 --seed 1 "Tell me a story."',
        ),
    ),
    "bench": Verb(
        bench,
        "Compare with transformers' generate on the same prompts: equality, speed, acceptance, by category.",
        ("headstart.verbs:BackboneOptions", "headstart.inference.bench:BenchSettings"),
        (),
        (
            "headstart bench --backbone smollm2-135m --head runs/eagle3/head --suite questions.jsonl --out reports/one",
            "headstart bench --backbone smollm2-135m --head ngram --suite prompts.txt --out reports/two --limit 20",
        ),
    ),
}
