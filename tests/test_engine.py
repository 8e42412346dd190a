"""Many requests at once: every row has the tokens that it has alone, whatever its neighbours do."""

from __future__ import annotations

import asyncio
import functools
import random
from typing import Any

import pytest
import torch
from test_generator import FAMILIES, FORMS, LUCK, NO_END, Scripted, backbone, distinct, head, prompt_of

import zoo
from headstart.errors import UserError
from headstart.heads.methods import METHODS
from headstart.inference import auto
from headstart.inference import engine as module
from headstart.inference.costs import CostModel, Costs
from headstart.inference.drafters import OWN_NODES
from headstart.inference.engine import Engine
from headstart.inference.generator import Generator
from headstart.inference.hybrid import Hybrid
from headstart.inference.lookup import LookupDrafter
from headstart.inference.request import Cancelled, Request
from headstart.inference.tree import Tree

NAMED = {"none": None, "ngram": "ngram", "suffix": "suffix", "hybrid": "hybrid:ngram", "exit": "exit:2"}
DRAFTERS = [*NAMED, *METHODS, "head behind ngram"]


def drafter(name: str, family: str = "llama") -> Any:
    if name == "head behind ngram":
        return Hybrid("ngram", head(family, "eagle3"), joined=True)
    return head(family, name) if name in METHODS else NAMED[name]


class Stateful:
    """A processor that counts its calls, and pushes another token each time."""

    def __init__(self, prompt: list[int]) -> None:
        self.expected = len(prompt)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert ids.shape == (1, self.expected), "once for each token, with its true prefix"
        scores[:, self.expected % zoo.VOCAB] += 3.0
        self.expected += 1
        return scores


def mixed(prompts: list[list[int]], seed: int) -> list[dict[str, Any]]:
    """Requests with all sorts of settings; processors that keep a state are made anew at each call."""
    chance = random.Random(seed)
    found = []
    for prompt in prompts:
        options: dict[str, Any] = {"max_new_tokens": chance.choice([1, 2, 7, 12, 24])}
        kind = chance.randrange(6)
        if kind in (1, 2):
            options |= {"temperature": chance.choice([0.3, 1.0, 1.7]), "seed": chance.randrange(100)}
        if kind == 2:
            options |= {"top_p": 0.8, "top_k": 20, "repetition_penalty": 1.3, "output_logprobs": True}
        if kind == 3:
            options |= {"logits_processor": [Stateful(prompt)]}
        if kind == 4:
            options |= {"stop_strings": ["e", "1"], "frequency_penalty": 0.4}
        if kind == 5:
            options |= {"min_new_tokens": 3, **NO_END}
        found.append({"prompt": prompt, **options})
    return found


LENGTHS = [1, 13, 2, 40, 7, 90, 23, 5]


@functools.cache
def alone(name: str, family: str = "llama", seed: int = 0) -> list[Any]:
    generator = Generator(backbone(family), drafter(name, family))
    prompts = [prompt_of(length) for length in LENGTHS]
    return [generator.generate(**options) for options in mixed(prompts, seed)]


def same(requests: list[Request], expected: list[Any], rounds: bool = True) -> None:
    for place, (request, output) in enumerate(zip(requests, expected, strict=True)):
        found = request.output
        assert found.tokens == output.tokens, f"request {place}"
        assert found.text == output.text
        assert found.stats.tokens == 1 + found.stats.rounds + sum(found.stats.accepted)
        if rounds:
            assert (found.stats.rounds, found.stats.accepted) == (output.stats.rounds, output.stats.accepted)
        if output.logprobs:
            assert found.logprobs == pytest.approx(output.logprobs, abs=1e-4)


def nothing_left(engine: Engine) -> None:
    assert (engine.running, engine.waiting, engine._decoding) == (0, 0, 0)
    assert all(slots.lengths == slots._texts == [] for slots in engine._pools)


# -- each row as alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
def test_any_arrival_order_and_neighbours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREFILL", 16)  # long prompts go in pieces, between rounds of the others
    for trial, rows in enumerate([2, 5]):
        chance = random.Random(trial)
        asked = mixed([prompt_of(length) for length in LENGTHS], 0)
        order = chance.sample(range(len(asked)), len(asked))
        engine = Engine(backbone(), drafter(name), max_rows=rows, max_tokens=max(rows * 90, 200))
        requests: dict[int, Request] = {}
        for place in order:
            requests[place] = engine.submit(**asked[place])
            for _ in range(chance.randrange(3)):
                engine.step()
        engine.run()
        # the last drafts before a limit may be others; what is emitted is not
        same([requests[place] for place in range(len(asked))], alone(name), rounds=False)
        nothing_left(engine)


