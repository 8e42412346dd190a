"""What a generation does where something runs out or does not pay: memory, trained length, speed; and lent caches."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import zoo
from headstart import Backbone, Generator, UserError
from headstart.heads import backbone as backbone_module
from headstart.heads.cache import HANDED_OVER
from headstart.heads.methods import METHODS
from headstart.inference import pace as pace_module
from headstart.inference.pace import Pace
from headstart.inference.tree import Tree

ARGUMENT = "cache" if "cache" in inspect.signature(transformers.LlamaModel.forward).parameters else "past_key_values"


def ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, zoo.VOCAB, (1, count), generator=torch.Generator().manual_seed(seed))


def greedy(generator: Generator, prompt: Tensor, new: int = 12, **options: Any) -> list[int]:
    return generator.generate(prompt, max_new_tokens=new, do_sample=False, eos_token_id=-1, **options).tokens


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
@pytest.mark.parametrize("drafter", [None, "eagle3"])
def test_a_prefill_that_does_not_fit_is_done_in_smaller_pieces(
    drafter: str | None, error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, prompt = zoo.backbone(), ids(150)
    head = METHODS[drafter].build(backbone) if drafter else None
    expected = greedy(Generator(backbone, head), prompt)
    whole, widths = backbone.layers[2].forward, list[int]()

    def small(hidden: Tensor, *rest: Any, **more: Any) -> Any:
        widths.append(hidden.shape[1])
        if hidden.shape[1] > 40:
            raise error
        return whole(hidden, *rest, **more)

    monkeypatch.setattr(backbone.layers[2], "forward", small)
    with pytest.warns(UserWarning, match="memory ran out over 512 positions of the prompt: it was read 37 at a time"):
        assert greedy(Generator(backbone, head), prompt) == expected
    assert widths[:4] == [150, 75, 37, 37]


def test_memory_that_never_suffices_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = zoo.backbone()

    def full(*rest: Any, **more: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(backbone.layers[0], "forward", full)
    with pytest.raises(UserError, match="memory runs out over 18 positions of a prompt of 150 tokens"):
        greedy(Generator(backbone), ids(150))


def test_other_errors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = zoo.backbone()

    def broken(*rest: Any, **more: Any) -> Any:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(backbone.layers[0], "forward", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        greedy(Generator(backbone), ids(150))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_no_quadratic_mask_is_held_for_a_long_prompt(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    length, largest = 8000, [0]
    backbone = zoo.backbone(family, max_position_embeddings=8192, num_hidden_layers=1)
    made = backbone_module.attention_mask

    def seen(*rest: Any, **more: Any) -> Tensor:
        mask = made(*rest, **more)
        largest.append(mask.untyped_storage().nbytes() // mask.element_size())
        return mask

    monkeypatch.setattr(backbone_module, "attention_mask", seen)
    prompt = ids(length)
    tokens = greedy(Generator(backbone, "ngram"), prompt, 4)
    assert max(largest) <= 512 * length
    with torch.no_grad():
        whole = torch.cat([prompt, torch.tensor([tokens])], 1)
        last = backbone.forward(whole).last[0, length - 1 : -1]
        assert backbone.logits(last).argmax(-1).tolist() == tokens


@pytest.mark.slow
def test_memory_is_constant_over_a_thousand_generations() -> None:
    """Tensors that are alive, and their bytes; a tree of another form each time."""
    import gc

    backbone = zoo.backbone(num_hidden_layers=1)
    generator = Generator(backbone, METHODS["eagle3"].build(backbone), tree="dynamic:3x3x6")

    def alive() -> tuple[int, int]:
        gc.collect()
        found = [one for one in gc.get_objects() if isinstance(one, Tensor)]
        return len(found), sum(one.untyped_storage().nbytes() for one in found if not one.is_meta)

    for turn in range(200):
        greedy(generator, ids(4 + turn % 9, seed=turn), 6)
    before = alive()
    for turn in range(1000):
        greedy(generator, ids(4 + turn % 9, seed=turn), 6)
    after = alive()
    assert after[0] <= before[0] + 512, "layouts of trees are kept, a bounded number of them"
    assert after[1] <= before[1] * 1.02 + 512 * 64


# -- the trained length ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["eagle3", "eagle1", "hydra"])
def test_behind_the_trained_length_nothing_is_drafted(method: str) -> None:
    backbone = zoo.backbone()
    head = METHODS[method].build(backbone, trained_positions=20)
    generator = Generator(backbone, head, tree="chain:3")
    expected = greedy(Generator(backbone), ids(10), 30)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        output = generator.generate(ids(10), max_new_tokens=30, do_sample=False, eos_token_id=-1)
        assert output.tokens == expected
        assert 0 < output.stats.drafted <= 30, "up to there, it drafts"
        long = generator.generate(ids(60), max_new_tokens=6, do_sample=False, eos_token_id=-1)
        assert long.tokens == greedy(Generator(backbone), ids(60), 6)
        assert long.stats.drafted == 0
    (note,) = [str(one.message) for one in told]
    assert f"the {method} head was trained on texts of up to 20 tokens" in note


def test_drafts_do_not_reach_over_the_trained_length() -> None:
    backbone, reached = zoo.backbone(), list[int]()
    generator = Generator(backbone, METHODS["eagle3"].build(backbone, trained_positions=20), tree="chain:8")
    drafted = generator._intake.factory("match")()

    def seen(budget: int) -> Tree:
        tree = type(drafted).draft(drafted, budget)
        reached.append(drafted.length + tree.depth)
        return tree

    drafted.draft = seen  # type: ignore[method-assign]
    generator._intake._factories[False] = lambda: drafted
    with pytest.warns(UserWarning, match="up to 20 tokens"):
        greedy(generator, ids(10), 16)
    assert max(one for one in reached if one <= 20) == 20
    assert all(one >= 20 for one in reached[reached.index(20) :])


# -- speed -------------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass when told: 1 a forward, and what a draft takes."""

    def __init__(self, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, forward = 0.0, backbone.forward

        def counted(*rest: Any, **more: Any) -> Any:
            self.now += 1
            return forward(*rest, **more)

        monkeypatch.setattr(backbone, "forward", counted)
        monkeypatch.setattr("headstart.inference.stats.perf_counter", lambda: self.now)


class Scripted:
    """Drafts of three tokens that take half a forward; right where `right` is the text, else wrong."""

    taps: tuple[int, ...] = ()

    def __init__(self, clock: Clock, right: Sequence[int] = ()) -> None:
        self.clock, self.right, self.asked = clock, list(right), 0

    def start(self, prompt: Sequence[int]) -> None:
        self.text = list(prompt[:1])

    def advance(self, features: Any, next_ids: Sequence[int]) -> None:
        self.text += next_ids

    def draft(self, budget: int) -> Tree:
        self.asked += 1
        self.clock.now += 0.5
        at = len(self.text)
        guesses = self.right[at : at + min(3, budget)] or [(self.text[-1] + 1) % zoo.VOCAB] * min(1, budget)
        return Tree.chain([self.text[-1], *guesses])


def test_drafting_that_does_not_pay_switches_itself_off(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = zoo.backbone()
    expected = greedy(Generator(backbone), ids(6), 100)
    drafter = Scripted(Clock(backbone, monkeypatch))
    generator = Generator(backbone, drafter, auto_off=True)
    with pytest.warns(UserWarning, match="slower here than plain decoding .a measured speed-up of 0"):
        assert greedy(generator, ids(6), 100) == expected
    asked = drafter.asked
    assert asked == pace_module.LEAST * (pace_module.OFTEN - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert greedy(generator, ids(6), 20) == expected[:20]
    assert drafter.asked == asked, "it stays off"


def test_drafting_that_pays_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, prompt = zoo.backbone(), ids(6)
    expected = greedy(Generator(backbone), prompt, 200)
    drafter = Scripted(Clock(backbone, monkeypatch), [*prompt[0].tolist(), *expected])
    generator = Generator(backbone, drafter, auto_off=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            output = generator.generate(prompt, max_new_tokens=200, do_sample=False, eos_token_id=-1)
            assert output.tokens == expected
    assert output.stats.acceptance_length > 3
    assert generator._pace is not None
    assert generator._pace.speedup == pytest.approx(4 / 1.5)


def test_one_slow_moment_decides_nothing() -> None:
    pace = Pace()
    for round in range(1, 400):
        plain, slower = pace.plain(), 50.0 if 100 < round < 130 else 1.0
        pace.note(plain, slower if plain else 1.5 * slower, 1 if plain else 2)
    assert pace.speedup == pytest.approx(2 / 1.5)
    assert not pace.off
    assert not Pace().plain(), "the first round is a drafted one"


# -- caches that are lent ----------------------------------------------------------------------------------------------


def lent(backbone: Backbone, text: Tensor, kind: str = "DynamicCache") -> Any:
    if kind == "StaticCache":
        cache = transformers.StaticCache(config=backbone.model.config, max_cache_len=64)
    else:
        cache = (
            transformers.DynamicCache(config=backbone.model.config) if kind == "config" else transformers.DynamicCache()
        )
    if text.numel():
        with torch.no_grad():
            backbone.model(text, **{ARGUMENT: cache})
    return cache


@pytest.mark.parametrize("held", [0, 1, 5, 11])
@pytest.mark.parametrize("kind", ["DynamicCache", "config", "StaticCache"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_cache_is_taken_over_and_handed_back(family: str, kind: str, held: int) -> None:
    """As by the model's own generate, which goes on with it in the next call."""
    backbone, prompt = zoo.backbone(family), ids(12)
    expected = greedy(Generator(backbone), prompt)
    cache, head = lent(backbone, prompt[:, :held], kind), METHODS["eagle3"].build(backbone)
    for door in (False, True):
        if door:
            options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1, "pad_token_id": 2}
            cache = lent(backbone, prompt[:, :held], kind)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = backbone.model.generate(
                    prompt, attention_mask=torch.ones_like(prompt), **{ARGUMENT: cache}, **options,
                    custom_generate=Generator(backbone, head),
                )  # fmt: skip
            tokens = found[0, 12:].tolist()
        else:
            tokens = greedy(Generator(backbone, head), prompt, **{ARGUMENT: cache})
        assert tokens == expected
        assert int(cache.get_seq_length()) == 12 + 12 - 1
        text = torch.cat([prompt, torch.tensor([tokens])], 1)
        fresh = lent(backbone, text[:, :-1], kind)
        for ours, theirs in zip(cache.layers, fresh.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-4)


def test_both_names_are_known() -> None:
    backbone, prompt = zoo.backbone(), ids(12)
    for name in HANDED_OVER:
        cache = lent(backbone, prompt[:, :4])
        assert greedy(Generator(backbone), prompt, **{name: cache}) == greedy(Generator(backbone), prompt)


def test_a_conversation_goes_on_with_one_cache() -> None:
    backbone, cache, text = zoo.backbone(), transformers.DynamicCache(), ids(6)
    generator = Generator(backbone, "ngram")
    for turn in range(3):
        tokens = greedy(generator, text, 7, **{ARGUMENT: cache})
        assert tokens == greedy(Generator(backbone), text, 7)
        text = torch.cat([text, torch.tensor([tokens]), ids(3, seed=turn)], 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda b: lent(b, ids(5, seed=9)), "its keys of layer 0 are not those of the first 5 tokens of the prompt"),
        (lambda b: lent(zoo.backbone(seed=3), ids(12)[:, :5]), "belongs to another text or model"),
        (lambda b: lent(zoo.backbone(num_key_value_heads=4), ids(12)[:, :5]), "belongs to another text or model"),
        (lambda b: lent(b, ids(12)), "holds 12 tokens and the prompt has 12"),
        (lambda b: transformers.StaticCache(config=b.model.config, max_cache_len=20), "has 20 slots"),
        (lambda b: b.new_cache(), "expected a DynamicCache or StaticCache"),
        (lambda b: ((ids(1), ids(1)),), "cache is a tuple"),
    ],
)
def test_a_cache_of_something_else_is_refused(make: Any, words: str) -> None:
    backbone = zoo.backbone()
    with pytest.raises(UserError, match=words):
        greedy(Generator(backbone), ids(12), **{ARGUMENT: make(backbone)})


def test_one_cache_is_for_one_answer() -> None:
    backbone = zoo.backbone()
    with pytest.raises(UserError, match="holds one text, and 2 answers are asked for"):
        greedy(Generator(backbone), ids(12).expand(2, -1), **{ARGUMENT: transformers.DynamicCache()})
