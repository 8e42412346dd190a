"""Another vocabulary for a trained head: what stays is exact, what is new begins as the backbone's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs
import torch

import zoo
from headstart.cli import main
from headstart.errors import UserError
from headstart.heads.format import load_head, provenance_of, save_head
from headstart.heads.methods import METHODS, TRAINABLE
from headstart.heads.prune import prune, revocab
from headstart.heads.vocab import DraftVocab
from headstart.training.coverage import Coverage, VocabSettings
from headstart.training.setup import set_up


def trained(method, size=40):
    """A head that is no longer as it began."""
    backbone = zoo.backbone()
    vocab = DraftVocab(torch.arange(size) * 2, zoo.VOCAB)
    head = METHODS[method].build(backbone, vocab=vocab)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return head.eval()


def first_logits(head, ids):
    features = head.backbone.forward(ids[:, :-1], taps=head.taps)
    return head.extend(head.start(), features, ids[:, 1:]).logits[0, 0]


@pytest.mark.parametrize("method", METHODS)
def test_logits_of_the_tokens_that_stay_are_what_they_were(method):
    head = trained(method)
    kept = DraftVocab([0, 4, 10, 50, 78], zoo.VOCAB)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    pruned = prune(head, kept)
    assert pruned.config.draft_vocab_size == pruned.vocab.size == 5
    assert pruned.vocab.ids.tolist() == kept.ids.tolist()
    ids = torch.arange(3, 15)[None]
    expected = first_logits(head, ids)[head.vocab.to_draft(kept.ids)]
    torch.testing.assert_close(first_logits(pruned, ids), expected, rtol=0, atol=1e-6)
    for name, tensor in pruned.state_dict().items():
        if name.startswith("vocab."):
            continue
        if tensor.shape == before[name].shape:
            assert torch.equal(tensor, before[name]), name
        else:
            assert torch.equal(tensor, before[name][head.vocab.to_draft(kept.ids)]), name
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())


def test_tokens_that_were_never_learned_are_refused():
    with pytest.raises(UserError, match="token 3 is not among the 40 that the head can propose"):
        prune(trained("eagle3"), DraftVocab([0, 3, 4], zoo.VOCAB))
    with pytest.raises(UserError, match="one of 50 tokens; the head.s is of 96"):
        revocab(trained("eagle3"), DraftVocab([0, 3, 4], 50))


@pytest.mark.parametrize("method", TRAINABLE)
def test_new_tokens_begin_as_those_of_a_new_head(method):
    head = trained(method)
    vocab = DraftVocab(range(40), zoo.VOCAB)  # the same size, other tokens: no shape tells
    other = revocab(head, vocab)
    fresh = METHODS[method].build(head.backbone, vocab=vocab)
    for name, tensor in other.state_dict().items():
        if name.split(".")[0] in ("lm_head", "projections"):
            assert torch.equal(tensor[1::2], fresh.state_dict()[name][1::2]), name
            assert torch.equal(tensor[::2], head.state_dict()[name][:20]), name
        elif not name.startswith("vocab."):
            assert torch.equal(tensor, head.state_dict()[name]), name


def test_the_command_line_tells_coverage_and_prunes(tmp_path, monkeypatch, capsys):
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in zoo.chats(12)))
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("headstart.heads.load.load_tokenizer", lambda *args, **keywords: zoo.tokenizer())
    common = ["data", "vocab", "--backbone", "tiny", "--input", str(chats), "--held-out", "0.2"]
    assert main([*common, "--sizes", "20", "4", "20"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = {line[0]: [float(share.rstrip("%")) for share in line[1:]] for line in lines[-3:]}
    assert list(table) == ["4", "20", "96"]
    assert table["96"] == [100, 100]
    assert 0 < table["4"][0] < table["20"][0] <= 100
    save_head(trained("eagle3"), tmp_path / "head", provenance={"steps": 7})
    prunes = ["--head", str(tmp_path / "head"), "--keep", "8", "--out", str(tmp_path / "small")]
    assert main([*common, *prunes]) == 0
    small = load_head(tmp_path / "small", zoo.backbone())
    assert small.vocab.size == 8
    assert trained("eagle3").vocab.contains(small.vocab.ids).all()
    assert provenance_of(tmp_path / "small") == {"steps": 7, "pruned": True}
    assert main([*common, *prunes[:2]]) == 2
    assert "--head, --keep and --out belong together" in capsys.readouterr().err


def test_coverage_of_rows_that_have_little():
    """Nothing held out is no share of 0; a size is told once, and none is larger than what there is."""
    counts = torch.tensor([0, 4, 4, 2, 0])
    coverage = Coverage(train=counts, held_out=torch.zeros_like(counts))
    told = [line.split() for line in coverage.table([2, 1, 2]).splitlines()[-3:]]
    assert told == [["1", "40.00%", "-"], ["2", "80.00%", "-"], ["5", "100.00%", "-"]]
    assert coverage.vocab(1).ids.tolist() == [1]
    assert coverage.vocab(4).ids.tolist() == [0, 1, 2, 3]
    with pytest.raises(UserError, match="--sizes has 6; the tokenizer has 5 tokens"):
        coverage.table([2, 6])
    for wrong in ({"sizes": [0]}, {"keep": 0, "head": "x", "out": Path("y")}):
        with pytest.raises(UserError, match="expected (numbers|a number) of 1 or more"):
            VocabSettings(**wrong)


def test_coverage_counts_what_training_counts(tmp_path):
    """The draft vocabulary of each size is the one that a run of the same rows begins with."""
    folder = runs.prepared(tmp_path)
    settings = VocabSettings(input=[str(folder)], held_out=0.2)
    coverage = Coverage.of(settings, zoo.tokenizer())
    setup = set_up(runs.recipe(tmp_path / "run", folder, draft_vocab=17), zoo.backbone())
    assert coverage.vocab(17).ids.tolist() == setup.head.vocab.ids.tolist()