@pytest.mark.parametrize("name", ["eagle3"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_families(family: str, name: str) -> None:
    engine = Engine(backbone(family), drafter(name, family), max_rows=4)
    requests = [engine.submit(**options) for options in mixed([prompt_of(length) for length in LENGTHS], 0)]
    engine.run()
    same(requests, alone(name, family), rounds=False)


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "exit"])
def test_drafts_are_those_of_a_single_row(name: str) -> None:
    """Not only the tokens: no row is drafted for worse because it has neighbours."""
    prompts = [prompt_of(length) for length in (3, 30, 1, 17)]
    generator, engine = Generator(backbone(), drafter(name)), Engine(backbone(), drafter(name), max_rows=3)
    requests = engine.submit_all(prompts, max_new_tokens=20, **NO_END)
    engine.run()
    same(requests, [generator.generate(prompt, max_new_tokens=20, **NO_END) for prompt in prompts])


@pytest.mark.parametrize("tree", ["chain:4", "dynamic:4x3x8", "gain:4x3", "static:0,1,0.0,0.1,0.0.0,1.0"])
@pytest.mark.parametrize("rule", ["match", "siblings", "fixed"])
@pytest.mark.filterwarnings("ignore:.*deeper than the head")
def test_trees_and_rules(tree: str, rule: str) -> None:
    if (rule, tree) == ("siblings", "gain:4x3"):
        pytest.skip("such trees cannot be drawn")
    settings = {"tree": tree, "rule": rule}
    prompts = [prompt_of(length) for length in (3, 30, 1, 17)]
    options = {"max_new_tokens": 14, "temperature": 0.8, "seed": 5}
    generator = Generator(backbone(), head("llama", "eagle3"), **settings)
    engine = Engine(backbone(), head("llama", "eagle3"), max_rows=3, **settings)
    requests = [engine.submit(prompt, **options) for prompt in prompts]
    engine.run()
    same(requests, [generator.generate(prompt, **options) for prompt in prompts])


def test_rules_side_by_side() -> None:
    rules = ["match", "siblings", "chain", "match", "typical", "block"]
    options = {"max_new_tokens": 12, "temperature": 0.8, "seed": 5}
    generator = Generator(backbone(), head("llama", "eagle3"))
    engine = Engine(backbone(), head("llama", "eagle3"), max_rows=4)
    requests = [engine.submit(prompt_of(9 + k), rule=rule, **options) for k, rule in enumerate(rules)]
    engine.run()
    same(
        requests, [generator.generate(prompt_of(9 + k), rule=rule, **options) for k, rule in enumerate(rules)],
        rounds=False,
    )  # fmt: skip
    assert [request.stats.lossless for request in requests] == [rule != "typical" for rule in rules]


def test_an_end_of_sequence_inside_runs() -> None:
    prompt, tokens = distinct()
    engine = Engine(backbone(), head("llama", "eagle3"), max_rows=5)
    requests = [engine.submit(prompt, max_new_tokens=20, eos_token_id=[tokens[place]]) for place in range(13)]
    engine.run()
    assert [request.output.tokens for request in requests] == [tokens[: place + 1] for place in range(13)]


def test_lists_and_several_answers() -> None:
    generator = Generator(backbone(), head("llama", "eagle3"))
    slow = Generator(backbone(), head("llama", "eagle3"), max_rows=1)
    prompts = [prompt_of(length) for length in (4, 50, 1)]
    for options in ({}, {"temperature": 0.9, "seed": 3, "num_return_sequences": 3}):
        found = generator.generate(prompts, max_new_tokens=15, **options)
        expected = slow.generate(prompts, max_new_tokens=15, **options)
        assert [output.tokens for output in found] == [output.tokens for output in expected]
        engine = Engine(backbone(), "ngram", max_rows=2)
        requests = engine.submit_all(prompts, max_new_tokens=15, **options)
        engine.run()
        assert [request.output.tokens for request in requests] == [output.tokens for output in expected]


