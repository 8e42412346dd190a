"""What a run begins with: a warm start keeps the vocabulary it has, unless asked otherwise."""

from __future__ import annotations

import json

import pytest
import runs
import torch

import zoo
from headstart.data.prepare import PrepareSettings, prepare
from headstart.errors import UserError
from headstart.heads import chat
from headstart.heads.backbone import Backbone
from headstart.heads.exchange import FORMATS, export_head
from headstart.heads.format import load_head, save_head
from headstart.heads.methods import METHODS, TRAINABLE
from headstart.heads.vocab import DraftVocab
from headstart.training.batches import Rows
from headstart.training.loop import train
from headstart.training.plan import plan
from headstart.training.recipe import Recipe
from headstart.training.start import counted, first_head, trained_head

ROWS = Rows.from_lists([[50, 51, 52, 50, 51, 50, 7]], [[0, 1, 1, 1, 1, 1, 0]])  # other tokens than the head has


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return runs.prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture
def stored(tmp_path):
    """A head that was trained on tokens 3..42, as its folder and in memory."""
    backbone = zoo.backbone()
    rows = Rows.from_lists([list(range(3, 43))], [[1] * 40])
    torch.manual_seed(1)
    head = METHODS["eagle3"].build(backbone, vocab=counted(rows, zoo.VOCAB, 40))
    with torch.no_grad():
        head.lm_head.weight.add_(torch.randn_like(head.lm_head.weight))
    save_head(head, tmp_path / "old")
    return tmp_path / "old", head


def begun(tmp_path, stored, **changes):
    recipe = Recipe(backbone="tiny", run=tmp_path / "run", start=str(stored[0]), **changes)
    backbone = zoo.backbone()
    return first_head(recipe, METHODS[recipe.method], backbone, ROWS, trained_head(recipe, backbone))


@pytest.mark.parametrize("draft_vocab", [None, 40])
def test_a_warm_start_keeps_the_map_and_the_weights(tmp_path, stored, draft_vocab):
    """B067: the new rows have other tokens; the map stays, byte for byte."""
    head = begun(tmp_path, stored, draft_vocab=draft_vocab)
    assert head.training
    assert head.state_dict().keys() == stored[1].state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, stored[1].state_dict()[name]), name


def test_a_vocabulary_is_counted_anew_where_that_is_asked_for(tmp_path, stored):
    head = begun(tmp_path, stored, new_vocab=True, draft_vocab=5)
    assert head.vocab.ids.tolist() == [0, 1, 50, 51, 52]
    assert torch.equal(head.midlayer.mlp.up_proj.weight, stored[1].midlayer.mlp.up_proj.weight)
    assert torch.equal(head.lm_head.weight, METHODS["eagle3"].build(zoo.backbone(), vocab=head.vocab).lm_head.weight)
    assert begun(tmp_path, stored, new_vocab=True).vocab.size == 40


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"draft_vocab": 20}, "draft_vocab is 20; .* has 40 tokens. Leave it out"),
        ({"method": "medusa"}, "of method eagle3; the recipe trains medusa"),
        ({"head": {"head_dim": 4}}, "head.head_dim is 4; .* has 8"),
    ],
)
def test_a_head_that_is_not_what_the_recipe_says_is_refused(tmp_path, stored, changes, said):
    with pytest.raises(UserError, match=said):
        begun(tmp_path, stored, **changes)


def test_a_new_head_needs_no_new_vocabulary(tmp_path):
    with pytest.raises(UserError, match="new_vocab is set, but no start"):
        Recipe(backbone="tiny", run=tmp_path, new_vocab=True)


def test_a_run_begins_with_a_head(tmp_path, stored, rows):
    recipe = runs.recipe(tmp_path / "warm", rows, "eagle3", start=str(stored[0]), optim__max_steps=1, optim__lr=1e-9)
    train(recipe, backbone=zoo.backbone())
    kept = runs.weights(tmp_path / "warm")
    assert torch.equal(kept["d2t"], stored[1].vocab.d2t)
    torch.testing.assert_close(kept["lm_head.weight"], stored[1].lm_head.weight.detach(), rtol=0, atol=1e-5)


FOREIGN = [(method, to) for method in TRAINABLE for to in FORMATS if method in FORMATS[to]]


@pytest.mark.parametrize(("method", "to"), FOREIGN)
def test_a_run_and_its_plan_begin_with_a_head_in_other_tools_files(method, to, rows, tmp_path):
    """Also where these can be read beside the backbone alone."""
    backbone = zoo.backbone(num_hidden_layers=8)
    fields = {"eagle1": {"fc_bias": False}, "eagle3": {}}.get(method, {"num_heads": 2})
    vocab = DraftVocab(range(5, 45), zoo.VOCAB) if method == "eagle3" else None
    head = METHODS[method].build(backbone, vocab=vocab, **fields)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    start = str(export_head(head, to, tmp_path / "theirs"))
    changes = {"optim__max_steps": 1, "optim__lr": 1e-9, "evaluate__prompts": 0, "head": {}}
    recipe = runs.recipe(tmp_path / "run", rows, method, start=start, **changes)
    planned = plan(recipe, backbone=backbone).facts["trainable parameters"]
    made = load_head(train(recipe, backbone=backbone))
    assert planned == f"{sum(one.numel() for one in made.parameters()):,}"
    for name, weight in head.state_dict().items():
        if name in made.state_dict():
            torch.testing.assert_close(made.state_dict()[name], weight, rtol=0, atol=1e-7)
    assert {name for name, _ in head.named_parameters()} - {name for name, _ in made.named_parameters()} <= {"fc.bias"}


def test_a_head_records_the_template_of_its_rows(tmp_path):
    """B015: also where it is not that of the backbone; whoever loads it beside that one is warned."""
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in zoo.chats(6)))
    template, own = tmp_path / "other.jinja", zoo.tokenizer()
    template.write_text("{#- another -#}" + own.chat_template)
    made = PrepareSettings(input=[str(tmp_path / "chats.jsonl")], out=tmp_path / "rows", chat_template=str(template))
    prepare(own, made)
    with pytest.warns(UserWarning, match="was prepared with the template .*other.jinja"):
        head = train(runs.recipe(tmp_path / "run", made.out, optim__max_steps=1), backbone=zoo.backbone())
    changed = chat.with_template(own, template)
    recorded = load_head(head).config.template_hash
    assert recorded == chat.fingerprint(changed)["template"] != chat.fingerprint(own)["template"]
    with pytest.warns(UserWarning, match="was trained on chat template"):
        load_head(head, zoo.backbone())
    load_head(head, Backbone(zoo.model(), changed))
