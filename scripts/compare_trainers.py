"""The parts of scripts/compare_trainers.sh that need headstart itself.

    python scripts/compare_trainers.py prepare DIR [rows]   rows, backbone and features, in the form that each one takes
    python scripts/compare_trainers.py table DIR            accuracy on held-out rows, and the table

Rows: conversations that come with headstart, each behind a text that is only read, so that about half of the tokens are
supervised. Features: of the same backbone in bf16, computed once. Accuracy: for each head as its trainer left it, how
often its first choice at a depth is the backbone's own among all tokens, on the true text, by `training/evaluate.py`.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.data.prepare import PrepareSettings, load_prepared, prepare
from headstart.files import read_jsonl, whole_file, write_jsonl
from headstart.heads.backbone import Backbone
from headstart.heads.base import DraftHead
from headstart.heads.eagle3 import Eagle3, default_taps
from headstart.heads.format import load_head
from headstart.heads.load import load_backbone
from headstart.heads.vocab import DraftVocab
from headstart.progress import Progress
from headstart.training.batches import Rows, forwards
from headstart.training.evaluate import count
from headstart.training.objective import Objective
from headstart.training.recipe import BatchSettings, LossSettings
from headstart.training.start import counted

DEPTHS, VOCAB, HELD_OUT, LENGTH = 3, 4096, 0.12, 576
SKIPPED = 20  # steps before the clock starts
SHIPPED = Path(__file__).resolve().parent.parent / "data" / "shipped" / "smollm2-135m.jsonl.gz"


def main(arguments: list[str]) -> None:
    verb, folder = arguments[0], Path(arguments[1])
    if verb == "prepare":
        make(folder, int(arguments[2]) if len(arguments) > 2 else 320)
    else:
        table(folder)


# --- what the trainers are given ------------------------------------------------------------------------------------


def make(folder: Path, rows: int) -> None:
    """Everything that the three trainers read."""
    folder.mkdir(parents=True, exist_ok=True)
    backbone = load_backbone("smollm2-135m", dtype="bfloat16")
    write_jsonl(folder / "chats.jsonl", chats(rows))
    prepare(backbone, PrepareSettings(input=[str(folder / "chats.jsonl")], out=folder / "rows", max_length=LENGTH))
    trained, held_out = parts(folder, backbone)
    vocab = counted(trained, backbone.vocab_size, VOCAB)
    save_maps(folder, vocab)
    save_backbone(folder / "backbone", backbone)
    save_features(folder, backbone, trained)
    facts = {
        "rows": len(trained),
        "tokens": int(trained.lengths.sum()),
        "supervised": int(trained.supervised.sum()),
        "held_out": len(held_out),
    }
    (folder / "facts.json").write_text(json.dumps(facts))
    print(facts)


def chats(rows: int) -> list[dict[str, Any]]:
    """Chats of about 512 tokens: a text to read, of other chats' replies, then two turns that are answered."""
    shipped = [row["messages"] for row in read_jsonl(SHIPPED)]
    made: list[dict[str, Any]] = []
    replies = [chat[1]["content"] for chat in shipped]
    for number in range(rows):
        first, second = shipped[2 * number], shipped[2 * number + 1]
        text = " ".join(replies[-3 * number - 3 :][:3])[:650]
        opening = {"role": "user", "content": f"{text}\n\n{first[0]['content']}"}
        made.append({"messages": [opening, first[1], *second[:2]]})
    return made


def parts(folder: Path, tokenizer: Any, held_out: float = HELD_OUT, length: int = LENGTH) -> tuple[Rows, Rows]:
    """Rows trained on and held out, as a recipe with this share splits them."""
    return Rows.of(load_prepared(folder / "rows", tokenizer)).parted(held_out, length)


def save_maps(folder: Path, vocab: DraftVocab) -> None:
    """The draft vocabulary, the same for all."""
    assert vocab.d2t is not None
    assert vocab.t2d is not None
    np.save(folder / "d2t.npy", vocab.d2t.numpy())
    np.save(folder / "t2d.npy", vocab.t2d.numpy())
    torch.save({"d2t": vocab.d2t, "t2d": vocab.t2d}, folder / "maps.pt")


def save_backbone(folder: Path, backbone: Backbone) -> None:
    """The backbone with an output projection of its own and an index, as SpecForge wants it."""
    backbone.model.save_pretrained(folder)
    backbone.tokenizer.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = backbone.output_weight.detach().clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_theta": backbone.config.rope_parameters["rope_theta"], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    draft = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": VOCAB}
    (folder.parent / "specforge.json").write_text(json.dumps(config | draft))


