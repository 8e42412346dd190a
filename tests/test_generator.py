"""Generation is the backbone's own: token for token, with every drafter and tree, at every end and limit."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Backbone
from headstart.heads.methods import METHODS
from headstart.heads.vocab import DraftVocab
from headstart.inference import generator as module
from headstart.inference.generator import Generator, Output
from headstart.inference.tree import Chain, Dynamic, Shape, Static, Tree, limited

NEW = 24
STATIC = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)))
SHAPES: dict[str, Shape] = {"chain": Chain(5), "static": STATIC, "dynamic": Dynamic(4, 3, 8)}
NO_END = {"eos_token_id": -1}


class Scripted:
    """Drafts that are right where `right` says so, among wrong ones, in trees of a given form.

    Args:
        reference: the whole true text, prompt included; behind its end nothing is right.
        right: position -> whether the true token is among the drafts for it; None leaves that to chance.
        form: what gives the parents of the next tree.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self, reference: Sequence[int], right: Callable[[int], bool] | None, form: Callable[[], list[int]]
    ) -> None:
        self.reference, self.right, self.form = list(reference), right, form
        self.random = random.Random(1)

    def start(self, prompt: Sequence[int]) -> None:
        self.text = [prompt[0]]

    def advance(self, features: Any, next_ids: Sequence[int]) -> None:
        assert features.last.shape[1] == len(next_ids), "one token behind each position"
        self.text += next_ids

    def draft(self, budget: int) -> Tree:
        parents = self.form()
        depths = Tree(parents, parents).depths
        kept = [node for node in range(len(parents)) if depths[node] <= budget]
        parents = [-1, *(kept.index(parents[node]) for node in kept[1:])]
        return Tree(self._tokens(parents), parents)

    def _tokens(self, parents: list[int]) -> list[int]:
        tokens = [self.text[-1]] + [0] * (len(parents) - 1)
        on_path, depths = {0}, Tree(parents, parents).depths
        for node in range(len(parents)):
            children = [child for child in range(len(parents)) if parents[child] == node]
            position = len(self.text) + depths[node]
            true = self.reference[position] if position < len(self.reference) else None
            pool = self.random.sample(range(zoo.VOCAB), len(children) + 1)
            if node not in on_path or self.right is None:
                drafts = pool[: len(children)]
            else:
                drafts = [token for token in pool if token != true][: len(children)]
                if children and true is not None and self.right(position):
                    place = self.random.randrange(len(children))
                    drafts[place] = true
            for child, token in zip(children, drafts, strict=True):
                tokens[child] = token
                if node in on_path and token == true:
                    on_path.add(child)
        return tokens


def chain_form(depth: int = 5) -> Callable[[], list[int]]:
    return lambda: list(range(-1, depth))


def static_form() -> list[int]:
    return [-1, 0, 0, 0, 1, 1, 2, 4, 4, 7]


def dynamic_form(seed: int = 0) -> Callable[[], list[int]]:
    generator = random.Random(seed)
    return lambda: [-1, *(generator.randrange(max(0, node - 4), node) for node in range(1, generator.randint(1, 10)))]


FORMS: dict[str, Callable[[], Callable[[], list[int]]]] = {
    "chain": chain_form, "static": lambda: static_form, "dynamic": dynamic_form
}  # fmt: skip
LUCK: dict[str, Callable[[int], bool] | None] = {
    "random": None, "right": lambda _: True, "wrong": lambda _: False, "half": lambda t: bool((t * 7919) % 5 % 2)
}  # fmt: skip


def gemma3(attention: str = "sdpa") -> Backbone:
    """Windows in some layers only, so that masks come by layer type."""
    fields = {
        "vocab_size": zoo.VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "initializer_range": 0.3,
        "eos_token_id": 0, "pad_token_id": 2,
    }  # fmt: skip
    config = transformers.Gemma3TextConfig(**fields)
    config._attn_implementation = attention
    torch.manual_seed(0)
    return Backbone(transformers.Gemma3ForCausalLM(config).eval(), zoo.tokenizer(), name="tiny-gemma3")


FAMILIES = [*zoo.FAMILIES, "gemma3"]


@functools.cache
def backbone(family: str = "llama", attention: str = "sdpa") -> Backbone:
    return gemma3(attention) if family == "gemma3" else zoo.backbone(family, attention=attention)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(100 * seed + length)
    return torch.randint(3, zoo.VOCAB, (length,), generator=generator).tolist()


