"""Every head on every architecture: built, trained, saved, loaded and decoded with; a new row joins by being there."""

from __future__ import annotations

import functools
import inspect
import types
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers
from test_heads import CASES
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import zoo
from headstart import Backbone, Generator, UserError, load_head
from headstart.heads.anatomy import find_reaches
from headstart.heads.base import DraftHead
from headstart.heads.format import save_head
from headstart.heads.methods import METHODS
from headstart.heads.vocab import DraftVocab
from headstart.training.batches import Batch
from headstart.training.objective import Objective
from headstart.training.recipe import LossSettings

NAMES = [*families.ROWS, *families.NESTED]
PROMPT = 15  # longer than the windows of 8
NEW = 14

pytestmark = pytest.mark.filterwarnings("ignore")


def prompt(seed: int = 3) -> Tensor:
    return torch.randint(3, zoo.VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(seed))


@functools.cache
def own(backbone: Backbone) -> list[int]:
    """What the model's own generate says, greedily."""
    return generated(backbone, prompt(), NEW)


@torch.no_grad()
def generated(backbone: Backbone, ids: Tensor, new: int) -> list[int]:
    """Greedy tokens of `model.generate`.

    Where a cache ends with other rotary factors, transformers 5.17 goes on from the last token alone, as if there was
    no text; without a cache it computes what later versions do.
    """
    begin = getattr(backbone.model, "prepare_inputs_for_generation", None)
    stale = backbone._recomputes and "next_sequence_length" not in inspect.getsource(begin)
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 2, "use_cache": not stale}
    found = backbone.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return found[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def train(head: DraftHead, steps: int = 2) -> None:
    """Two optimizer steps on two short rows."""
    objective = Objective(head, LossSettings())
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    ids = torch.randint(3, zoo.VOCAB, (2, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[:, 4:] = True
    batch = Batch(ids, mask, [0, 1], ids.numel())
    counts = objective.counts(batch).clamp(min=1)
    for _ in range(steps):
        total = objective(batch, objective.features(batch), 1 / counts).total
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        assert torch.isfinite(total)


def trained(backbone: Backbone, method: str, vocab: DraftVocab | None = None, **fields: Any) -> DraftHead:
    if not fields and method in ("medusa", "hydra"):
        fields = {"num_heads": 3}
    torch.manual_seed(1)
    head = METHODS[method].build(backbone, vocab=vocab, **fields)
    if head.trainable:
        before = [weight.detach().clone() for weight in head.parameters()]
        train(head)
        assert any((old != new).any() for old, new in zip(before, head.parameters(), strict=True))
    return head


@pytest.mark.parametrize("name", NAMES)
def test_lookup_changes_nothing(name: str) -> None:
    backbone = families.backbone(name)
    ids = prompt()
    assert Generator(backbone, "ngram").generate(ids, max_new_tokens=NEW, do_sample=False).tokens == own(backbone)
    sampled = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.0, "seed": 4}
    plain = Generator(backbone).generate(ids, **sampled)
    assert Generator(backbone, "ngram").generate(ids, **sampled).tokens == plain.tokens


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "gpt2", "falcon", "llama4"])
def test_eager_attention(name: str) -> None:
    backbone = families.backbone(name, "eager")
    head = trained(backbone, "eagle3")
    output = Generator(backbone, head, tree="dynamic:3x2x6").generate(prompt(), max_new_tokens=NEW, do_sample=False)
    assert output.tokens == own(backbone)


def _pairs() -> list[Any]:
    """All heads on every shape of model; beyond `families.CORE` all but one are left to the slow tests."""
    return [
        pytest.param(name, method, marks=[] if name in families.CORE or method == "eagle3" else pytest.mark.slow)
        for name in NAMES
        for method in METHODS
    ]


@pytest.mark.parametrize(("name", "method"), _pairs())
def test_every_head(name: str, method: str, tmp_path: Path) -> None:
    backbone = families.backbone(name)
    head = trained(backbone, method)
    loaded = load_head(save_head(head, tmp_path / "head"), backbone)
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in head.state_dict().items())
    for tree in ("chain:2", "dynamic:3x2x6"):
        output = Generator(backbone, loaded, tree=tree).generate(prompt(), max_new_tokens=NEW, do_sample=False)
        assert output.tokens == own(backbone)
        assert output.stats.rounds < NEW or output.stats.acceptance_length == 1


