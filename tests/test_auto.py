"""Trees by expected tokens a second: costs are measured and kept, drafts only where they pay, no token is another."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zoo
from headstart.errors import UserError
from headstart.heads.format import load_head, save_head
from headstart.heads.methods import METHODS
from headstart.inference import auto, tuned
from headstart.inference.costs import CostModel, Costs
from headstart.inference.drafter import HeadDrafter
from headstart.inference.engine import Engine
from headstart.inference.generator import Generator
from headstart.inference.policy import EXPLORING, Case, Policy
from headstart.inference.survival import Survival, believed
from headstart.inference.timing import measured
from headstart.inference.tree import Auto, Dynamic, Tree, parse_shape

CHEAP = CostModel({1: Costs({1: 1.0, 33: 1.1}, {1: 0.01, 8: 0.08})})  # whatever is right once pays
DEAR = CostModel({1: Costs({1: 1.0, 33: 33.0}, {1: 1.0, 8: 8.0})})  # nothing does


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))


def head_of(backbone: Any, method: str = "eagle3") -> Any:
    torch.manual_seed(1)
    return METHODS[method].build(backbone).eval()


def chain(*shares: float) -> Tree:
    return Tree(list(range(len(shares))), list(range(-1, len(shares) - 1)), shares=shares)


# -- costs -----------------------------------------------------------------------------------------------------------


def test_costs_between_rows_lie_on_lines_and_survive_a_file() -> None:
    model = CostModel({1: Costs({1: 1.0, 4: 2.0}, {1: 0.1}), 4: Costs({1: 1.6, 4: 5.0}, {1: 0.4})}, read=0.01)
    assert model.at(2).of(1, 0) == pytest.approx(1.2)
    assert model.at(2).of(4, 1) == pytest.approx(3.0 + 0.2)
    assert model.at(8).of(1, 0) == pytest.approx(1.6 + 4 * 0.2)  # beyond them the line goes on
    stored = json.loads(json.dumps(model.as_dict()))
    assert CostModel.of(stored) == model
    with pytest.raises(UserError):
        CostModel.of({"rows": {}, "read": 0})


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_costs_are_measured_for_rows_nodes_and_depths(method: str) -> None:
    backbone = zoo.backbone()
    head = head_of(backbone, method).bind(backbone)
    depth = min(8, head.max_depth or 8)
    shape = Dynamic(depth, 2, 6)
    found = measured(backbone, HeadDrafter(head, shape, backbone.device), shape, [1, 3], seconds=0.1)
    assert sorted(found.by_rows) == [1, 3]
    assert found.read > 0
    for costs in found.by_rows.values():
        assert [at for at, _ in costs.verify][:4] == [1, 2, 3, 4]  # type: ignore[misc]
        assert next(at for at, _ in costs.draft) == 1  # type: ignore[misc]
        assert max(at for at, _ in costs.draft) == depth  # type: ignore[misc]
        assert all(seconds > 0 for _, seconds in (*costs.verify, *costs.draft))  # type: ignore[misc]


def test_what_was_measured_is_kept_beside_the_head_or_in_the_cache(tmp_path: Path) -> None:
    backbone = zoo.backbone()
    save_head(head_of(backbone), tmp_path / "head")
    head = load_head(tmp_path / "head", backbone)
    assert tuned.entry(backbone, head) == {}
    assert tuned.keep(backbone, head, tree="chain:2") == tmp_path / "head" / "tuning.json"
    tuned.keep(backbone, head, survival=[0.5])
    found = tuned.entry(backbone, load_head(tmp_path / "head", backbone))
    assert (found["tree"], found["survival"]) == ("chain:2", [0.5])
    assert found["setup"]["threads"] == torch.get_num_threads()
    assert tuned.entry(zoo.backbone(seed=5), head) == {}, "another backbone, another entry"

    (tmp_path / "head" / "tuning.json").write_text("not JSON")
    assert tuned.entry(backbone, head) == {}

    head.home = None  # as of the Hub
    assert tuned.keep(backbone, head, tree="chain:3").parent == tmp_path / "cache" / "tuning"
    assert tuned.entry(backbone, head)["tree"] == "chain:3"
    save_head(head, tmp_path / "head")
    assert not (tmp_path / "head" / "tuning.json").exists(), "other weights, nothing known"


def test_a_tuned_tree_is_the_default_of_its_head(tmp_path: Path) -> None:
    backbone = zoo.backbone()
    save_head(head_of(backbone), tmp_path / "head")
    head = load_head(tmp_path / "head", backbone)
    assert Generator(backbone, head).tuned is None
    tuned.keep(backbone, head, tree="chain:2")
    head = load_head(tmp_path / "head", backbone)
    generator = Generator(backbone, head)
    assert str(generator.tuned) == "chain:2"
    assert len(generator.generate([5, 6, 7], max_new_tokens=12).stats.offered) == 2
    assert Generator(backbone, head, tree="chain:3").tuned is None, "what is asked for comes first"
    tuned.keep(backbone, head, tree="spiral:9")
    assert Generator(backbone, head).tuned is None


# -- survival --------------------------------------------------------------------------------------------------------


def test_survival_is_the_share_of_rounds_by_depth() -> None:
    survival = Survival(known=[0.5, 0.25], weight=1e-9, keep=1.0)
    for tokens in ([1, 2, 9], [1, 9], [9], [9]):
        survival.note(chain(1.0, 0.8, 0.4), tokens, asked=2, drafted=2)
    assert survival.share(1) == pytest.approx(2 / 4)
    assert survival.share(2) == pytest.approx(1 / 4)
    assert survival.given(2) == pytest.approx(1 / 2)
    assert survival.tokens(2) == pytest.approx(1 + 3 / 4)
    assert survival.factor(1) == pytest.approx(2 / (4 * 0.8))
    assert survival.factor(2) == pytest.approx(1 / (2 * 0.5))
    assert survival.form() == (pytest.approx(2), pytest.approx(2))
    assert believed(chain(1.0, 0.8, 0.4), survival) == pytest.approx([1.0, 0.5, 0.25])


def test_a_request_begins_as_those_before_it_and_goes_its_own_way() -> None:
    above = Survival(known=[0.9, 0.8])
    survival = Survival(above, weight=4.0)
    assert [survival.share(d) for d in (1, 2)] == pytest.approx([0.9, 0.8])
    assert survival.share(3) < 0.8
    for _ in range(100):
        survival.note(chain(1.0, 0.9, 0.8), [9], asked=2, drafted=2)
    assert survival.share(1) < 0.1
    assert survival.factor(1) < 0.15
    assert above.share(1) == pytest.approx(0.9)


# -- the policy ------------------------------------------------------------------------------------------------------


def rounds(policy: Policy, right: float, count: int, rows: int = 1) -> list[tuple[int, int, int]]:
    """(drafted depth, nodes, tokens of all rows) of each round, where each draft is right with this probability."""
    random = torch.Generator().manual_seed(0)
    cases, found = [policy.begin() for _ in range(rows)], []
    policy.rows = rows
    for _ in range(count):
        depth = policy.depth(cases, 99)
        trees = [chain(*(right**d for d in range(depth + 1))) for _ in cases]
        trees = policy.cut(cases, trees) if depth else trees
        emitted = 0
        for case, tree in zip(cases, trees, strict=True):
            case.drafted(tree if depth else None, depth, depth)
            run = []
            while len(run) < tree.depth and float(torch.rand((), generator=random)) < right:
                run.append(len(run) + 1)
            case.ended([*run, 99])
            emitted += len(run) + 1
        nodes = max(map(len, trees))
        policy.took(policy.at().of(nodes, depth), nodes, depth)
        found.append((depth, nodes, emitted))
    return found


def test_drafts_where_they_pay_and_hardly_where_they_do_not() -> None:
    pays = rounds(Policy(CHEAP, Auto()), 0.8, 300)
    assert sum(depth > 0 for depth, *_ in pays) > 280
    assert sum(depth >= 6 for depth, *_ in pays) > 200
    for costs, right in ((DEAR, 0.8), (CHEAP, 0.0)):
        policy = Policy(costs, Auto())
        found = rounds(policy, right, 2000)
        seconds = sum(costs.at(1).of(nodes, depth) for depth, nodes, _ in found)
        plain = sum(tokens for *_, tokens in found) * costs.at(1).of(1, 0)
        assert seconds < (1 + EXPLORING + 0.01) * plain
        assert sum(depth > 0 for depth, *_ in found[100:]), "it still tries"


def test_drafts_less_when_load_rises() -> None:
    model = CostModel(
        {
            rows: Costs({n: 1 + 0.03 * rows * n for n in (1, 2, 4, 8, 16, 32)}, {1: 0.02, 8: 0.16})
            for rows in (1, 2, 8, 32)
        }
    )
    nodes = {
        rows: sum(n for _, n, _ in rounds(Policy(model, Auto()), 0.4, 200, rows)[50:]) / 150 for rows in (1, 8, 32)
    }
    assert nodes[1] > nodes[8] > nodes[32]
    assert nodes[32] < 1.2


def test_costs_that_the_loop_does_not_keep_are_corrected() -> None:
    policy = Policy(CHEAP, Auto())
    for _ in range(6):
        for _ in range(8):
            policy.took(3 * policy.at().of(9, 3), 9, 3)  # drafted rounds take three times what was measured
        policy.took(policy.at().of(1, 0), 1, 0)
    assert policy.ratio == 2.0  # as much as is believed


def test_the_best_nodes_are_kept_with_their_parents() -> None:
    policy = Policy(CostModel({2: Costs({1: 1.0, 2: 1.1, 8: 1.7}, {1: 0.0})}), Auto())
    policy.rows = 2
    wide = Tree([0, 1, 2, 3, 4], [-1, 0, 0, 1, 2], shares=[1.0, 0.9, 0.05, 0.8, 0.01])
    sure, unsure = policy.cut([policy.begin(), policy.begin()], [wide, chain(1.0, 0.01)])
    assert (sure.tokens, sure.parents, sure.shares) == ([0, 1, 3], [-1, 0, 1], [1.0, 0.9, 0.8])
    assert len(unsure) == 2, "it is padded to that width anyway"


# -- no token is another ---------------------------------------------------------------------------------------------


def measured_as(monkeypatch: pytest.MonkeyPatch, costs: CostModel) -> None:
    monkeypatch.setattr(auto, "costs_of", lambda *arguments, **more: costs)


PROMPTS = [[5, 6, 7, 8], [9, 9, 4], [3, 4, 5, 6, 7, 8, 9, 10, 11], [20, 21]]


@pytest.mark.parametrize("costs", [CHEAP, DEAR])
@pytest.mark.parametrize("drafter", ["eagle3", "medusa", "ngram", "suffix", "exit:2", "hybrid:ngram"])
def test_tokens_are_those_of_plain_decoding(drafter: str, costs: CostModel, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_as(monkeypatch, costs)
    backbone = zoo.backbone()
    drafts = head_of(backbone, drafter) if drafter in METHODS else drafter
    for options in ({"do_sample": False}, {"temperature": 0.9, "seed": 3}):
        asked: dict[str, Any] = {"max_new_tokens": 24, **options}
        plain = [Generator(backbone).generate(prompt, **asked).tokens for prompt in PROMPTS]
        assert [Generator(backbone, drafts, tree="auto").generate(p, **asked).tokens for p in PROMPTS] == plain
        engine = Engine(backbone, drafts, max_rows=3, tree="auto")
        requests = [engine.submit(prompt, **asked) for prompt in PROMPTS]
        engine.run()
        assert [request.output.tokens for request in requests] == plain


def test_rules_that_draw_take_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_as(monkeypatch, CHEAP)
    backbone = zoo.backbone()
    for rule in ("chain", "siblings", "block", "fixed"):
        generator = Generator(backbone, head_of(backbone), tree="auto", rule=rule)
        output = generator.generate([5, 6, 7], max_new_tokens=12, temperature=1.0, seed=1)
        assert output.stats.drafted > 0
        assert output.stats.lossless


def test_a_plain_request_costs_its_drafter_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_as(monkeypatch, DEAR)
    backbone = zoo.backbone()
    head, read = head_of(backbone), []
    extend = head.extend
    head.extend = lambda *arguments, **more: read.append(1) or extend(*arguments, **more)
    generator = Generator(backbone, head, tree="auto")
    monkeypatch.setattr(Policy, "depth", lambda self, cases, most, free: 0)
    assert generator.generate([5, 6, 7], max_new_tokens=20).stats.drafted == 0
    assert read == []


def test_what_was_held_back_is_read_before_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some plain rounds, drafts are those of a head that had read all along."""
    measured_as(monkeypatch, CHEAP)
    backbone, drafted = zoo.backbone(), {}
    head = head_of(backbone)
    for name, quiet in (("late", 7), ("always", 0)):
        depths = iter([0] * quiet + [2] * 99)
        monkeypatch.setattr(Policy, "depth", lambda self, cases, most, free, depths=depths: min(most, next(depths)))
        grow = HeadDrafter.draft
        generator = Generator(backbone, head, tree="auto")
        states: list[torch.Tensor] = []
        monkeypatch.setattr(
            HeadDrafter,
            "draft",
            lambda self, budget, s=states, g=grow: s.append(self.anchored.logits.clone()) or g(self, budget),
        )
        output = generator.generate([5, 6, 7], max_new_tokens=30, do_sample=False)
        drafted[name] = states
        monkeypatch.setattr(HeadDrafter, "draft", grow)
        assert output.stats.rounds
    last = drafted["late"][-1], drafted["always"][-1]
    torch.testing.assert_close(*last)


