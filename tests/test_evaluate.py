"""Evaluation: every figure against a count position by position, and an estimate that decoding bears out."""

from __future__ import annotations

import pytest
import runs
import torch

import zoo
from headstart.heads.methods import TRAINABLE
from headstart.heads.vocab import DraftVocab
from headstart.inference.generator import Generator
from headstart.inference.stats import expected_tokens
from headstart.training import evaluate as room
from headstart.training.batches import Batch, Rows
from headstart.training.evaluate import count, evaluate, first_choices, prompts
from headstart.training.loop import train
from headstart.training.objective import Objective
from headstart.training.recipe import LossSettings
from headstart.training.setup import set_up


def batch_of(seed, lengths=(24, 17)):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(3, zoo.VOCAB, (length,), generator=generator)
        mask[row, 3:length] = torch.rand(length - 3, generator=generator) < 0.9
    return Batch(ids, mask, list(range(len(lengths))), sum(lengths))


class Sometimes(torch.nn.Module):
    """A head that knows the backbone's first choice at some positions, and says something else at the others."""

    max_depth, taps = None, ()

    def __init__(self, backbone, share, vocab=None):
        super().__init__()
        self.backbone, self.share = backbone, share
        self.vocab = vocab or DraftVocab(None, backbone.vocab_size)

    def unroll(self, features, ids, found):
        choices = self.backbone.logits(features.last).argmax(-1).flatten()
        for depth, at in enumerate(found):
            draws = torch.rand(len(at), generator=torch.Generator().manual_seed(depth))
            aim = choices[at + 1 + depth]
            said = self.vocab.to_draft(aim)
            # where the aim cannot be proposed, the draft id 0 is said, which is another token
            said = torch.where((draws < self.share) & (said >= 0), said, (said + 1) % self.vocab.size)
            yield torch.nn.functional.one_hot(said, self.vocab.size).float()

    def project(self, hidden, depth):
        return 9 * hidden


def naive(objective, batches):
    """Anchor by anchor: hits by depth, and hits given that all depths above hit."""
    depths, backbone, head = objective.depths, objective.backbone, objective.head
    seen, hits, reached, kept = ([0] * depths for _ in range(4))
    for batch in batches:
        rows, width = batch.ids.shape
        truth = backbone.model(batch.ids).logits.argmax(-1)
        found, said = [], {}
        for depth in range(depths):
            found.append(
                [
                    (b, t)
                    for b in range(rows)
                    for t in range(width)
                    if t + 2 + depth < width and batch.mask[b, t + 1 : t + 3 + depth].all()
                ]
            )
        flat = [torch.tensor([b * width + t for b, t in one], dtype=torch.long) for one in found]
        for depth, hidden in enumerate(head.unroll(objective.features(batch), batch.ids, flat)):
            tops = head.vocab.ids[head.project(hidden, depth).argmax(-1)]
            for place, (b, t) in enumerate(found[depth]):
                said[b, t, depth] = bool(tops[place] == truth[b, t + 1 + depth])
                above = all(said[b, t, one] for one in range(depth))
                seen[depth] += 1
                hits[depth] += said[b, t, depth]
                reached[depth] += above
                kept[depth] += above and said[b, t, depth]
    return seen, hits, reached, kept


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("draft_vocab", [None, 30])
def test_counts_are_those_of_a_count_by_hand(share, draft_vocab):
    backbone = zoo.backbone()
    vocab = None if draft_vocab is None else DraftVocab(range(3, 3 + draft_vocab), zoo.VOCAB)
    objective = Objective(Sometimes(backbone, share, vocab), LossSettings(depths=4))
    batches = [batch_of(1), batch_of(2, (9, 30, 12))]
    found = count(objective, batches)
    expected = naive(objective, batches)
    assert [found.anchors.tolist(), found.hits.tolist(), found.reached.tolist(), found.kept.tolist()] == list(expected)
    figures = found.figures(objective.shares)
    seen, hits, reached, kept = expected
    assert figures["accuracy"] == pytest.approx([h / s for h, s in zip(hits, seen, strict=True)])
    conditional = [k / max(r, 1) for k, r in zip(kept, reached, strict=True)]
    assert figures["conditional_accuracy"] == pytest.approx(conditional)
    assert figures["estimated_acceptance_length"] == pytest.approx(expected_tokens(conditional))
    if share == 1 and draft_vocab is None:
        assert figures["estimated_acceptance_length"] == 5.0  # four drafts, and the backbone's own token
    if share == 1 and draft_vocab is not None:
        assert max(figures["accuracy"]) < 1  # what cannot be proposed is a miss