def test_a_full_context() -> None:
    engine = Engine(backbone(), head("llama", "eagle1"), max_rows=3)
    prompts = [prompt_of(length) for length in (250, 255, 240, 3)]
    requests = [engine.submit(prompt, max_new_tokens=30, **NO_END) for prompt in prompts]
    with pytest.warns(UserWarning, match="are full"):
        engine.run()
    assert [len(request.output.tokens) for request in requests] == [6, 1, 16, 30]


def test_learned_positions_are_not_left() -> None:
    """Padding stands at no position that the model does not have."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=zoo.VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3
    )
    made = module.Backbone(transformers.GPT2LMHeadModel(config).eval(), zoo.tokenizer())
    prompts = [prompt_of(length) for length in (60, 3, 50, 62, 20)]
    options = {"max_new_tokens": 10, "eos_token_id": -1}
    expected = [Generator(made).generate(prompt, **options).tokens for prompt in prompts]
    for tree in ("chain:4", "dynamic:3x3x6"):
        engine = Engine(made, METHODS["medusa"].build(made), max_rows=3, tree=tree)
        requests = []
        for prompt in prompts:
            requests.append(engine.submit(prompt, **options))
            engine.step()
        engine.run()
        assert [request.output.tokens for request in requests] == expected


def test_a_drafter_of_the_users_own_serves_one_at_a_time() -> None:
    prompts = [prompt_of(length) for length in (5, 9)]
    expected = [Generator(backbone()).generate(prompt, max_new_tokens=12, **NO_END).tokens for prompt in prompts]
    engine = Engine(backbone(), Scripted(prompts[0], LUCK["random"], FORMS["dynamic"]()), max_rows=4)
    assert engine.max_rows == 1
    requests = [engine.submit(prompt, max_new_tokens=12, **NO_END) for prompt in prompts]
    engine.run()
    assert [request.output.tokens for request in requests] == expected


def test_trees_too_large_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Tree([7, *range(3, 90)], [-1, *[0] * 87])
    monkeypatch.setattr(
        LookupDrafter, "draft", lambda self, budget: Tree([self.text[-1], *wide.tokens[1:]], wide.parents)
    )
    engine = Engine(backbone(), "ngram", max_rows=2)
    request = engine.submit(prompt_of(5), max_new_tokens=6, **NO_END)
    engine.run()
    assert request.stats.drafted == request.stats.rounds * 5 < OWN_NODES * request.stats.rounds


# -- failures and cancellations --------------------------------------------------------------------------------------


def test_failures_stay_with_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(at: int) -> Any:
        calls = iter(range(100))

        def processor(ids: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
            if next(calls) == at:
                raise KeyError("of the user's own")
            return torch.zeros(1) if scores is None else scores

        return [processor]

    def nan(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if ids.shape[1] < 12 else scores * torch.nan

    def refuse(piece: Any) -> None:
        raise ValueError("no more")

    for name in ("eagle3", "ngram"):
        engine = Engine(backbone(), drafter(name), max_rows=4)
        asked = mixed([prompt_of(length) for length in LENGTHS], 0)
        requests, broken = [], []
        for place, options in enumerate(asked):
            requests.append(engine.submit(**options))
            bad = [
                {"logits_processor": raising(0)}, {"logits_processor": raising(4)}, {"logits_processor": [nan]},
                {"callback": refuse}, {"stopping_criteria": raising(2)},
            ][place % 5]  # fmt: skip
            broken.append(engine.submit(prompt_of(8), max_new_tokens=20, **NO_END, **bad))
            engine.step()
        engine.run()
        same(requests, alone(name), rounds=False)
        kinds = ([KeyError, KeyError, UserError, ValueError, KeyError] * 2)[: len(broken)]
        assert [type(request.error) for request in broken] == kinds
        assert "hold NaN" in str(broken[2].error)
        assert "round" in str(broken[2].error)
        with pytest.raises(ValueError, match="no more"):
            _ = broken[3].output
        nothing_left(engine)


def test_a_backbone_that_overflows_for_one_row_leaves_nothing_behind() -> None:
    """Keys and values that are no numbers lie in slots that others use later."""
    broken = zoo.backbone()
    clean = [Generator(broken).generate(prompt_of(k), max_new_tokens=9, suppress_tokens=[95]).tokens for k in (3, 20)]
    with torch.no_grad():
        broken.model.get_input_embeddings().weight[95] = torch.nan
    for tokens in ([95] * 30, [5] * 29 + [95]):
        engine = Engine(broken, None, max_rows=2, max_tokens=128)
        first = engine.submit(prompt_of(3), max_new_tokens=9, suppress_tokens=[95])
        bad = engine.submit(tokens, max_new_tokens=30)
        last = engine.submit(prompt_of(20), max_new_tokens=9, suppress_tokens=[95])
        engine.run()
        assert "NaN" in str(bad.error)
        assert [first.output.tokens, last.output.tokens] == clean


def test_impossible_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = LookupDrafter.draft

    def sometimes(self: LookupDrafter, budget: int) -> Tree:
        return Tree.chain([1, 2]) if len(self.text) > 25 and self.text[0] == 9 else draft(self, budget)

    expected = [Generator(backbone(), "ngram").generate(prompt_of(k), max_new_tokens=20, **NO_END) for k in (4, 6)]
    monkeypatch.setattr(LookupDrafter, "draft", sometimes)
    engine = Engine(backbone(), "ngram", max_rows=3)
    bad = engine.submit([9, *prompt_of(20)], max_new_tokens=20, **NO_END)
    requests = [engine.submit(prompt_of(k), max_new_tokens=20, **NO_END) for k in (4, 6)]
    engine.run()
    same(requests, expected)
    with pytest.raises(UserError, match="rooted in the last token"):
        _ = bad.output


def test_a_forward_that_fails_ends_those_at_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(backbone(), "ngram", max_rows=2)
    requests = [engine.submit(prompt_of(5 + k), max_new_tokens=9, **NO_END) for k in range(3)]
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(module.Backbone, "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert [type(request.error) for request in requests] == [ZeroDivisionError, ZeroDivisionError, type(None)]
    engine.run()
    assert requests[2].output.tokens == Generator(backbone()).generate(prompt_of(7), max_new_tokens=9, **NO_END).tokens
    nothing_left(engine)


def without_memory(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """No forward over more than so many positions has room."""
    right = module.Backbone.forward

    def forward(self: Any, ids: torch.Tensor, **given: Any) -> Any:
        if ids.numel() > most:
            given["cache"].open(ids.shape[1])
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return right(self, ids, **given)

    monkeypatch.setattr(module.Backbone, "forward", forward)


@pytest.mark.parametrize("name", ["none", "eagle3"])
def test_where_memory_runs_out_pieces_are_halved_and_drafts_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [{"prompt": prompt_of(length), "max_new_tokens": 9, **NO_END} for length in (120, 7, 90)]
    expected = [Generator(backbone()).generate(**options).tokens for options in asked]
    engine = Engine(backbone(), drafter(name), max_rows=3)
    without_memory(monkeypatch, 40)
    requests = [engine.submit(**options) for options in asked]
    with pytest.warns(UserWarning, match="memory ran out over 217 positions of prompts: 108 are read at a time"):
        engine.run()
    without_memory(monkeypatch, 3)  # a token of each row
    requests.append(engine.submit(prompt_of(3), max_new_tokens=9, **NO_END))
    engine.run()
    expected.append(Generator(backbone()).generate(prompt_of(3), max_new_tokens=9, **NO_END).tokens)
    assert [request.output.tokens for request in requests] == expected
    nothing_left(engine)


def test_a_prompt_without_memory_leaves_those_that_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(backbone(), None, max_rows=2)
    first = engine.submit(prompt_of(5), max_new_tokens=30, **NO_END)
    engine.step()
    large, last = (engine.submit(prompt_of(length), max_new_tokens=4, **NO_END) for length in (60, 2))
    with monkeypatch.context() as patch:
        without_memory(patch, 2)
        with pytest.warns(UserWarning, match="memory ran out"):
            engine.run()
    with pytest.raises(UserError, match="memory ran out over .* positions of prompts, of 60 in this one"):
        _ = large.output
    for request, length in ((first, 5), (last, 2)):
        limit = len(request.tokens)
        assert limit == {5: 30, 2: 4}[length]
        expected = Generator(backbone()).generate(prompt_of(length), max_new_tokens=limit, **NO_END).tokens
        assert request.output.tokens == expected
    nothing_left(engine)


def churn(admissions: int, name: str) -> None:
    """Random arrivals and cancellations; what was not cancelled is whole, and the rest a beginning of it."""
    chance = random.Random(7)
    generator, engine = (
        Generator(backbone(), drafter(name)),
        Engine(backbone(), drafter(name), max_rows=5, max_tokens=300),
    )
    kinds = mixed([prompt_of(length) for length in (1, 3, 9, 17, 33)], 3)
    for options in kinds:
        options.pop("logits_processor", None)
    expected = [generator.generate(**options).tokens for options in kinds]
    live: list[tuple[int, Request]] = []
    done: list[tuple[int, Request]] = []
    storage = None
    for _ in range(admissions):
        kind = chance.randrange(len(kinds))
        live.append((kind, engine.submit(**kinds[kind])))
        if chance.random() < 0.4:
            chance.choice(live)[1].cancel()
        while engine.waiting > 6:
            engine.step()
            now = [pool.data_ptr() for slots in engine._pools for pools in slots.pools for pool in pools]
            assert storage in (None, now), "slots were allocated anew"
            storage = now
            assert engine.running <= 5
            assert all(len(slots.lengths) == engine.running for slots in engine._pools)
        done += [pair for pair in live if pair[1].done]
        live = [pair for pair in live if not pair[1].done]
    engine.run()
    for kind, request in done + live:
        assert request.done
        if request.cancelled:
            assert request.tokens == expected[kind][: len(request.tokens)]
        else:
            assert request.output.tokens == expected[kind]
    assert any(request.cancelled for _, request in done)
    nothing_left(engine)


def test_random_admissions_and_cancellations() -> None:
    churn(80, "eagle3")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "ngram", "none", "medusa"])
def test_a_thousand_admissions(name: str) -> None:
    churn(1000, name)


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["dynamic:3x3x6", "auto"])
def test_two_hundred_arrivals(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and drawn ones at random times: each as alone."""
    costs = CostModel({rows: Costs({1: 1.0, 24: 1.0 + rows / 8}, {1: 0.1, 6: 0.2}) for rows in (1, 6)}, read=0.01)
    monkeypatch.setattr(auto, "costs_of", lambda *given, **more: costs)
    chance = random.Random(3)
    prompts = [prompt_of(chance.randrange(1, 90)) for _ in range(200)]
    expected = [Generator(backbone()).generate(**options) for options in mixed(prompts, 5)]
    engine = Engine(backbone(), drafter("eagle3"), max_rows=6, max_tokens=700, tree=tree)
    requests = []
    for options in mixed(prompts, 5):
        requests.append(engine.submit(**options))
        for _ in range(chance.choice([0, 0, 1, 3, 9])):
            engine.step()
    engine.run()
    same(requests, expected, rounds=False)
    nothing_left(engine)