def test_auto_is_a_form_of_its_own() -> None:
    assert parse_shape("auto") == Auto()
    assert str(Auto()) == "auto"
    case = Case(SimpleNamespace(survival=Survival()))  # type: ignore[arg-type]
    case.ended([1, 2])
    assert case.survival.rounds == 0, "a plain round says nothing of drafts"


def test_shares_in_one_pass_are_those_of_the_recursion() -> None:
    """The definition, written out: counts mixed with those above, and never more than one depth higher."""

    def naive(survival: Survival, depth: int) -> float:
        if survival.known:
            above = survival.known[min(depth, len(survival.known)) - 1] * 0.6 ** max(0, depth - len(survival.known))
        else:
            above = 0.6**depth if survival.above is None else naive(survival.above, depth)
        found = survival._mixed(survival._reached, survival._asked, depth, above)
        return found if depth == 1 else min(found, naive(survival, depth - 1))

    for known in ((), (0.5, 0.7, 0.1)):
        shared = Survival(known=known)
        own = Survival(shared, weight=3.0)
        for length in (3, 1, 2, 3, 0):
            for survival in (shared, own):
                survival.note(chain(*[0.5] * 4), [*range(1, length + 1), 99], 5, 3)
        for survival in (shared, own):
            assert survival.shares(7) == pytest.approx([naive(survival, depth) for depth in range(1, 8)])