@pytest.mark.parametrize(("method", "fields"), [case for case in CASES if case[1]], ids=str)
def test_every_shape_of_a_head(method: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Each switch of a method: trained, saved, loaded and decoded with, its draft vocabulary a third of all."""
    backbone = families.backbone("qwen3")
    head = trained(backbone, method, DraftVocab(range(0, zoo.VOCAB, 3), zoo.VOCAB), **fields)
    loaded = load_head(save_head(head, tmp_path / "head"), backbone)
    assert loaded.config == head.config
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in head.state_dict().items())
    output = Generator(backbone, loaded, tree="dynamic:3x2x6").generate(prompt(), max_new_tokens=NEW, do_sample=False)
    assert output.tokens == own(backbone)


@pytest.mark.parametrize("name", ["phi3-longrope", "llama-longrope"])
@pytest.mark.parametrize("length", [18, 19, 20, 21, 22, 30])
def test_prompts_on_both_sides_of_the_turn(name: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary factors change at position 20, in the midst of a prompt that is read in one piece."""
    backbone = families.backbone(name)
    ids = torch.randint(3, zoo.VOCAB, (1, length), generator=torch.Generator().manual_seed(length))
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = generated(backbone, ids, 8)
    for drafter in (None, trained(backbone, "eagle3")):
        assert Generator(backbone, drafter).generate(ids, **options).tokens == expected


def test_prompts_beyond_the_turn_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = families.backbone("phi3-longrope")
    ids = torch.randint(3, zoo.VOCAB, (1, 40), generator=torch.Generator().manual_seed(1))
    whole = Generator(backbone, "ngram").generate(ids, max_new_tokens=8, do_sample=False).tokens
    monkeypatch.setattr("headstart.inference.generator.PREFILL", 7)
    monkeypatch.setattr("headstart.inference.prefill.WHOLE", 0)
    assert Generator(backbone, "ngram").generate(ids, max_new_tokens=8, do_sample=False).tokens == whole


def test_rows_of_one_batch_do_not_pass_the_turn() -> None:
    backbone = families.backbone("phi3-longrope")
    cache = backbone.new_cache(2)
    with torch.no_grad():
        backbone.forward(prompt().expand(2, -1), cache=cache)
        cache.commit_all()
        with pytest.raises(UserError, match="one at a time"):
            backbone.forward(prompt().expand(2, -1), cache=cache)


REFUSED: dict[str, str] = {
    "Mamba": "linear_attention",
    "Jamba": "linear_attention",
    "Qwen3Next": "linear_attention",
    "FalconH1": "hybrid",
    "NemotronH": "of type linear_attention keep",
    "Rwkv": "recurrent",
    "MBart": "MBartDecoder takes no position ids",
    "Bloom": "ALiBi",
    "Mpt": "ALiBi",
    "GPTNeo": "local attention",
}
SHAPES: dict[str, dict[str, Any]] = {"GPTNeo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}}


@pytest.mark.parametrize("prefix", REFUSED)
def test_what_cannot_be_rolled_back_is_refused_by_layer(prefix: str) -> None:
    config = getattr(transformers, f"{prefix}Config")(
        **{"vocab_size": zoo.VOCAB, "hidden_size": 64, **SHAPES.get(prefix, {"num_hidden_layers": 4})}
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with pytest.raises(UserError, match=REFUSED[prefix]):
        Backbone(model)


def test_layers_are_refused_with_the_reason() -> None:
    for kind, reason in (("indexed_attention", "choose what they look at"), ("hybrid", "keep a state")):
        config = types.SimpleNamespace(model_type="odd", layer_types=[kind, "full_attention", "mlp"])
        with pytest.raises(UserError, match=f"odd one: layers of type {kind} {reason}"):
            find_reaches(config, zoo.model().model, "odd one")
    prefixes = transformers.GemmaConfig(use_bidirectional_attention=True, num_hidden_layers=1)
    with torch.device("meta"), pytest.raises(UserError, match="look both ways over a prompt"):
        Backbone(transformers.GemmaForCausalLM(prefixes))


def test_a_window_that_a_model_does_not_apply_is_told_and_not_applied() -> None:
    model = zoo.model(sliding_window=8)
    with pytest.warns(UserWarning, match="window of 8 tokens, which LlamaModel does not apply"):
        backbone = Backbone(model, zoo.tokenizer())
    with torch.no_grad():
        ids, settings = prompt(), {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 2}
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **settings)
    output = Generator(backbone, "ngram").generate(ids, max_new_tokens=NEW, do_sample=False)
    assert output.tokens == whole[0, PROMPT:].tolist()


def test_logits_of_a_model_that_leaves_out_what_its_config_says() -> None:
    for name, same in (("aya-vision", True), ("cohere", False)):
        backbone = families.backbone(name)
        states = torch.randn(1, 3, 32)
        plain = states @ backbone.output_weight.T
        assert torch.allclose(backbone.logits(states), plain) is same, name


def test_every_scaling_of_rotary_factors_has_a_row() -> None:
    known = [families.config(name).rope_parameters or {} for name in families.ROWS if name.startswith(("llama", "phi"))]
    assert set(ROPE_INIT_FUNCTIONS) <= {found.get("rope_type") for found in known}
