"""The verbs of `data/`: what each takes, and the function that turns files into arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headstart.options import TokenizerOptions, backbone_of, tokenizer_of
from headstart.verb import Verb

if TYPE_CHECKING:
    from headstart.data.prepare import PrepareSettings
    from headstart.data.preview import PreviewSettings
    from headstart.data.regenerate import RegenerateSettings
    from headstart.data.synthesize import SynthesizeSettings
    from headstart.options import BackboneOptions


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
        ("headstart.options:BackboneOptions", "headstart.data.regenerate:RegenerateSettings"),
        (),
        ("headstart data regenerate --backbone smollm2-135m --input prompts.jsonl --out answered.jsonl.gz",),
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
}