def test_cancelling_while_it_runs_and_while_it_waits() -> None:
    engine = Engine(backbone(), None, max_rows=1)
    seen: list[int] = []

    def stop(piece: Any) -> None:
        seen.extend(piece.tokens)
        if len(seen) == 4:
            first.cancel()

    first = engine.submit(prompt_of(5), max_new_tokens=20, callback=stop, **NO_END)
    second, third = (engine.submit(prompt_of(5), max_new_tokens=6, **NO_END) for _ in range(2))
    engine.step()
    second.cancel()
    assert second.done
    engine.run()
    assert first.cancelled
    assert len(first.tokens) == len(seen) == 4
    assert second.tokens == []
    assert third.output.tokens[:4] == seen
    third.cancel()
    assert not third.cancelled
    with pytest.raises(Cancelled, match="after 4 tokens"):
        _ = first.output


# -- room ------------------------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_and_what_cannot_yet_waits() -> None:
    engine = Engine(backbone(), None, max_rows=4, max_tokens=100)
    with pytest.raises(UserError, match="needs 121 slots .20 for its prompt, 100 for new tokens.* max_tokens is 100"):
        engine.submit(prompt_of(20), max_new_tokens=100)
    small = [engine.submit(prompt_of(4), max_new_tokens=5, **NO_END) for _ in range(3)]
    engine.step()
    assert engine.running == 3
    large = engine.submit(prompt_of(60), max_new_tokens=30, **NO_END)
    later = engine.submit(prompt_of(4), max_new_tokens=5, **NO_END)
    engine.step()
    assert (engine.running, engine.waiting) == (3, 2)  # first come, first served: the small one does not pass
    size = engine.bytes
    engine.run()
    assert size == engine.bytes == 100 * 4 * 2 * 2 * 8 * 4  # slots, layers, keys and values, heads, width, fp32
    assert [len(request.output.tokens) for request in (*small, large, later)] == [5, 5, 5, 30, 5]


