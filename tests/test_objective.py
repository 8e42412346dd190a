"""An objective knows where it stands: losses against the plain formula, whatever a step is dealt out to; its memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from formulas import plain_value
from torch import nn

import zoo
from headstart.errors import UserError
from headstart.heads import eagle, layer, methods
from headstart.heads.backbone import Features
from headstart.heads.vocab import DraftVocab
from headstart.training.batches import Batch, anchors
from headstart.training.losses import LOSSES
from headstart.training.objective import Objective
from headstart.training.recipe import LossSettings


def batch_of(lengths, width=None, seed=0, replies=True):
    """Rows with a reply each, padded to `width`; what is behind a row is no token that it contains."""
    generator = torch.Generator().manual_seed(seed)
    width = width or max(lengths)
    ids = torch.full((len(lengths), width), 2)
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(3, zoo.VOCAB, (length,), generator=generator)
        mask[row, length // 3 : length] = replies
    return Batch(ids, mask, list(range(len(lengths))), sum(lengths))


METHODS = methods.TRAINABLE
ALL = [(method, name) for method in METHODS for name in LOSSES]


def objective_of(method, name="soft", draft_vocab=None, depths=None, **settings):
    backbone = zoo.backbone()
    backbone.model.requires_grad_(False)
    vocab = None if draft_vocab is None else DraftVocab(range(0, 2 * draft_vocab, 2), zoo.VOCAB)
    torch.manual_seed(5)
    head = METHODS[method].build(backbone, vocab=vocab, **({"num_heads": 3} if method in ("medusa", "hydra") else {}))
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    loss = LossSettings(name=name, depths=depths, **settings)
    if LOSSES[name].features and not head.regresses:
        with pytest.raises(UserError, match=f"{name}, which compares guessed features .* this {method} head"):
            Objective(head, loss)
        pytest.skip("refused, as it has to be")
    return Objective(head, loss)


def gradients_of(objective, batches):
    counts = sum(objective.counts(batch) for batch in batches)
    objective.zero_grad()
    total = 0.0
    for batch in batches:
        result = objective(batch, objective.features(batch), 1 / counts.clamp(min=1))
        result.total.backward()
        total += result.total.item()
    return total, {name: weight.grad.clone() for name, weight in objective.head.named_parameters()}


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, gradient in expected[1].items():
        assert gradient.any(), f"{name} is not trained at all"
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("method", "name"), ALL)
def test_neither_padding_nor_forwards_change_loss_or_gradients(method, name):
    """B045, B034: the same rows padded to other widths, and split over other forwards."""
    objective = objective_of(method, name, draft_vocab=40)
    lengths = [17, 12, 9]
    whole = gradients_of(objective, [batch_of(lengths)])
    assert_same(gradients_of(objective, [batch_of(lengths, width=32)]), whole)
    wide = batch_of(lengths)
    each = [Batch(wide.ids[i : i + 1, :n], wide.mask[i : i + 1, :n], [i], n) for i, n in enumerate(lengths)]
    assert_same(gradients_of(objective, each), whole)
    assert_same(gradients_of(objective, [each[2], batch_of(lengths[:2])]), whole)


@pytest.mark.parametrize(("method", "name"), ALL)
@pytest.mark.parametrize(("draft_vocab", "over"), [(None, "all"), (40, "draft"), (40, "all")])
def test_the_objective_is_the_plain_formula(method, name, draft_vocab, over):
    """B046: full logits of the backbone and of the head, position by position; gradients of every head are these."""
    settings = LossSettings(name=name, over=over)
    objective = objective_of(method, name, draft_vocab, over=over)
    head, backbone = objective.head, objective.backbone
    batch = batch_of([14, 10], seed=3)
    features = objective.features(batch)
    vocab = head.vocab
    full = backbone.model(batch.ids, attention_mask=_true(batch)).logits
    p = full.softmax(-1)[..., vocab.ids] if over == "all" else full[..., vocab.ids].softmax(-1)
    total, hits = 0.0, []
    found = anchors(batch.mask, 3)
    for depth, hidden in enumerate(head.unroll(features, batch.ids, found)):
        logits = head.project(hidden, depth)
        values, hit = [], 0
        for place, at in enumerate(found[depth].tolist()):
            b, t = divmod(at, batch.ids.shape[1])
            aim = p[b, t + 1 + depth]
            label = int(vocab.to_draft(batch.ids[b, t + 2 + depth]))
            if name != "hard" or label >= 0:
                truth = features.last[b, t + 1 + depth]
                values.append(plain_value(settings, logits[place], aim, label, hidden[place], truth))
                hit += int(logits[place].argmax() == (label if name == "hard" else aim.argmax()))
        total = total + torch.stack(values).mean() * 0.8**depth / (1 + 0.8 + 0.64)
        hits.append(hit)
    expected = torch.autograd.grad(total, list(head.parameters()), materialize_grads=True)
    result = objective(batch, features, 1 / objective.counts(batch))
    result.total.backward()
    torch.testing.assert_close(result.total, total, rtol=1e-5, atol=1e-6)
    assert result.hits.tolist() == hits
    for weight, gradient in zip(head.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-4, atol=1e-6)


def _true(batch):
    """The attention mask of transformers: the two rows of the test are 14 and 10 long."""
    return (torch.arange(batch.ids.shape[1]) < torch.tensor([[14], [10]])).long()


@pytest.mark.parametrize(("method", "name"), ALL)
def test_a_batch_with_nothing_supervised_gives_every_weight_a_gradient_of_zero(method, name):
    """Else the processes that have rows would wait for ever for those that have none."""
    objective = objective_of(method, name)
    batch = batch_of([8, 5], replies=False)
    result = objective(batch, objective.features(batch), torch.ones(3))
    result.total.backward()
    assert result.total == 0
    for weight in objective.head.parameters():
        assert weight.grad is not None
        assert not weight.grad.any()


class Oracle(nn.Module):
    """A head that says, at every depth, the token `offset` behind where that depth should be."""

    max_depth, taps, method, regresses = 3, (), "oracle", True

    def __init__(self, backbone, offset):
        super().__init__()
        self.backbone, self.offset = backbone, offset
        self.vocab = DraftVocab(None, backbone.vocab_size)
        self.strength = nn.Parameter(torch.tensor(30.0))

    def unroll(self, features, ids, found):
        for depth, at in enumerate(found):
            yield F.one_hot(ids.flatten()[at + 2 + depth + self.offset], zoo.VOCAB).float()

    def project(self, hidden, depth):
        return self.strength * hidden


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_the_hard_loss_wants_token_t_2_d_and_no_other(offset):
    """B018: tokens that are all different; only the documented offset has no loss, at each depth."""
    backbone = zoo.backbone()
    ids = torch.arange(3, 23)[None]
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, 4:18] = True
    batch = Batch(ids, mask, [0], 20)
    objective = Objective(Oracle(backbone, offset), LossSettings(name="hard"))
    result = objective(batch, objective.features(batch), torch.ones(3))
    each = result.losses / objective.counts(batch)
    assert (each < 1e-6).all() if offset == 0 else (each > 20).all()
    assert result.hits.tolist() == (objective.counts(batch).tolist() if offset == 0 else [0, 0, 0])


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_the_soft_loss_is_taught_by_the_logits_of_t_1_d(offset):
    """The oracle says the backbone's own logits, read at the position that depth d is compared with, or one off."""
    backbone = zoo.backbone()
    batch = batch_of([20, 15])
    features = Features(backbone.forward(batch.ids).last, None)
    oracle = Oracle(backbone, offset)
    oracle.unroll = lambda features, ids, found: (
        features.last.flatten(0, 1)[at + 1 + depth + offset] for depth, at in enumerate(found)
    )
    oracle.project = lambda hidden, depth: backbone.logits(hidden)
    objective = Objective(oracle, LossSettings())
    result = objective(batch, features, torch.ones(3))
    assert (result.hits.tolist() == objective.counts(batch).tolist()) == (offset == 0)