def own(backbone: Backbone, prompt: list[int], **options: Any) -> list[int]:
    """What transformers' own generate gives."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, **options}
    return backbone.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def identity(output: Output) -> None:
    stats = output.stats
    assert stats.tokens == len(output.tokens)
    assert stats.tokens == 1 + stats.rounds + sum(stats.accepted)
    assert all(a <= o for a, o in zip(stats.accepted, stats.offered, strict=True))


@functools.cache
def reference(family: str, length: int, attention: str = "sdpa") -> tuple[int, ...]:
    return tuple(own(backbone(family, attention), prompt_of(length), max_new_tokens=NEW, **NO_END))


# -- the matrix ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("luck", LUCK)
@pytest.mark.parametrize("family", FAMILIES)
def test_scripted_drafts_change_nothing(family: str, luck: str, form: str) -> None:
    prompt, expected = prompt_of(13), list(reference(family, 13))
    drafter = Scripted(prompt + expected, LUCK[luck], FORMS[form]())
    output = Generator(backbone(family), drafter).generate(prompt, max_new_tokens=NEW, **NO_END)
    assert output.tokens == expected
    identity(output)
    if luck == "wrong":
        assert output.stats.rounds == NEW - 1
    if luck == "right" and form == "chain":
        assert output.stats.rounds == math.ceil((NEW - 1) / 6)
    if luck == "half":
        assert 0 < sum(output.stats.accepted) < sum(output.stats.offered)


@functools.cache
def head(family: str, method: str) -> Any:
    torch.manual_seed(3)
    return METHODS[method].build(backbone(family))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*deeper than the head")
def test_untrained_heads_change_nothing(family: str, method: str, shape: str) -> None:
    prompt = prompt_of(13)
    generator = Generator(backbone(family), head(family, method), tree=SHAPES[shape])
    output = generator.generate(prompt, max_new_tokens=NEW, **NO_END)
    assert output.tokens == list(reference(family, 13))
    assert output.stats.offered
    identity(output)


@pytest.mark.parametrize("drafter", ["ngram", None])
@pytest.mark.parametrize("family", FAMILIES)
def test_lookup_and_plain_decoding(family: str, drafter: str | None) -> None:
    for length in (1, 13):
        output = Generator(backbone(family), drafter).generate(prompt_of(length), max_new_tokens=NEW, **NO_END)
        assert output.tokens == list(reference(family, length))
        identity(output)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("luck", ["wrong", "half"])
def test_windows_shorter_than_the_text(family: str, luck: str, attention: str) -> None:
    for length in (3, 7, 8, 9, 30):
        prompt, expected = prompt_of(length), list(reference(family, length, attention))
        for form in FORMS.values():
            drafter = Scripted(prompt + expected, LUCK[luck], form())
            output = Generator(backbone(family, attention), drafter).generate(prompt, max_new_tokens=NEW, **NO_END)
            assert output.tokens == expected


@pytest.mark.parametrize("shape", SHAPES.values(), ids=str)
@pytest.mark.filterwarnings("ignore:.*deeper than the head")
def test_heads_with_few_positions_and_few_tokens(shape: Shape) -> None:
    """A head made for 32 positions behind 20 and 60 tokens, and one that can propose 9 tokens of 96."""
    short = METHODS["eagle3"].build(backbone(), max_position_embeddings=32)
    narrow = [method.build(backbone(), vocab=DraftVocab(range(3, 96, 11), zoo.VOCAB)) for method in METHODS.values()]
    for length in (20, 60):
        for helper in (short, *narrow):
            output = Generator(backbone(), helper, tree=shape).generate(prompt_of(length), max_new_tokens=NEW, **NO_END)
            assert output.tokens == list(reference("llama", length))


@pytest.mark.parametrize("method", METHODS)
def test_half_precision_runs(method: str) -> None:
    """The backbone in bf16, the head as it is trained and as it is loaded; which tokens come depends on the machine."""
    half = Backbone(zoo.model().to(torch.bfloat16), zoo.tokenizer())
    for helper in (METHODS[method].build(half), METHODS[method].build(half).to(torch.bfloat16)):
        for shape in SHAPES.values():
            generator = Generator(half, helper, tree=limited(shape, 4))
            output = generator.generate(prompt_of(13), max_new_tokens=8, **NO_END)
            assert len(output.tokens) == 8
            identity(output)


def test_prompts_of_every_length() -> None:
    for length in range(1, 41):
        prompt = prompt_of(length)
        expected = own(backbone(), prompt, max_new_tokens=10, **NO_END)
        drafter = Scripted(prompt + expected, LUCK["half"], dynamic_form(length))
        assert Generator(backbone(), drafter).generate(prompt, max_new_tokens=10, **NO_END).tokens == expected


# -- ends and limits -------------------------------------------------------------------------------------------------


@functools.cache
def distinct() -> tuple[list[int], list[int]]:
    """A prompt whose first 13 new tokens differ, so that each can be the end."""
    for seed in range(200):
        prompt = prompt_of(6, seed)
        tokens = own(backbone(), prompt, max_new_tokens=20, **NO_END)
        if len(set(tokens[:13])) == 13:
            return prompt, tokens
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("form", ["chain", "static"])
@pytest.mark.parametrize("place", range(1, 13))
def test_an_end_of_sequence_anywhere_in_a_run(place: int, form: str) -> None:
    prompt, tokens = distinct()
    for ends in ([tokens[place - 1]], [tokens[place - 1], tokens[place], 95], [tokens[12], tokens[place - 1]]):
        drafter = Scripted(prompt + tokens, LUCK["right"], FORMS[form]())
        expected = own(backbone(), prompt, max_new_tokens=20, eos_token_id=ends)
        assert expected[-1] == tokens[place - 1]
        output = Generator(backbone(), drafter).generate(prompt, max_new_tokens=20, eos_token_id=ends)
        assert output.tokens == expected
        identity(output)
        if form == "chain":
            assert output.stats.rounds == math.ceil((place - 1) / 6)


def test_the_generation_configs_own_ends_count() -> None:
    prompt, tokens = distinct()
    ends = backbone().model.generation_config.eos_token_id
    backbone().model.generation_config.eos_token_id = [95, tokens[4]]
    try:
        assert own(backbone(), prompt, max_new_tokens=20) == tokens[:5]
        assert Generator(backbone(), "ngram").generate(prompt, max_new_tokens=20).tokens == tokens[:5]
    finally:
        backbone().model.generation_config.eos_token_id = ends


@pytest.mark.parametrize("limit", range(1, 13))
def test_limits_are_exact(limit: int) -> None:
    prompt, tokens = distinct()
    for form in FORMS.values():
        for options in ({"max_new_tokens": limit}, {"max_length": len(prompt) + limit}):
            drafter = Scripted(prompt + tokens, LUCK["right"], form())
            output = Generator(backbone(), drafter).generate(prompt, **options, **NO_END)
            assert output.tokens == own(backbone(), prompt, **options, **NO_END) == tokens[:limit]
            identity(output)
            if form is FORMS["chain"]:
                assert output.stats.rounds == math.ceil((limit - 1) / 6)


@pytest.mark.parametrize("drafter", [None, "ngram", "right"])
def test_the_context_of_the_backbone_is_the_limit(drafter: str | None) -> None:
    small = zoo.backbone(max_position_embeddings=32)
    prompt = prompt_of(20)
    expected = own(small, prompt, max_new_tokens=12, **NO_END)
    helper = Scripted(prompt + expected, LUCK["right"], chain_form()) if drafter == "right" else drafter
    with pytest.warns(UserWarning, match="stopped after 12 tokens: the 32 positions"):
        output = Generator(small, helper).generate(prompt, max_new_tokens=100, **NO_END)
    assert output.tokens == expected
    with pytest.raises(UserError, match="the prompt has 32 tokens; tiny-llama holds 32, the answer included"):
        Generator(small, helper).generate(prompt_of(32), max_new_tokens=1)


# -- sampling --------------------------------------------------------------------------------------------------------

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 6},
    {"temperature": 1.3, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 5, "seed": 7},
]


@pytest.mark.parametrize("options", SAMPLING, ids=lambda options: f"seed{options['seed']}")
def test_a_seed_gives_the_same_tokens_with_any_drafter_and_none(options: dict[str, Any]) -> None:
    prompt, options = prompt_of(9), {**options, "max_new_tokens": NEW}
    plain = Generator(backbone()).generate(prompt, **options)
    assert plain.tokens != own(backbone(), prompt, max_new_tokens=NEW)
    for luck in LUCK:
        for form in FORMS.values():
            drafter = Scripted(prompt + plain.tokens, LUCK[luck], form())
            assert Generator(backbone(), drafter).generate(prompt, **options).tokens == plain.tokens
    for method in METHODS:
        assert Generator(backbone(), head("llama", method)).generate(prompt, **options).tokens == plain.tokens
    assert Generator(backbone(), "ngram").generate(prompt, **options).tokens == plain.tokens
    assert Generator(backbone()).generate(prompt, **{**options, "seed": 8}).tokens != plain.tokens


@pytest.mark.parametrize("form", FORMS)
def test_processors_are_called_once_a_token_with_its_prefix(form: str) -> None:
    prompt, calls = prompt_of(7), []

    class Stateful(transformers.LogitsProcessor):
        """Forbids what it counted most; wrong after a call too many or with a wrong prefix."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            calls.append(input_ids[0].tolist())
            return scores.scatter(1, torch.tensor([[len(calls) % zoo.VOCAB, calls[-1][-1]]]), -math.inf)

    options = {"max_new_tokens": NEW, "repetition_penalty": 1.2, **NO_END}
    plain = own(backbone(), prompt, logits_processor=[Stateful()], **options)
    calls.clear()
    drafter = Scripted(prompt + plain, LUCK["half"], FORMS[form]())
    output = Generator(backbone(), drafter).generate(prompt, logits_processor=[Stateful()], **options)
    assert output.tokens == plain
    assert calls == [prompt + plain[:count] for count in range(NEW)]
    assert sum(output.stats.accepted) > 0


