"""The verbs of `inference/`: what each takes, and the function that turns files into arguments."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headstart.options import BackboneOptions, ExactOptions, backbone_of, drafter_of
from headstart.verb import Verb

if TYPE_CHECKING:
    from headstart.inference.bench import BenchSettings
    from headstart.inference.load_settings import LoadSettings
    from headstart.inference.proof import ProofSettings
    from headstart.inference.publish import PushSettings
    from headstart.inference.suite import Question
    from headstart.inference.tune import TuneSettings


@dataclass
class GenerateSettings:
    """One prompt, answered."""

    prompt: str
    """What to ask, as one user turn; - reads it from standard input."""
    head: str = "none"
    """What drafts: the folder or Hub id of a head, the folder of a smaller model, ngram, suffix, exit:6 (its own first
    layers), int8, hybrid:NAME, or none (plain decoding). The answer is the same."""
    tree: str | None = None
    """Form of the drafts, such as chain:4 or dynamic:4x4x8 (depth, children of a node, nodes in all); auto takes what
    gives the most tokens a second. Without it, what `headstart tune` chose for the head here, else the usual form."""
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
    stop: str | None = None
    """Stop behind this text, at the token that completes it."""
    rule: str = "match"
    """How drafts are verified: match, chain, siblings, fixed, block, traversal; or typical, which is not lossless."""
    auto_off: bool = False
    """Measure while generating whether drafting pays, and go on plainly where it does not."""
    compile: bool = False
    """Run rounds through torch.compile; the first ones take long, and what cannot be compiled goes on without."""
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
    drafter = drafter_of(settings.head, backbone)
    how = {name: getattr(settings, name) for name in ("tree", "rule", "auto_off", "compile")}
    generator = Generator(backbone, drafter, **how)
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")
    asked = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
    if settings.stop is not None:
        asked["stop_strings"] = [settings.stop]
    prompt = backbone.tokenizer(text).input_ids if settings.raw and backbone.tokenizer else text
    if settings.compare:
        print(compared(Generator(backbone), generator, prompt, settings.head, asked))
        return
    if generator.tuned is not None:
        print(f"tree {generator.tuned}, as headstart tune chose", file=sys.stderr)
    if not settings.stream:
        output = generator.generate(prompt, **asked)
        print(output.text)
        print(output.stats, file=sys.stderr)
        return
    for piece in generator.stream(prompt, **asked):
        print(piece.text, end="", flush=True)
    print(flush=True)
    print(piece.stats, file=sys.stderr)


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


def bench(options: BackboneOptions, settings: BenchSettings, load: LoadSettings) -> None:
    from headstart.inference import load_report, report
    from headstart.inference.against import read_report, told
    from headstart.inference.bench import bench
    from headstart.inference.load import assistant_of, under_load
    from headstart.inference.others import is_rival, parted

    earlier = read_report(load.against) if load.against else None
    questions, backbone = questions_of(settings.suite), backbone_of(options)
    drafter = drafter_of(settings.head, backbone)
    others = {name: drafter_of(parted(name)[0], backbone) for name in settings.also if not is_rival(name)}
    command = f"headstart {shlex.join(sys.argv[1:])}"
    if load.wanted:
        given = drafter_of(load.assistant, backbone) if load.assistant else drafter
        made = under_load(
            backbone, drafter, questions, settings, load, assistant=assistant_of(given, load), earlier=earlier,
            others=others, command=command,
        )  # fmt: skip
        print(load_report.summary(made))
        print(settings.out / "load.html")
    else:
        made = bench(backbone, drafter, questions, settings, others=others, command=command)
        print(report.summary(made))
        print(settings.out / "report.md")
    if earlier:
        print(told(made, earlier))


def verify(options: ExactOptions, settings: ProofSettings) -> int:
    """The verdict to standard output; 1 if it is that of a real mismatch."""
    from headstart.inference.proof import prove, told

    questions, backbone = questions_of(settings.suite), backbone_of(options)
    text, code = told(prove(backbone, drafter_of(settings.head, backbone), questions, settings))
    print(text)
    return code


def push(settings: PushSettings) -> None:
    from headstart import load_backbone
    from headstart.inference.publish import publish
    from headstart.options import silence

    silence()
    print(publish(settings, load_backbone(settings.backbone) if settings.backbone else None))


def tune(options: BackboneOptions, settings: TuneSettings) -> None:
    import json

    from headstart.inference.advice import findings, told
    from headstart.inference.tune import tune

    questions, backbone = questions_of(str(settings.suite or settings.prompts)), backbone_of(options)
    found = tune(backbone, drafter_of(settings.head, backbone), questions, settings)
    print(json.dumps(findings(found)) if settings.json else told(found))


INFERENCE: dict[str, Verb] = {
    "generate": Verb(
        generate,
        "Answer a prompt with the backbone, sooner with a head.",
        ("headstart.options:BackboneOptions", "headstart.verbs_inference:GenerateSettings"),
        ("prompt",),
        (
            'headstart generate --backbone smollm2-135m --head runs/eagle3/head "Why is the sky blue?"',
            'headstart generate --backbone smollm2-135m --head ngram --temperature 0.7 --seed 1 "Tell me a story."',
        ),
    ),
    "bench": Verb(
        bench,
        "Compare with transformers' generate on the same prompts: equality, speed, acceptance, by category.",
        (
            "headstart.options:BackboneOptions",
            "headstart.inference.bench:BenchSettings",
            "headstart.inference.load_settings:LoadSettings",
        ),
        (),
        (
            "headstart bench --backbone smollm2-135m --head runs/eagle3/head --suite questions.jsonl --out reports/one",
            "headstart bench --backbone smollm2-135m --head ngram --suite prompts.txt --out reports/two --limit 20",
            "headstart bench --backbone smollm2-135m --head runs/a/head --also lookup ngram runs/b/head@chain:3 "
            "--suite shipped --out reports/m",
            "headstart bench --backbone smollm2-135m --head ngram --suite shipped --out reports/l --concurrency 1,4,8",
        ),
    ),
    "verify": Verb(
        verify,
        "Prove that a drafter changes no token: against transformers' generate, and drawn by seeds.",
        ("headstart.options:ExactOptions", "headstart.inference.proof:ProofSettings"),
        (),
        (
            "headstart verify --backbone smollm2-135m --head runs/eagle3/head --suite questions.jsonl",
            "headstart verify --backbone smollm2-135m --head ngram --suite shipped --limit 5 --dtype bfloat16",
        ),
    ),
    "push": Verb(
        push,
        "Put a head on the Hub, with a card, and a file for transformers' custom_generate.",
        ("headstart.inference.publish:PushSettings",),
        ("head", "repo"),
        (
            "headstart push runs/eagle3 user/eagle3-head --license apache-2.0 --report reports/one",
            "headstart push exported/vllm user/head-for-vllm --private",
        ),
    ),
    "tune": Verb(
        tune,
        "Find the form of drafts that is fastest for your prompts on this machine, and make it the head's default.",
        ("headstart.options:BackboneOptions", "headstart.inference.tune:TuneSettings"),
        (),
        (
            "headstart tune --backbone smollm2-135m --head runs/eagle3/head --suite questions.jsonl",
            "headstart tune --backbone smollm2-135m --head ngram --prompts prompts.txt --limit 20 --json",
        ),
    ),
}