@pytest.mark.parametrize("over", ["draft", "all"])
def test_the_smooth_l1_loss_is_zero_for_the_features_of_t_1_d_alone(over):
    backbone = zoo.backbone()
    batch = batch_of([20, 15])
    features = Features(backbone.forward(batch.ids).last, None)
    for offset in (-1, 0, 1):
        oracle = Oracle(backbone, offset)
        oracle.unroll = lambda features, ids, found, offset=offset: (
            features.last.flatten(0, 1)[at + 1 + depth + offset] for depth, at in enumerate(found)
        )
        oracle.project = lambda hidden, depth: backbone.logits(hidden)
        settings = LossSettings(terms={"smooth_l1": 1.0, "kl": 0.1}, over=over)
        losses = Objective(oracle, settings)(batch, features, torch.ones(3)).losses
        assert (losses.abs() < 1e-4).all() if offset == 0 else (losses > 1).all()


def test_weights_of_the_depths():
    assert objective_of("eagle3", depths=3).shares.tolist() == pytest.approx([1 / 2.44, 0.8 / 2.44, 0.64 / 2.44])
    assert objective_of("eagle3", depths=2, weights=[3.0, 1.0]).shares.tolist() == [0.75, 0.25]
    with pytest.raises(UserError, match=r"loss.weights has 2 weights; the depths trained are 3"):
        objective_of("medusa", weights=[1.0, 1.0])