def test_entries_of_a_list_are_samples_of_one_seed() -> None:
    prompt = prompt_of(5)
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 12}
    outputs = Generator(backbone(), "ngram").generate([prompt, prompt, prompt_of(8)], seed=3, **options)
    again = Generator(backbone()).generate([prompt, prompt, prompt_of(8)], seed=3, **options)
    assert [output.tokens for output in outputs] == [output.tokens for output in again]
    assert outputs[0].tokens != outputs[1].tokens
    assert outputs[0].tokens == Generator(backbone()).generate(prompt, seed=3, **options).tokens
    torch.manual_seed(0)
    drawn = Generator(backbone()).generate([prompt] * 3, **options)
    torch.manual_seed(0)
    seed = int(torch.randint(2**63 - 1, ()))
    expected = Generator(backbone()).generate([prompt] * 3, seed=seed, **options)
    assert [output.tokens for output in drawn] == [output.tokens for output in expected]


# -- what a drafter is told ------------------------------------------------------------------------------------------


class Told(Scripted):
    """Keeps all that it is told."""

    taps = (1, 3)

    def start(self, prompt: Sequence[int]) -> None:
        super().start(prompt)
        self.features: list[Any] = []

    def advance(self, features: Any, next_ids: Sequence[int]) -> None:
        super().advance(features, next_ids)
        self.features.append(features)


