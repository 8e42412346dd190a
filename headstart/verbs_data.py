"""The verbs of `data/`: what each takes, and the function that turns files into arguments."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headstart.errors import UserError
from headstart.options import TokenizerOptions, backbone_of, silence, tokenizer_of
from headstart.verb import Verb

if TYPE_CHECKING:
    from headstart.data.endpoint import EndpointSettings
    from headstart.data.prepare import PrepareSettings
    from headstart.data.preview import PreviewSettings
    from headstart.data.regenerate import RegenerateSettings
    from headstart.data.synthesize import SynthesizeSettings
    from headstart.options import WriterOptions
    from headstart.training.coverage import VocabSettings


def synthesize(settings: SynthesizeSettings) -> None:
    from headstart.data.synthesize import synthesize

    counts = synthesize(backbone_of(settings), settings)
    print(f"{settings.out}: " + ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items()))


def regenerate(options: WriterOptions, settings: RegenerateSettings, server: EndpointSettings) -> None:
    from headstart.data.endpoint import Endpoint
    from headstart.data.regenerate import regenerate

    if server.endpoint is not None:
        regenerate(Endpoint(replace(server, model=server.model or options.backbone)), settings)
        return
    if options.backbone is None:
        raise UserError("who answers? Name a model with --backbone, or a server that has it with --endpoint")
    if given := [name for name in ("model", "api_key_env", "body") if getattr(server, name) is not None]:
        raise UserError(f"--{given[0].replace('_', '-')} is for an endpoint; name one with --endpoint")
    regenerate(backbone_of(options), settings)


def prepare(options: TokenizerOptions, settings: PrepareSettings) -> None:
    from headstart.data.prepare import prepare

    prepare(tokenizer_of(options), settings)


def preview(options: TokenizerOptions, settings: PreviewSettings) -> None:
    from headstart.data.preview import preview

    preview(tokenizer_of(options), settings)


@dataclass
class CacheSettings:
    """The backbone's features of rows, computed once for many epochs and runs."""

    backbone: str
    """The frozen model: a built-in name (smollm2-135m), a folder, or a Hub id."""
    input: list[str]
    """What a recipe has as data.train: files of chats, `shipped`, or one folder made by data prepare."""
    out: Path | None = None
    """The folder to make; without it, the one in the cache that `data.cache: auto` finds."""
    method: str = "eagle3"
    """The method that will be trained; it says which hidden states are kept, and where."""
    taps: list[int] | None = None
    """The hidden states that the head fuses, where the recipe has them otherwise (head.taps)."""
    also: list[str] = field(default_factory=list)
    """Further methods that find all they read in the same folder; their recipes name it as data.cache."""
    max_length: int = 1024
    """Tokens of a row; it has to be the recipe's data.max_length."""
    store: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Number format of the features; auto: that of the backbone, which loses nothing; int8: 8 bits, half of bf16."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the backbone; it has to be the recipe's precision.backbone."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    restart: bool = False
    """Throw away other features that are in the folder, finished or not."""


def cache(settings: CacheSettings) -> None:
    from headstart.training.recipe import load_recipe
    from headstart.training.setup import cache_features

    silence()
    wanted: dict[str, Any] = {
        "backbone": settings.backbone,
        "revision": settings.revision,
        "run": "-",  # nothing is trained
        "method": settings.method,
        "head": {} if settings.taps is None else {"taps": settings.taps},
        "data.train": settings.input,
        "data.max_length": settings.max_length,
        "data.cache": str(settings.out or "auto"),
        "data.cache_store": settings.store,
        "precision.backbone": settings.dtype,
    }
    if settings.also and settings.out is None:
        raise UserError("--also: only one method finds a folder by itself; say by --out where all of them look")
    also = [load_recipe(None, {**wanted, "method": method, "head": {}}) for method in settings.also]
    made = cache_features(load_recipe(None, wanted), also=also, restart=settings.restart)
    if os.environ.get("RANK", "0") == "0":  # the first of the processes that accelerate launched
        print(made.summary())


def vocab(options: TokenizerOptions, settings: VocabSettings) -> None:
    from headstart.training.coverage import Coverage

    coverage = Coverage.of(settings, tokenizer_of(options))
    if settings.head is None or settings.keep is None or settings.out is None:
        print(coverage.table(settings.sizes))
        return
    from headstart.heads.format import load_head, provenance_of, save_head

    head = coverage.pruned(load_head(settings.head), settings.keep)
    print(save_head(head, settings.out, provenance=provenance_of(settings.head) | {"pruned": True}))


DATA: dict[str, Verb] = {
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
        (
            "headstart.options:WriterOptions",
            "headstart.data.regenerate:RegenerateSettings",
            "headstart.data.endpoint:EndpointSettings",
        ),
        (),
        (
            "headstart data regenerate --backbone smollm2-135m --input prompts.jsonl --out answered.jsonl.gz",
            "headstart data regenerate --endpoint http://localhost:8000/v1 --model NAME --input a.jsonl --out x.jsonl",
        ),
    ),
    "data prepare": Verb(
        prepare,
        "Turn chats into token ids and loss masks, by the backbone's own chat template.",
        ("headstart.options:TokenizerOptions", "headstart.data.prepare:PrepareSettings"),
        (),
        (
            "headstart data prepare --backbone smollm2-135m --input shipped --out rows",
            "headstart data prepare --backbone smollm2-135m --input a.jsonl b.jsonl.gz --out rows --max-length 1024",
        ),
    ),
    "data preview": Verb(
        preview,
        "Show in colour what is trained on.",
        ("headstart.options:TokenizerOptions", "headstart.data.preview:PreviewSettings"),
        (),
        ("headstart data preview --backbone smollm2-135m --input shipped --rows 3",),
    ),
    "data cache": Verb(
        cache,
        "Keep what the backbone makes of each row, so that training need not ask it again.",
        ("headstart.verbs_data:CacheSettings",),
        (),
        (
            "headstart data cache --backbone smollm2-135m --input rows --out features",
            "accelerate launch --num_processes 8 -m headstart data cache --backbone B --input rows --out features",
        ),
    ),
    "data vocab": Verb(
        vocab,
        "Show how much of the replies a draft vocabulary of each size covers; or prune a trained head.",
        ("headstart.options:TokenizerOptions", "headstart.training.coverage:VocabSettings"),
        (),
        (
            "headstart data vocab --backbone smollm2-135m --input shipped",
            "headstart data vocab --backbone smollm2-135m --head runs/mine --keep 4096 --out pruned",
        ),
    ),
}
