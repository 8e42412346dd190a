"""The steps of scripts/compare_peers.sh that need headstart itself.

    python scripts/compare_peers.py rows DIR LENGTH TOKENS HELD_OUT FILE ...   conversations, rows, backbone, vocabulary
    python scripts/compare_peers.py features DIR LENGTH HELD_OUT               hidden states, row by row; goes on
    python scripts/compare_peers.py heads DIR LENGTH HELD_OUT                  the best head of each trainer, as ours
    python scripts/compare_peers.py speeds DIR                                 tokens a second of vLLM

The forms that trainers want are those of scripts/compare_trainers.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import compare_trainers as shared

from headstart import load_backbone
from headstart.data.chats import read_chats
from headstart.data.prepare import PrepareSettings, prepare
from headstart.files import text_hash, write_jsonl, write_whole
from headstart.heads.format import save_head
from headstart.training.start import counted

TRAINERS = ("speculators", "specforge")


def main(arguments: list[str]) -> None:
    verb, folder, *rest = arguments
    VERBS[verb](Path(folder), *rest)


def rows(folder: Path, length: str, tokens: str, held_out: str, *files: str) -> None:
    """Conversations in the order of their hashes until there are enough tokens, and what is made of them."""
    backbone = load_backbone("smollm2-135m", dtype="bfloat16")
    chats, _ = read_chats(files)
    chosen = within(((one.key, one.messages) for one in chats), int(tokens), lambda chat: len(backbone.encode(chat)))
    write_jsonl(folder / "chats.jsonl", [{"messages": messages} for messages in chosen])
    prepare(backbone, PrepareSettings(input=[str(folder / "chats.jsonl")], out=folder / "rows", max_length=int(length)))
    trained, held = shared.parts(folder, backbone, float(held_out), int(length))
    stand, now = folder / "facts.json", trained.hash()
    if stand.exists() and json.loads(stand.read_text())["hash"] != now:
        raise SystemExit(f"{folder} holds what was made of other rows; give another folder")
    shared.save_maps(folder, counted(trained, backbone.vocab_size, shared.VOCAB))
    shared.save_backbone(folder / "backbone", backbone)
    facts = {"rows": len(trained), "tokens": int(trained.lengths.sum()), "supervised": int(trained.supervised.sum())}
    facts |= {"held_out": len(held), "chats": len(chosen), "length": int(length), "hash": now}
    write_whole(folder / "facts.json", json.dumps(facts) + "\n")
    print(facts)


def within(chats: Iterable[tuple[str, Any]], tokens: int, length: Any) -> list[Any]:
    """Messages of as many chats as have these tokens, each once, in the order of hashes: more are a superset."""
    chosen, taken = [], 0
    for _, messages in sorted(dict(chats).items(), key=lambda pair: text_hash(f"peers {pair[0]}")):
        if taken >= tokens:
            break
        chosen.append(messages)
        taken += length(messages)
    return chosen


def features(folder: Path, length: str, held_out: str) -> None:
    """Those of rows that have none yet."""
    backbone = load_backbone("smollm2-135m", dtype="bfloat16")
    trained, _ = shared.parts(folder, backbone, float(held_out), int(length))
    shared.save_features(folder, backbone, trained)
    write_whole(folder / "features.done", "")


def heads(folder: Path, length: str, held_out: str) -> None:
    """The head of the best rate of each trainer, by held-out accuracy, in our format; all of them are told."""
    backbone = load_backbone("smollm2-135m", dtype="bfloat16")
    _, held = shared.parts(folder, backbone, float(held_out), int(length))
    facts = json.loads((folder / "facts.json").read_text())
    for trainer in TRAINERS:
        best: tuple[float, Any, dict[str, Any]] | None = None
        for done in sorted((folder / "runs" / trainer).glob("*/done")):
            head = shared.read_head(trainer, done.parent, backbone)
            accuracy = [round(share, 4) for share in shared.accuracy(head, held)]
            told = {"trainer": trainer, "lr": done.parent.name, **taken(done.parent), "top-1": accuracy}
            print(json.dumps(told))
            if best is None or sum(accuracy) > best[0]:
                best = sum(accuracy), head, {**told, **facts}
        if best:
            print(save_head(best[1], folder / "heads" / trainer, provenance=best[2]))


def taken(run: Path) -> dict[str, int]:
    """Steps and seconds of a run, those that an interruption threw away included, and its peak of memory."""
    watched = [json.loads(path.read_text()) for path in sorted(run.glob("watch*.json"))]
    steps = [one["steps"] for one in watched if one["steps"]]
    peak = max((one["peak_mib"] for one in watched), default=0)
    return {"steps": sum(map(len, steps)), "seconds": round(sum(one[-1] for one in steps)), "peak_mib": round(peak)}


def speeds(folder: Path) -> None:
    """What vLLM took for its answers, in fp32 and without compiling, prefill included."""
    for path in sorted(folder.glob("vllm/*/answers/vllm-*.json")):
        told = json.loads(path.read_text())
        tokens = sum(map(len, told["tokens"]))
        name = f"{path.parent.parent.name} {path.stem.split('-')[1]}"
        print(f"{name}: {tokens} tokens, {tokens / told['seconds']:.2f} a second")


VERBS: dict[str, Any] = {"rows": rows, "features": features, "heads": heads, "speeds": speeds}

if __name__ == "__main__":
    main(sys.argv[1:])