@pytest.mark.parametrize("method", TRAINABLE)
def test_evaluation_and_training_tell_the_same_loss(method):
    backbone = zoo.backbone()
    torch.manual_seed(0)
    objective = Objective(TRAINABLE[method].build(backbone), LossSettings())
    batch = batch_of(3)
    counts = objective.counts(batch)
    result = objective(batch, objective.features(batch), 1 / counts)
    figures = count(objective, [batch]).figures(objective.shares)
    assert figures["loss"] == pytest.approx(result.total.item(), rel=1e-5)
    assert figures["accuracy"] == pytest.approx((result.hits / counts).tolist())  # the whole vocabulary here and there


def test_first_choices_do_not_depend_on_how_many_are_asked_at_once(monkeypatch):
    backbone = zoo.backbone()
    last = torch.randn(11, backbone.hidden_size)
    whole = first_choices(backbone, last)
    monkeypatch.setattr(room, "LOGITS", 3 * backbone.vocab_size)
    assert first_choices(backbone, last).tolist() == whole.tolist() == backbone.logits(last).argmax(-1).tolist()
    assert first_choices(backbone, last[:0]).tolist() == []


def test_prompts_end_where_the_first_reply_begins():
    rows = Rows.from_lists([[5, 6, 7, 8, 9, 5], [5, 6, 7]], [[0, 0, 1, 1, 0, 1], [1, 1, 1]])
    assert prompts(rows, 5) == [[5, 6]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return runs.prepared(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("method", TRAINABLE)
def test_the_measured_length_is_that_of_generation(method, rows, tmp_path):
    setup = set_up(runs.recipe(tmp_path, rows, method, evaluate__prompts=2, evaluate__tree="chain:2"), zoo.backbone())
    figures = evaluate(setup)
    assert setup.head.training
    generator = Generator(setup.backbone, setup.head, tree="chain:2")
    stats = [generator.generate(one, max_new_tokens=6, do_sample=False).stats for one in prompts(setup.held_out, 2)]
    rounds = sum(one.rounds for one in stats)
    assert figures["tree"] == "chain:2"
    assert figures["acceptance_length"] == pytest.approx((sum(one.tokens for one in stats) - 2) / rounds)


def test_without_held_out_rows_there_is_nothing_to_tell(rows, tmp_path):
    recipe = runs.recipe(tmp_path / "run", rows, data__held_out=0.0, optim__max_steps=1)
    assert evaluate(set_up(recipe, zoo.backbone())) == {}
    train(recipe, backbone=zoo.backbone())
    assert not any("held_out" in line for line in runs.lines(tmp_path / "run"))


@pytest.mark.parametrize("tree", ["chain:4", None])
@pytest.mark.parametrize("method", TRAINABLE)
def test_the_estimate_is_borne_out_by_decoding(method, tree, rows, tmp_path):
    """B162: over-fitted on the backbone's own greedy answers, both lengths are long and agree."""
    backbone = zoo.backbone(num_hidden_layers=2)
    plain = Generator(backbone)
    starts = [torch.randint(3, zoo.VOCAB, (6,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(6)]
    texts = [start + plain.generate(start, max_new_tokens=24, do_sample=False).tokens for start in starts]
    changes = {"optim__max_steps": 100, "optim__lr": 1e-2, "loss__depths": 4, "loss__name": "hard"}
    if TRAINABLE[method].build(backbone).max_depth:
        changes["head__num_heads"] = 4
    changes |= {"batch__rows": 6, "batch__forward_rows": 6}
    changes |= {"evaluate__rows": 6, "evaluate__prompts": 6, "evaluate__max_new_tokens": 24, "evaluate__tree": tree}
    with pytest.MonkeyPatch.context() as patch:
        own = Rows.from_lists(texts, [[0] * 6 + [1] * (len(text) - 6) for text in texts])
        patch.setattr("headstart.training.setup.prepared_rows", lambda data, backbone: own)
        patch.setattr("headstart.training.batches.split", lambda keys, share: (range(6), range(6)))
        train(runs.recipe(tmp_path / "run", rows, method, **changes), backbone=backbone)
    figures = runs.lines(tmp_path / "run")[-1]["held_out"]
    assert figures["tree"] == (tree or "dynamic:3x3x6")
    least = 2 if method == "medusa" else 3  # which does not read what was drafted
    assert figures["estimated_acceptance_length"] > least
    assert figures["acceptance_length"] > least
    assert figures["acceptance_length"] == pytest.approx(figures["estimated_acceptance_length"], rel=0.15)