def test_nonsense_is_refused() -> None:
    with pytest.raises(UserError, match="max_rows is 0"):
        Engine(backbone(), max_rows=0)
    for wrong in (0, -5):
        with pytest.raises(UserError, match=f"max_tokens is {wrong}; at least 1"):
            Engine(backbone(), max_tokens=wrong)
    engine = Engine(backbone())
    with pytest.raises(UserError, match="submit takes one prompt"):
        engine.submit([[5], [6]])
    with pytest.raises(UserError, match="max_new_token"):
        engine.submit([5], max_new_token=3)
    with pytest.raises(UserError, match="takes a callback"):
        engine.submit([5], streamer=object())
    request = engine.submit([5], max_new_tokens=3, callback=lambda _: engine.run())
    with pytest.raises(UserError, match="is not done"):
        _ = request.output
    engine.run()
    assert "cannot run the engine itself" in str(request.error)


# -- streams ---------------------------------------------------------------------------------------------------------


def test_streams_and_callbacks() -> None:
    pieces: list[Any] = []
    engine = Engine(backbone(), head("llama", "eagle3"), max_rows=2)
    requests = [engine.submit(prompt_of(6 + k), max_new_tokens=15, **NO_END) for k in range(3)]
    heard = engine.submit(prompt_of(6), max_new_tokens=15, callback=pieces.append, **NO_END)
    for request in requests:
        shown = list(request.stream())
        assert "".join(map(str, shown)) == request.output.text
        assert [token for piece in shown for token in piece.tokens] == request.output.tokens
        assert shown[-1].stats is request.output.stats
    engine.run()
    assert [token for piece in pieces for token in piece.tokens] == heard.output.tokens == requests[0].output.tokens
    assert "".join(map(str, pieces)) == heard.output.text
    assert list(heard.stream())[-1].stats is heard.stats
    assert heard.times["submitted"] <= heard.times["started"] <= heard.times["first"] <= heard.times["done"]
    cancelled = engine.submit(prompt_of(6), max_new_tokens=15, **NO_END)
    stream = cancelled.stream()
    first = next(stream)
    cancelled.cancel()
    assert first.tokens == requests[0].output.tokens[: len(first.tokens)]
    with pytest.raises(Cancelled):
        list(stream)


