"""Whatever may be passed as drafter gives the backbone's own tokens; oracles need the rounds that arithmetic says."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Backbone
from headstart.heads.format import save_head
from headstart.heads.methods import METHODS
from headstart.inference.drafters import is_name, modules_of, usual
from headstart.inference.generator import Generator
from headstart.inference.hybrid import Hybrid
from headstart.inference.suffix import SuffixStore
from headstart.inference.tree import Tree
from headstart.options import drafter_of

NO_END = {"eos_token_id": -1}
TREES = ["chain:3", "static:0,1,0.0,1.0,0.0.0", "dynamic:3x3x7", "gain:3x3"]


@functools.cache
def backbone() -> Backbone:
    return zoo.backbone()


@functools.cache
def small() -> Backbone:
    return zoo.backbone(seed=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


@functools.cache
def head() -> Any:
    return METHODS["eagle3"].build(backbone())


DRAFTERS: dict[str, Any] = {
    "none": lambda: None,
    "ngram": lambda: "ngram",
    "suffix": lambda: "suffix",
    "store": SuffixStore,
    "exit": lambda: "exit:2",
    "int8": lambda: "int8",
    "model": small,
    "twin": lambda: Backbone(backbone().model, zoo.tokenizer()),
    "hybrid:exit": lambda: "hybrid:exit:1",
    "hybrid head": lambda: Hybrid("ngram", head(), least=1),
    "joined": lambda: Hybrid("suffix", small(), least=1, joined=True),
}
TAKES = {
    "none": [],
    "ngram": ["chain:3"],
    "suffix": ["chain:3", "dynamic:3x3x7"],
    "store": ["chain:3", "dynamic:3x3x7"],
}
CASES = [(name, tree) for name in DRAFTERS for tree in [None, *TAKES.get(name, TREES)]]


@functools.cache
def wanted(prompt: tuple[int, ...], limit: int, end: int, seed: int | None) -> tuple[int, ...]:
    options = {} if seed is None else {"temperature": 1.0, "seed": seed}
    plain = Generator(backbone()).generate(list(prompt), max_new_tokens=limit, eos_token_id=end, **options)
    return tuple(plain.tokens)


@pytest.mark.parametrize(("name", "tree"), CASES)
def test_answers_are_those_of_plain_decoding(name: str, tree: str | None) -> None:
    """Greedy and seeded; prompts of one token; limits of 1 and 2; and every end that falls into an accepted run."""
    generator = Generator(backbone(), DRAFTERS[name](), tree=tree)
    prompts = [(7,), (5, 17, 40, 8, 5, 17, 40)]
    cases = [
        (prompt, limit, -1, seed) for prompt in prompts for limit, seed in ((1, None), (2, 3), (14, None), (14, 3))
    ]
    ends = set(wanted(prompts[1], 14, -1, None)[3:12:4])
    cases += [(prompts[1], 14, end, None) for end in ends]
    for prompt, limit, end, seed in cases:
        options = {} if seed is None else {"temperature": 1.0, "seed": seed}
        found = generator.generate(list(prompt), max_new_tokens=limit, eos_token_id=end, **options)
        assert tuple(found.tokens) == wanted(prompt, limit, end, seed)
        assert found.stats.tokens == 1 + found.stats.rounds + sum(found.stats.accepted)


@pytest.mark.parametrize("drafter", ["model", "twin", "exit"])
@pytest.mark.parametrize("rule", ["chain", "siblings", "block"])
def test_rules_for_drawn_drafts_take_draft_models(drafter: str, rule: str) -> None:
    """They draw, say by which law, and a draft model that is the backbone itself is then hardly ever rejected."""
    generator = Generator(backbone(), DRAFTERS[drafter](), rule=rule)
    found = generator.generate([5, 17, 40], max_new_tokens=40, temperature=1.0, seed=2, **NO_END)
    assert len(found.tokens) == 40
    if drafter == "twin" and rule != "siblings":
        assert found.stats.accepted == found.stats.offered, "p is q: every draft is accepted"
    fewer = zoo.backbone(seed=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=80)
    drawn = Generator(backbone(), fewer, rule=rule).generate([90, 95], max_new_tokens=20, temperature=1.0, **NO_END)
    assert len(drawn.tokens) == 20, "q is zero where the draft model has no token"
    with pytest.raises(UserError, match="gain:3x3"):
        Generator(backbone(), DRAFTERS[drafter](), tree="gain:3x3", rule="siblings").generate(
            [5], max_new_tokens=9, temperature=1.0, **NO_END
        )


class Oracle:
    """Knows the text, but for every token whose place `wrong` names."""

    taps: tuple[int, ...] = ()

    def __init__(self, text: Sequence[int], depth: int, every: int = 0, first: int = 0) -> None:
        self.text, self.depth, self.every, self.first = list(text), depth, every, first

    def start(self, prompt: Sequence[int]) -> None:
        self.known = 1

    def advance(self, features: Any, next_ids: Sequence[int]) -> None:
        self.known += len(next_ids)

    def draft(self, budget: int) -> Tree:
        places = range(self.known, min(self.known + min(self.depth, budget), len(self.text)))
        drafts = [(self.text[place] + self.wrong(place)) % zoo.VOCAB for place in places]
        return Tree.chain([self.text[self.known - 1], *drafts])

    def wrong(self, place: int) -> int:
        return int(self.every > 0 and (place - self.first + 1) % self.every == 0)


@pytest.mark.parametrize("depth", [1, 2, 4, 7])
@pytest.mark.parametrize("new", [1, 2, 3, 8, 9, 24, 25])
def test_an_oracle_needs_the_rounds_that_arithmetic_says(depth: int, new: int) -> None:
    prompt = [5, 17, 40]
    plain = Generator(backbone()).generate(prompt, max_new_tokens=new, **NO_END)
    oracle = Oracle(prompt + plain.tokens, depth)
    found = Generator(backbone(), oracle).generate(prompt, max_new_tokens=new, **NO_END)
    assert found.tokens == plain.tokens
    assert found.stats.rounds == math.ceil((new - 1) / (depth + 1))


@pytest.mark.parametrize("depth", [1, 3, 6])
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_an_oracle_that_is_wrong_now_and_then(depth: int, every: int) -> None:
    """Rounds counted by hand: each takes drafts up to the first wrong one, and one token more."""
    prompt, new = [5, 17, 40], 25
    plain = Generator(backbone()).generate(prompt, max_new_tokens=new, **NO_END)
    oracle = Oracle(prompt + plain.tokens, depth, every, first=len(prompt) + 1)
    found = Generator(backbone(), oracle).generate(prompt, max_new_tokens=new, **NO_END)
    rounds, told = 0, 1
    while told < new:
        run = 0
        while run < min(depth, new - told - 1) and (told + run) % every != 0:  # new token number told + run + 1
            run += 1
        told, rounds = told + run + 1, rounds + 1
    assert found.tokens == plain.tokens
    assert found.stats.rounds == rounds
    if every == 1:
        assert rounds == new - 1


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        ("sufix", 'known are "ngram", "suffix"'),
        ("exit", "known are"),
        ("ngram:3", "known are"),
        ("hybrid:", "known are"),
        (3, "expected a draft head"),
    ],
)
def test_other_drafters_are_refused(drafter: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Generator(backbone(), drafter)


def test_trees_that_a_drafter_does_not_grow_are_refused() -> None:
    for drafter, tree in (("ngram", "dynamic:3x3x6"), ("suffix", "static:0,1"), (None, "chain:3")):
        with pytest.raises(UserError, match=f"{tree}"):
            Generator(backbone(), drafter, tree=tree)


def test_names_and_modules() -> None:
    assert all(map(is_name, ["ngram", "suffix", "exit:6", "int8", "hybrid:runs/head"]))
    assert not any(map(is_name, ["runs/head", "user/name", "none"]))
    assert list(modules_of(Hybrid("ngram", Hybrid(small(), head())))) == [small().model, head()]
    assert not list(modules_of("ngram"))


def test_a_draft_model_left_in_training_mode_is_evaluated() -> None:
    model = small()
    model.model.train()
    seen: list[bool] = []
    handle = model.model.get_decoder().register_forward_hook(lambda module, *_: seen.append(module.training))
    Generator(backbone(), Hybrid("ngram", model)).generate([5, 6], max_new_tokens=6, **NO_END)
    handle.remove()
    assert seen
    assert not any(seen)
    assert model.model.training
    model.model.eval()


def test_the_command_line_takes_the_same_names_and_folders(tmp_path: Path) -> None:
    small().model.save_pretrained(tmp_path / "small")
    save_head(head(), tmp_path / "head")
    model = drafter_of(str(tmp_path / "small"), backbone())
    assert isinstance(model, Backbone)
    assert model.dtype == backbone().dtype
    assert type(drafter_of(str(tmp_path / "head"), backbone())) is type(head())
    assert [drafter_of(name, backbone()) for name in ("none", "exit:2", "int8")] == [None, "exit:2", "int8"]
    both = drafter_of(f"hybrid:{tmp_path / 'small'}", backbone())
    assert isinstance(both, Hybrid)
    assert isinstance(both.second, Backbone)
    with pytest.raises(UserError, match="for lookup alone, suffix"):
        drafter_of("hybrid:none", backbone())
    # a head in another layout that carries the architecture of its backbone is not taken for a whole model
    (tmp_path / "eagle").mkdir()
    (tmp_path / "eagle" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}')
    save_file({"fc.weight": torch.zeros(2, 4)}, tmp_path / "eagle" / "model.safetensors")
    with pytest.raises(UserError, match="num_attention_heads"):
        drafter_of(str(tmp_path / "eagle"), backbone())


def test_the_usual_form_of_every_kind_is_known() -> None:
    """What reports write down where no tree is asked for."""
    kinds: list[Any] = [None, "ngram", "suffix", "int8", "exit:1", "hybrid:exit:1", "hybrid:ngram"]
    found = [
        str(usual(backbone(), kind)) for kind in [*kinds, head(), small(), SuffixStore(), Hybrid("suffix", head())]
    ]
    grown, looked_up = "dynamic:3x3x6", "dynamic:8x3x8"
    assert found == [
        "None", "chain:5", looked_up, grown, grown, grown, "chain:5", grown, grown, looked_up, grown,
    ]  # fmt: skip