@torch.no_grad()
def save_features(folder: Path, backbone: Backbone, rows: Rows) -> None:
    """Hidden states of each row that has none yet: for speculators before the final norm, for SpecForge behind it."""
    from datasets import Dataset

    taps = (*default_taps(backbone.num_layers), backbone.num_layers)
    ours, theirs = folder / "speculators", folder / "specforge"
    (ours / "hidden_states").mkdir(parents=True, exist_ok=True)
    theirs.mkdir(exist_ok=True)
    columns: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    with Progress(len(rows), "rows", "features") as progress:
        for row in range(len(rows)):
            ids, mask = (torch.from_numpy(part.astype(np.int64)) for part in rows[row])
            theirs_of = theirs / f"{row:05d}.ckpt"
            if not theirs_of.exists():  # the last that is written of a row
                features = backbone.forward(ids[None], taps=taps)
                assert features.taps is not None
                states = features.taps[0].unflatten(-1, (len(taps), -1)).contiguous()  # (T, 4, H)
                save_file({"token_ids": ids, "hidden_states": states}, ours / "hidden_states" / f"hs_{row}.safetensors")
                row_of = {"input_ids": ids, "loss_mask": mask, "hidden_state": features.last.clone()}
                row_of["aux_hidden_state"] = states[:, :-1].flatten(1)[None].clone()
                with whole_file(theirs_of) as part:
                    torch.save(row_of, part)
            for name, value in zip(columns, (ids.tolist(), mask.tolist(), len(ids)), strict=True):
                columns[name].append(value)
            progress.advance()
    for name in columns:  # speculators wants a row to validate on, and no training row is spared for that
        columns[name].append(columns[name][-1])
    copied = ours / "hidden_states" / f"hs_{len(rows)}.safetensors"
    shutil.copyfile(copied.with_name(f"hs_{len(rows) - 1}.safetensors"), copied)
    Dataset.from_dict(columns).with_format("torch").save_to_disk(str(ours / "data"))


# --- what came of it ------------------------------------------------------------------------------------------------


def table(folder: Path) -> None:
    """The best run of each trainer, by held-out accuracy, and what it cost."""
    backbone = load_backbone("smollm2-135m", dtype="bfloat16")
    facts = json.loads((folder / "facts.json").read_text())
    _, held_out = parts(folder, backbone)
    best: dict[str, dict[str, Any]] = {}
    for watched in sorted((folder / "runs").glob("*/*/watch.json")):
        trainer, rate = watched.parts[-3:-1]
        found = {"lr": rate, **figures(json.loads(watched.read_text()), facts)}
        found["accuracy"] = accuracy(read_head(trainer, watched.parent, backbone), held_out)
        print(json.dumps({"trainer": trainer, **found}))
        if trainer not in best or sum(found["accuracy"]) > sum(best[trainer]["accuracy"]):
            best[trainer] = found
    share = facts["supervised"] / facts["tokens"]
    print(f"\n{facts['rows']} rows, {facts['tokens']:,} tokens, {share:.0%} of them supervised\n")
    print("| trainer | lr | steps | threads | tokens/s behind step 20 | a CPU-second | peak memory | top-1 by depth |")
    print("|---|---|---|---|---|---|---|---|")
    for trainer, one in best.items():
        tops = " / ".join(f"{share:.3f}" for share in one["accuracy"])
        taken = f"{one['steps']} | {one['threads']} | {one['speed']:.0f} | {one['cpu_speed']:.0f}"
        print(f"| {trainer} | {one['lr']} | {taken} | {one['peak_mib']:.0f} MiB | {tops} |")


def figures(watched: dict[str, Any], facts: dict[str, Any]) -> dict[str, float]:
    """Tokens a second of wall and of CPU time behind the first steps, and the peak of memory."""
    steps, cpu = watched["steps"], watched["cpu"]
    skipped = min(SKIPPED, len(steps) - 1)
    tokens = facts["tokens"] * (len(steps) - skipped) / len(steps)
    speeds = {"speed": tokens / (steps[-1] - steps[skipped - 1]), "cpu_speed": tokens / (cpu[-1] - cpu[skipped - 1])}
    return {**speeds, "steps": len(steps), "peak_mib": watched["peak_mib"], "threads": watched.get("threads", 0)}


def read_head(trainer: str, run: Path, backbone: Backbone) -> DraftHead:
    """The head that a trainer left, as ours."""
    if trainer.startswith("headstart"):
        return load_head(run / "run", backbone, dtype=torch.float32)
    files = [*run.rglob("*.safetensors"), *run.rglob("training_state.pt")]
    if not files:
        raise SystemExit(f"{run}: no weights were left there")
    newest = max(files, key=lambda path: path.stat().st_mtime)
    if newest.suffix == ".pt":
        return foreign(torch.load(newest, map_location="cpu", weights_only=True)["draft_state_dict"], backbone)
    return foreign(load_file(newest), backbone)


def foreign(tensors: dict[str, Tensor], backbone: Backbone) -> DraftHead:
    """An EAGLE-3 head from tensors by the authors' names or by those of speculators."""
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    vocab = DraftVocab.from_maps(named.pop("d2t").long(), named.pop("t2d").bool(), backbone.vocab_size)
    head = Eagle3.build(backbone, vocab=vocab)
    wanted = {name for name in head.state_dict() if not name.startswith("vocab.")}
    borrowed = {name for name in named if name.startswith(("embed_tokens", "verifier_"))}
    strange = (named.keys() - borrowed) ^ wanted
    assert not strange, f"other tensors than expected: {sorted(strange)}"
    head.load_state_dict({**head.state_dict(), **{name: named[name].float() for name in wanted}})
    return head


def accuracy(head: DraftHead, rows: Rows) -> list[float]:
    """Held-out top-1 at each depth."""
    objective = Objective(head.eval(), LossSettings(depths=DEPTHS), autocast=True)
    sums = count(objective, forwards(rows, range(len(rows)), BatchSettings(forward_rows=4)))
    return (sums.hits / sums.anchors).tolist()


if __name__ == "__main__":
    main(sys.argv[1:])