def test_coroutines() -> None:
    engine = Engine(backbone(), "ngram", max_rows=2)
    expected = [Generator(backbone()).generate(prompt_of(6 + k), max_new_tokens=9, **NO_END).tokens for k in range(4)]

    async def read(k: int) -> list[int]:
        request = engine.submit(prompt_of(6 + k), max_new_tokens=9, **NO_END)
        if k % 2:
            return (await request).tokens
        return [token async for piece in request for token in piece.tokens]

    async def late() -> list[int]:
        task = asyncio.ensure_future(read(1))
        await asyncio.sleep(0)
        task.cancel()  # who waits may go; the request goes on
        return await read(0)

    async def both() -> None:
        assert await asyncio.gather(*map(read, range(4))) == expected
        assert await late() == expected[0]
        with pytest.raises(KeyError):
            await engine.submit(prompt_of(3), logits_processor=[lambda ids, scores: {}[0]])

    asyncio.run(both())
    asyncio.run(both())
    engine.run()
    nothing_left(engine)


def test_a_head_drafts_no_further_than_it_was_trained() -> None:
    torch.manual_seed(3)
    short = METHODS["eagle3"].build(backbone(), trained_positions=24)
    prompts = [prompt_of(length) for length in (3, 17, 24, 60)]
    engine = Engine(backbone(), short, max_rows=4)
    requests = engine.submit_all(prompts, max_new_tokens=16, **NO_END)
    with pytest.warns(UserWarning, match="up to 24 tokens"):
        engine.run()
    generator = Generator(backbone(), short)
    same(requests, [generator.generate(prompt, max_new_tokens=16, **NO_END) for prompt in prompts], rounds=False)
    assert requests[0].stats.offered
    assert requests[2].stats.offered == requests[3].stats.offered == []