def test_more_tokens_than_there_are_cannot_be_compared():
    with pytest.raises(UserError, match=r"loss.k is 30; the head proposes 24 tokens"):
        objective_of("eagle3", "top_k", draft_vocab=24, k=30)
    assert objective_of("eagle3", draft_vocab=24, k=30).loss.logits


@pytest.mark.parametrize("method", METHODS)
def test_noise_is_on_what_the_head_reads_alone_and_belongs_to_the_row(method):
    objective = objective_of(method, noise=0.5)
    read = []
    unroll = objective.head.unroll
    objective.head.unroll = lambda features, *rest: read.append(features) or unroll(features, *rest)
    batch = batch_of([17, 12, 9])
    clean = objective.features(batch)
    before = clean.last.clone()
    scale = torch.ones(objective.depths)
    objective(batch, clean, scale)
    noisy = read[-1]
    assert torch.equal(clean.last, before)
    for row, length in enumerate([17, 12, 9]):
        for one, other in ((noisy.last, clean.last), (noisy.taps, clean.taps)):
            if one is not None:
                noise = (one - other)[row]
                assert noise[:length].abs().max() <= 0.25 * 512 / length
                assert noise[:length].std().item() == pytest.approx(0.5 * 512 / length / 12**0.5, rel=0.15)
                assert not noise[length:].any()
    alone = Batch(batch.ids[1:2, :12], batch.mask[1:2, :12], [1], 12)
    objective(alone, objective.features(alone), scale)
    torch.testing.assert_close(read[-1].last[0], noisy.last[1, :12])  # whatever it is batched and padded with
    objective.seed = 1
    objective(batch, clean, scale)
    assert not torch.equal(read[-1].last, noisy.last)  # another step
    objective.head.eval()
    objective(batch, clean, scale)
    assert read[-1] is clean  # none where it is measured


def test_only_the_rows_of_the_draft_vocabulary_are_asked_of_the_backbone(monkeypatch):
    """B146."""
    objective = objective_of("eagle3", draft_vocab=20)
    monkeypatch.setattr(objective.backbone, "logits", lambda hidden: pytest.fail("full logits in training"))
    batch = batch_of([12])
    assert objective(batch, objective.features(batch), torch.ones(3)).total.isfinite()