@pytest.mark.parametrize("pieces", [512, 4, 5])
@pytest.mark.parametrize("form", FORMS)
def test_drafters_are_told_the_truth(form: str, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features of the whole text and the token behind each position, however prefill is cut and drafts fare."""
    monkeypatch.setattr(module, "PREFILL", pieces)
    monkeypatch.setattr("headstart.inference.prefill.WHOLE", 0)
    prompt, expected = prompt_of(13), list(reference("mistral", 13))
    drafter = Told(prompt + expected, LUCK["half"], FORMS[form]())
    output = Generator(backbone("mistral"), drafter).generate(prompt, max_new_tokens=NEW, **NO_END)
    assert output.tokens == expected
    assert drafter.text == (prompt + expected)[: len(drafter.text)]
    assert len(drafter.text) > len(prompt) + NEW - 7  # all but the last run
    with torch.no_grad():
        whole = backbone("mistral").forward(torch.tensor([drafter.text[:-1]]), taps=(1, 3))
    for name in ("last", "taps"):
        found = torch.cat([getattr(features, name) for features in drafter.features], 1)
        torch.testing.assert_close(found, getattr(whole, name), rtol=1e-3, atol=1e-3)


class Broken(Scripted):
    """Says whatever it likes."""

    def __init__(self, tree: Callable[[int, int], Tree]) -> None:
        super().__init__([], None, list)
        self.tree = tree

    def draft(self, budget: int) -> Tree:
        return self.tree(self.text[-1], budget)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (lambda root, budget: Tree.chain([(root + 1) % 96, 3]), "node 0: a draft is rooted in the last token"),
        (lambda root, budget: Tree.chain([root, 4, 96]), "node 2: token 96 lies outside"),
        (lambda root, budget: Tree.chain([root, -1]), "node 1: token -1 lies outside"),
        (lambda root, budget: Tree.chain([root] * (budget + 2)), "deep where the drafter was asked for at most"),
        (lambda root, budget: Tree([root, 4], [-1, 1]), "node 1: its parent"),
        (lambda root, budget: Tree([root, 4], [-1, None]), "node 1: its parent has to be an earlier node"),
        (lambda root, budget: Tree([root, 4, 5], [-1, 2, 1]), "node 1: its parent"),
        (lambda root, budget: Tree([], []), "node 0: is the root"),
        (lambda root, budget: Tree.chain([root, 4.0]), "node 1: a token is an int, not 4.0"),
        (lambda root, budget: [root, 4], "Broken drafted a list; it has to be a Tree"),
        (lambda root, budget: None, "Broken drafted a NoneType; it has to be a Tree"),
    ],
)
def test_impossible_trees_are_refused_by_node(tree: Callable[[int, int], Tree], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Generator(backbone(), Broken(tree)).generate(prompt_of(3), max_new_tokens=9, **NO_END)


def test_twins_among_siblings_are_refused() -> None:
    twins = Broken(lambda root, budget: Tree([root, 4, 5, 6, 5], [-1, 0, 0, 2, 0]))
    with pytest.raises(UserError, match="node 4: token 5 is there twice below node 0"):
        Generator(backbone(), twins).generate(prompt_of(3), max_new_tokens=9, **NO_END)


# -- the face of it --------------------------------------------------------------------------------------------------


def test_texts_chats_ids_tensors_and_lists() -> None:
    generator, options = Generator(backbone(), "ngram"), {"max_new_tokens": 6}
    ids = backbone().encode("red sun")
    one = generator.generate("red sun", **options)
    assert one.tokens == own(backbone(), ids, **options)
    assert one.text == str(one) == zoo.tokenizer().decode(one.tokens, skip_special_tokens=True)
    chat = [{"role": "user", "content": "red sun"}]
    for prompt in (chat, ids, torch.tensor(ids), torch.tensor([ids])):
        assert generator.generate(prompt, **options).tokens == one.tokens
    for prompts in (["red sun", chat], [ids, torch.tensor(ids)], torch.tensor([ids, ids]), [chat, "red sun"]):
        assert [output.tokens for output in generator.generate(prompts, **options)] == [one.tokens] * 2
    assert [output.tokens for output in generator.generate(["red sun"], **options)] == [one.tokens]
    with pytest.raises(UserError, match="^the prompt is empty"):
        generator.generate([], **options)
    with pytest.raises(UserError, match="^prompt 1: token id 96 "):
        generator.generate([ids, [96]], **options)
    with pytest.raises(UserError, match="a prompt is a text, .* not a dict"):
        generator.generate(chat[0], **options)
    assert Generator(Backbone(backbone().model)).generate(ids, **options).text == ""


def test_unknown_options_and_drafters_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="max_new_token\\b"):
        Generator(backbone()).generate("red", max_new_token=3)
    with pytest.raises(UserError, match="max_new_token\\b"):
        Generator(backbone()).stream("red", max_new_token=3)
    with pytest.raises(UserError, match="drafter 'sufix'"):
        Generator(backbone(), "sufix")
    with pytest.raises(UserError, match="ngram drafts chains"):
        Generator(backbone(), "ngram", tree="dynamic:3x3x3")
    with pytest.raises(UserError, match="grows its own trees"):
        Generator(backbone(), Scripted([], None, list), tree="chain:3")
    with pytest.raises(UserError, match="takes one prompt"):
        Generator(backbone()).stream(["red", "sun"])
    greedy = Scripted([], None, list)
    greedy.taps = (0, 9)
    with pytest.raises(UserError, match="taps of Scripted: 9; tiny-llama has hidden states 0 to 4"):
        Generator(backbone(), greedy)


def test_a_head_of_another_backbone_is_refused() -> None:
    other = zoo.backbone(hidden_size=48)
    with pytest.raises(UserError, match="width 32; .* has 48"):
        Generator(other, head("llama", next(iter(METHODS))))


def test_a_tree_deeper_than_the_head_is_cut_with_a_note() -> None:
    medusa = head("llama", "medusa")
    depth = medusa.max_depth
    with pytest.warns(UserWarning, match=f"chain:{depth + 2} is deeper than the head, which drafts {depth}"):
        generator = Generator(backbone(), medusa, tree=f"chain:{depth + 2}")
    assert len(generator.generate(prompt_of(5), max_new_tokens=NEW, **NO_END).stats.offered) == depth


def test_the_form_of_lookup_is_its_length() -> None:
    prompt = [5, 6, 7, 8] * 4
    output = Generator(backbone(), "ngram", tree="chain:2").generate(prompt, max_new_tokens=NEW, **NO_END)
    assert len(output.stats.offered) == 2


def test_modules_are_left_as_they_were() -> None:
    trained = zoo.backbone(attention_dropout=0.5)
    helper = METHODS[next(iter(METHODS))].build(trained)
    expected = Generator(trained).generate(prompt_of(5), max_new_tokens=8).tokens
    trained.model.train()
    trained.model.lm_head.eval()
    helper.train()
    assert Generator(trained, helper).generate(prompt_of(5), max_new_tokens=8).tokens == expected
    assert trained.model.training
    assert trained.model.model.layers[0].training
    assert not trained.model.lm_head.training
    assert helper.training
    next(iter(Generator(trained, helper).stream(prompt_of(5))))  # an abandoned stream
    assert trained.model.training


def test_gradients_can_follow_a_generation() -> None:
    """Nothing that a generation leaves behind (cached trees, plans) spoils a training step."""
    torch.manual_seed(0)
    helper = METHODS["eagle3"].build(backbone())
    Generator(backbone(), helper).generate(prompt_of(5), max_new_tokens=8, **NO_END)
    ids = torch.tensor([prompt_of(7)])
    with torch.no_grad():
        features = backbone().forward(ids, taps=helper.taps)
    for depth, hidden in enumerate(helper.unroll(features, ids, [torch.arange(3)] * 3)):
        helper.project(hidden, depth).sum().backward(retain_graph=True)
    assert any(weight.grad is not None for weight in helper.parameters())


# -- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [None, "ngram", "eagle3"])
def test_pieces_add_up(drafter: str | None) -> None:
    helper = head("llama", drafter) if drafter == "eagle3" else drafter
    generator = Generator(backbone(), helper)
    output = generator.generate("red sun", max_new_tokens=40, temperature=1.0, seed=2)
    pieces = list(generator.stream("red sun", max_new_tokens=40, temperature=1.0, seed=2))
    assert "".join(map(str, pieces)) == output.text
    assert [token for piece in pieces for token in piece.tokens] == output.tokens
    assert [piece.stats is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert pieces[-1].stats.tokens == len(output.tokens)
    assert len(pieces) == output.stats.rounds + 2


def test_streams_come_as_they_are_made_and_may_be_mixed() -> None:
    generator = Generator(backbone(), head("llama", "eagle3"))
    texts = ["red sun", "blue moon"]
    alone = [generator.generate(text, max_new_tokens=30, **NO_END) for text in texts]
    streams = [generator.stream(text, max_new_tokens=30, **NO_END) for text in texts]
    mixed: list[list[int]] = [[], []]
    while streams[0] or streams[1]:
        for k, stream in enumerate(streams):
            if stream is not None:
                piece = next(stream, None)
                assert not torch.is_inference_mode_enabled()
                assert piece is None or piece.stats is not None or len(piece.tokens) < 30
                mixed[k] += piece.tokens if piece else []
                streams[k] = None if piece is None else stream
    assert mixed == [output.tokens for output in alone]


def test_seconds_are_all_accounted_for_and_the_readers_time_is_not() -> None:
    import time

    started = time.perf_counter()
    output = Generator(backbone(), "ngram").generate(prompt_of(9), max_new_tokens=NEW, **NO_END)
    assert 0 < output.stats.total_seconds < time.perf_counter() - started
    assert all(seconds > 0 for seconds in output.stats.seconds.values())
    pieces = []
    for piece in Generator(backbone()).stream(prompt_of(9), max_new_tokens=3, **NO_END):
        pieces.append(piece)
        time.sleep(0.2)
    assert pieces[-1].stats.total_seconds < 0.2