@pytest.mark.parametrize("depths", [2, 9])
def test_depths_that_would_leave_a_head_untrained_or_without_one_are_refused(depths):
    with pytest.raises(UserError, match=rf"loss.depths is {depths}; the medusa head has 3 depths"):
        objective_of("medusa", depths=depths)
    assert objective_of("eagle3", depths=depths).depths == depths


@pytest.mark.parametrize("method", METHODS)
def test_only_positions_with_a_label_are_computed(method):
    """Prompts lend keys and values (and the features these are made of), and nothing else is done for them."""
    objective = objective_of(method, draft_vocab=40)
    batch = batch_of([40, 30])
    batch.mask[:, :25] = False
    features = objective.features(batch)
    asked = sum(len(at) for at in anchors(batch.mask, 3))
    rows = {}

    def told(name):
        def hook(module, inputs, output):
            rows[name] = rows.get(name, 0) + output.shape[:-1].numel()

        return hook

    for name, module in objective.head.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(told(name))
    objective(batch, features, torch.ones(3)).total.backward()
    assert rows
    lent = ("k_proj", "v_proj", "fc")
    for name, number in rows.items():
        assert number <= (batch.ids.numel() + asked if name.endswith(lent) else asked), name
    assert asked < batch.ids.numel()


# --- memory ---------------------------------------------------------------------------------------------------------


def peak_of_a_step(length, depths=7, unroll=None):
    """Bytes that a step of one row, half of it supervised, holds at most at a time beyond those it begins with."""
    from torch.profiler import ProfilerActivity, profile

    objective = objective_of("eagle3", draft_vocab=40, depths=depths)
    batch = batch_of([length])
    batch.mask[:, : length // 2] = False
    features = Features(torch.randn(1, length, 32), torch.randn(1, length, 96))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        objective(batch, features, torch.ones(depths)).total.backward()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def dense(queries, text, ahead, at):
    """`attend_ahead` with a mask of queries by positions, as most trainers have it."""
    length = text[0].shape[1]
    visible = torch.arange(length) <= (at % length)[:, None]  # (M, T), of the one row
    keys, values = (part[0].repeat_interleave(2, 1).transpose(0, 1) for part in text)  # (n, T, h)
    own_keys, own_values = (part.repeat_interleave(2, 2) for part in ahead)  # (M, E, n, h)
    scores = (queries.transpose(0, 1) @ keys.mT).masked_fill(~visible, -torch.inf)  # (n, M, T)
    own = torch.einsum("mnh,menh->nme", queries, own_keys)
    weights = (torch.cat((scores, own), -1) * queries.shape[-1] ** -0.5).softmax(-1)
    mixed = weights[..., :length] @ values + torch.einsum("nme,menh->nmh", weights[..., length:], own_values)
    return mixed.transpose(0, 1).flatten(1)


def test_memory_of_a_step_grows_as_the_length_does(monkeypatch):
    """Seven unrolled steps, with blocks so small that they do not hide what grows with its square."""
    monkeypatch.setitem(layer._SCORES, "cpu", 1 << 18)
    short, long = peak_of_a_step(1024), peak_of_a_step(2048)
    assert long < 2.1 * short, (short, long)
    monkeypatch.setattr(eagle, "attend_ahead", dense)
    assert peak_of_a_step(1024) > 3 * peak_of_a_step(512), "a dense form is seen"


def test_compiled_products_are_not_kept_for_every_shape():
    """Without it a run in bf16 on a CPU grows by 80 MB a step; measured on SmolLM2, 20 steps: 2.6 GiB, or 1.4."""
    code = (
        "import os; from headstart.training.setup import keep_few_products; keep_few_products(); "
        "print(os.environ['LRU_CACHE_CAPACITY'])"
    )
    for given, found in (({}, "16"), ({"LRU_CACHE_CAPACITY": "99"}, "99")):
        kept = {name: value for name, value in os.environ.items() if not name.endswith("_CACHE_CAPACITY")}
        told = subprocess.run(
            [sys.executable, "-P", "-c", code], env=kept | given, capture_output=True, text=True, check=True
        )
        assert told.stdout.split() == [found]
