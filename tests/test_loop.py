"""The loop: exact weights however a step is dealt out, a schedule that ends with the last step, and early stops."""

from __future__ import annotations

import itertools
import json
import math
from types import SimpleNamespace

import pytest
import runs
import torch
from accelerate import tracking

import zoo
from headstart.data.prepare import META
from headstart.errors import UserError
from headstart.heads.format import load_head
from headstart.heads.methods import TRAINABLE
from headstart.training import loop, losses, sheet
from headstart.training.batches import Rows
from headstart.training.loop import train
from headstart.training.losses import Loss
from headstart.training.plan import plan
from headstart.training.recipe import OptimSettings, load_recipe
from headstart.training.schedule import Schedule
from headstart.training.setup import set_up


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return runs.prepared(tmp_path_factory.mktemp("data"))


# --- the schedule ---------------------------------------------------------------------------------------------------


def test_the_rate_rises_in_the_warm_up_and_ends_with_the_last_step():
    schedule = Schedule(OptimSettings(lr=2.0, warmup=0.25, final=0.1), 20)
    rates = [schedule.lr(step, 0.0) for step in range(1, 21)]
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.2)
    assert rates[12] == pytest.approx(0.2 + 1.8 * (1 + math.cos(math.pi * 8 / 15)) / 2)
    in_steps = Schedule(OptimSettings(lr=2.0, warmup=5, final=0.1), 20)
    assert [in_steps.lr(step, 0.0) for step in range(1, 21)] == pytest.approx(rates)
    assert Schedule(OptimSettings(lr=2.0, warmup=0), 20).lr(1, 0.0) == pytest.approx(2.0, rel=1e-2)


def test_a_clock_that_is_ahead_of_the_steps_is_followed():
    schedule = Schedule(OptimSettings(lr=1.0, warmup=0.1, final=0.0, max_minutes=1.0), 1000)
    assert schedule.lr(3, 3.0) == pytest.approx(0.5)
    assert schedule.lr(50, 60.0) == pytest.approx(0.0)
    assert not schedule.over(50, 59.9)
    assert schedule.over(50, 60.0)
    assert schedule.over(1000, 1.0)
    assert schedule.expected_steps(10, 6.0) == 100
    assert schedule.expected_steps(500, 6.0) == 1000
    assert schedule.seconds_left(10, 6.0) == pytest.approx(54.0)
    assert schedule.seconds_left(500, 6.0) == pytest.approx(6.0)
    assert schedule.seconds_left(1000, 12.0) == schedule.seconds_left(10, 61.0) == 0.0


# --- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", TRAINABLE)
def test_a_run_leaves_a_head_that_loads_and_what_it_measured(method, rows, tmp_path, capsys):
    backbone = zoo.backbone()
    run = tmp_path / "run"
    made = train(runs.recipe(run, rows, method, draft_vocab=40, evaluate__every=2), backbone=backbone)
    assert made == run / "head"
    head = load_head(made, backbone)
    assert head.method == method
    assert head.vocab.size == 40
    assert all(weight.dtype == torch.float32 for weight in head.parameters())
    metrics = [line for line in runs.lines(run) if "loss" in line]
    steps = len(metrics)
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    told = {"lr", "loss", "loss_by_depth", "accuracy", "gradient_norm", "tokens", "tokens_per_second", "seconds"}
    told |= {"seconds_left", "memory_gib", "epoch"}
    assert told <= metrics[0].keys()
    assert metrics[-1]["lr"] == pytest.approx(0.05 * 3e-3)
    held = [line for line in runs.lines(run) if "held_out" in line]
    assert [line["step"] for line in held] == sorted({*range(2, steps + 1, 2), steps})
    lengths = {"estimated_acceptance_length", "acceptance_length", "acceptance", "tree"}
    assert {"loss", "loss_by_depth", "accuracy", *lengths} <= held[-1]["held_out"].keys()
    said = capsys.readouterr().err
    assert "held-out loss" in said
    assert "tokens/s" in said
    config = json.loads((made / "config.json").read_text())
    assert config["provenance"]["steps"] == steps
    assert str(tmp_path) not in json.dumps(config)


def test_each_epoch_trains_on_every_row_once(rows, tmp_path):
    """B034: the last window of an epoch is short, and counts as a step."""
    run = tmp_path / "run"
    train(runs.recipe(run, rows, batch__rows=4), backbone=zoo.backbone())
    seen = [line["rows"] for line in runs.lines(run, "rows.jsonl")]
    epoch = len(seen) // 2
    first, second = (list(itertools.chain(*part)) for part in (seen[:epoch], seen[epoch:]))
    assert sorted(first) == sorted(second) == sorted(set(first))
    assert first != second
    assert len(seen[epoch - 1]) < 4
    assert len(seen) == 2 * math.ceil(len(first) / 4)


@pytest.mark.parametrize("method", TRAINABLE)
def test_weights_do_not_depend_on_how_a_step_is_dealt_out(method, rows, tmp_path):
    """B035, B045: one forward of all rows, one of each row, and something in between."""
    trained = []
    for name, most, tokens in (("whole", None, 100_000), ("single", 1, 100_000), ("by_tokens", None, 150)):
        run = tmp_path / name
        changes = {"batch__forward_rows": most, "batch__forward_tokens": tokens, "evaluate__prompts": 0}
        train(runs.recipe(run, rows, method, batch__rows=5, **changes), backbone=zoo.backbone())
        trained.append((runs.weights(run), [line["loss"] for line in runs.lines(run) if "loss" in line]))
    for weights, curve in trained[1:]:
        assert curve == pytest.approx(trained[0][1], rel=1e-4)
        for name, weight in trained[0][0].items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=2e-5)


def test_only_the_head_is_trained(rows, tmp_path):
    """B044."""
    backbone = zoo.backbone()
    before = {name: weight.clone() for name, weight in backbone.model.state_dict().items()}
    setup = set_up(runs.recipe(tmp_path / "run", rows), backbone)
    optimized = [id(one) for group in setup.optimizer.param_groups for one in group["params"]]
    assert sorted(optimized) == sorted(id(one) for one in setup.head.parameters())
    train(runs.recipe(tmp_path / "run", rows), backbone=backbone)
    for name, weight in backbone.model.state_dict().items():
        assert torch.equal(weight, before[name]), name
    assert all(one.grad is None and not one.requires_grad for one in backbone.model.parameters())


def test_the_same_seed_gives_the_same_bits_and_another_one_another_head(rows, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(runs.recipe(tmp_path / name, rows, "eagle3", seed=seed, optim__max_steps=2), backbone=zoo.backbone())
    a, b, c = (runs.weights(tmp_path / name) for name in "abc")
    assert runs.same_bits(a, b)
    assert not runs.same_bits(a, c)


def test_weights_stay_fp32_and_norms_move_under_bf16(rows, tmp_path):
    """B042: steps smaller than bf16 can tell still add up."""
    backbone = zoo.backbone()
    backbone.model.to(torch.bfloat16)
    recipe = runs.recipe(
        tmp_path / "run", rows, "eagle3", precision__autocast="bf16", optim__lr=1e-4, optim__max_steps=4
    )
    setup = set_up(recipe, backbone)
    before = {name: weight.detach().clone() for name, weight in setup.head.named_parameters()}
    assert all(weight.dtype == torch.float32 for weight in before.values())
    after = runs.weights(train(recipe, backbone=backbone).parent)
    for name, weight in before.items():
        assert after[name].dtype == torch.float32
        assert (after[name] != weight).float().mean() > 0.9, name
        assert (after[name] - weight).abs().max() < 2e-3


def test_a_long_gradient_is_scaled_down_to_the_length_of_clip(rows, tmp_path):
    """And the norm that is reported is the one before that."""
    taken, norms = {}, {}
    for clip in (0.01, 1e9, None):
        setup = set_up(runs.recipe(tmp_path / "run", rows, "eagle3", optim__clip=clip), zoo.backbone())
        plain = setup.layout.step

        def step(setup=setup, plain=plain, clip=clip):
            taken[clip] = torch.cat([one.grad.flatten() for one in setup.parameters])
            plain()

        setup.layout.step = step
        batches, counts, *_ = loop.agree(setup, setup.batches.forwards(0))
        _, norms[clip] = loop.optimize(setup, batches, counts, 1e-3, 0)
    whole = float(taken[None].double().norm())
    assert whole > 0.1
    assert norms == pytest.approx(dict.fromkeys(norms, whole), rel=1e-5)  # sums in fp32
    torch.testing.assert_close(taken[0.01], taken[None] * (0.01 / whole), rtol=1e-3, atol=1e-8)
    assert torch.equal(taken[1e9], taken[None])


def test_training_goes_on_behind_a_long_generation(rows, tmp_path):
    """Whatever decoding made in inference mode serves the next step."""
    changes = {"evaluate__every": 1, "evaluate__max_new_tokens": 60, "optim__max_steps": 2}
    train(runs.recipe(tmp_path / "run", rows, "eagle3", **changes), backbone=zoo.backbone())


def test_time_ends_a_run(rows, tmp_path, monkeypatch):
    """By a clock that ticks whenever it is asked, so that a busy machine changes nothing."""
    ticks = itertools.count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: 0.1 * next(ticks)))
    run = tmp_path / "run"
    changes = {"optim__max_minutes": 0.2, "optim__epochs": 10_000, "optim__final": 0.0}
    train(runs.recipe(run, rows, **changes), backbone=zoo.backbone())
    metrics = [line for line in runs.lines(run) if "loss" in line]
    assert 10 < len(metrics) < 60
    assert 11.5 < metrics[-1]["seconds"] < 12.5
    rates = [line["lr"] for line in metrics]
    assert max(rates) > 0.95 * 3e-3
    assert rates[-1] < 0.02 * 3e-3
    assert runs.weights(run)


# --- early stops ----------------------------------------------------------------------------------------------------


def poisoned(backbone, token, tensor):
    """A backbone whose hidden states are infinite at one token."""
    plain = backbone.forward

    def forward(ids, **options):
        features = plain(ids, **options)
        states = getattr(features, tensor)
        states[ids == token] = torch.inf
        return features

    backbone.forward = forward
    return backbone


@pytest.mark.parametrize(
    ("method", "tensor", "said"),
    [
        ("medusa", "last", "the backbone's last hidden state"),
        ("eagle3", "taps", "the backbone's hidden states that the head reads"),
    ],
)
def test_a_row_that_is_not_finite_stops_the_run_by_name(method, tensor, said, rows, tmp_path):
    """B047: before the step, with row and tensor, and the head as it was."""
    setup = set_up(runs.recipe(tmp_path / "run", rows, method), zoo.backbone())
    place = 2
    rare = min(set(range(3, zoo.VOCAB)) - set(setup.rows.ids.tolist()))
    setup.rows.ids = setup.rows.ids.copy()
    position = int(setup.rows[place][1].argmax()) + 2
    setup.rows.ids[setup.rows.starts[place] + position] = rare
    poisoned(setup.backbone, rare, tensor)
    step = next(step for step in range(10) if place in setup.batches.rows_of(step))
    before = {name: weight.detach().clone() for name, weight in setup.head.named_parameters()}
    batches = setup.batches.forwards(step)
    counts = sum(setup.objective.counts(batch) for batch in batches)
    with pytest.raises(UserError) as error:
        loop.optimize(setup, batches, counts, 1e-3, step)
    assert str(error.value).startswith(f"step {step + 1}: {said}, from position {position} on, is not finite in ")
    assert setup.rows.places[place] in str(error.value)
    for name, weight in setup.head.named_parameters():
        assert torch.equal(weight, before[name])


def test_a_head_is_not_lost_to_a_step_that_goes_wrong(rows, tmp_path, monkeypatch):
    """It lies beside the run as it was before, and another one begins with it; not so in the first step."""
    recipe = runs.recipe(tmp_path / "run", rows, draft_vocab=40)
    plain, heads = loop.optimize, {}

    def optimize(setup, batches, counts, lr, step):
        if step == wrong:
            heads[step] = {name: one.clone() for name, one in setup.head.state_dict().items()}
            raise UserError("no")
        return plain(setup, batches, counts, lr, step)

    monkeypatch.setattr(loop, "optimize", optimize)
    for wrong in (0, 2):
        with pytest.raises(UserError) as error:
            train(recipe, {"run": str(tmp_path / str(wrong))}, backbone=zoo.backbone())
    assert not (tmp_path / "0" / "stopped").exists()
    folder = tmp_path / "2" / "stopped"
    assert str(error.value) == f"no. That head is {folder}; start={folder} begins another run with it"
    assert runs.same_bits(load_head(folder).state_dict(), heads[2])
    wrong = None
    assert train(recipe, {"start": str(folder)}, backbone=zoo.backbone()).exists()


def test_a_loss_that_does_not_move_stops_the_run(rows, tmp_path):
    """B163."""
    recipe = runs.recipe(tmp_path / "run", rows, batch__rows=100, optim__lr=1e-30, optim__epochs=50)
    with pytest.raises(UserError, match="the loss has not moved in 10 steps"):
        train(recipe, backbone=zoo.backbone())


def test_a_gradient_of_zero_stops_the_run(rows, tmp_path, monkeypatch):
    monkeypatch.setitem(losses.LOSSES, "soft", Loss(lambda logits, p, labels: 0 * logits.sum(-1), teacher=True))
    with pytest.raises(UserError, match="step 1: no gradient reaches the head"):
        train(runs.recipe(tmp_path / "run", rows), backbone=zoo.backbone())


def test_rows_without_supervision_never_start(rows, tmp_path, monkeypatch):
    """B002, B163: before the first step."""
    empty = Rows.from_lists([[5] * 9] * 4, [[0] * 9] * 4)
    monkeypatch.setattr("headstart.training.setup.prepared_rows", lambda data, backbone: empty)
    with pytest.raises(UserError, match="nothing to train on"):
        train(runs.recipe(tmp_path / "run", rows), backbone=zoo.backbone())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "mlp_speculator"}, "method is mlp_speculator, which is for decoding only; .*: medusa, eagle3"),
        ({"method": "medussa"}, "method is 'medussa'; choose one of .*; did you mean medusa?"),
        ({"head.num_head": 3}, "unknown setting head.num_head.*did you mean num_heads?"),
        ({"head.draft_vocab_size": 3}, "set draft_vocab instead"),
        ({"head.num_heads": "many"}, "num_heads"),
        ({"draft_vocab": 9999}, "draft_vocab is 9999; .* has 96 tokens"),
        ({"data.train": ["missing.jsonl"]}, "missing.jsonl: no such file"),
        ({"data.train": []}, "no file of chats"),
        ({"loss.depths": 7}, "loss.depths is 7; the medusa head has 2 depths"),
        ({"head.num_heads": 99}, "99 depths, .* longest reply .* has .* tokens: from depth .* Set head.num_heads to"),
        ({"log.trackers": ["wandbb"]}, "log.trackers is"),
        ({"evaluate.tree": "chain:x"}, "tree 'chain:x'"),
        ({"seed": 10**20}, "seed is 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_said_before_anything_is_written(changes, said, rows, tmp_path):
    with pytest.raises(UserError, match=said):
        train(runs.recipe(tmp_path / "run", rows), changes, backbone=zoo.backbone())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss.name": "smooth_l1", "head.projection": "own"}, "smooth_l1, which compares .* this medusa head"),
        ({"loss.terms": {"soft": 1.0, "smooth_l1": 0.1}, "method": "hydra"}, "smooth_l1, .* this hydra head"),
        ({"loss.name": "top_k", "loss.k": 41, "draft_vocab": 40}, "loss.k is 41; the head proposes 40 tokens"),
        ({"loss.weights": [1.0, 2.0, 3.0]}, "loss.weights has 3 weights; the depths trained are 2"),
        ({"loss.depths": 7}, "loss.depths is 7; the medusa head has 2 depths"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_loss_that_does_not_fit_is_refused_before_work_starts(changes, said, rows, tmp_path, monkeypatch):
    """Chats are prepared and features computed behind it, which may take hours; a plan refuses it, too."""
    recipe = runs.recipe(tmp_path / "run", rows)
    with pytest.raises(UserError, match=said):
        plan(recipe, changes, backbone=zoo.backbone())
    monkeypatch.setattr("headstart.training.setup.prepared_rows", lambda *_: pytest.fail("rows were prepared"))
    with pytest.raises(UserError, match=said):
        train(recipe, changes, backbone=zoo.backbone())


# --- what is said ---------------------------------------------------------------------------------------------------


def test_the_run_sheet_changes_nothing(rows, tmp_path):
    recipe = runs.recipe(tmp_path / "run", rows, draft_vocab=40)
    text = sheet.told(sheet.check(recipe, backbone=zoo.backbone()))
    assert "trainable parameters  2,112" in text  # two heads of 32 x 32 and a bias each
    assert "40 of 96 tokens" in text
    for word in ("rows", "tokens", "steps", "memory", "seconds a step", "expected time"):
        assert word in text
    assert not (tmp_path / "run").exists()


def test_chats_are_prepared_once_and_again_when_they_change(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    chats = tmp_path / "chats.jsonl"
    made = []
    for count in (6, 6, 7):
        chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in zoo.chats(count)))
        setup = set_up(runs.recipe(tmp_path / "run", chats), zoo.backbone())
        (folder,) = (tmp_path / "cache" / "prepared").glob("[!.]*")
        made.append((len(setup.rows) + len(setup.held_out), (folder / META).stat().st_mtime_ns))
    assert [number for number, _ in made] == [6, 6, 7]
    assert made[0] == made[1]


@pytest.mark.parametrize("name", ["meta.json", "dataset_info.json", "data-00000-of-00001.arrow", "state.json"])
def test_a_prepared_set_that_was_damaged_in_the_cache_is_made_anew(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in zoo.chats(6)))
    recipe = runs.recipe(tmp_path / "run", chats)
    before = set_up(recipe, zoo.backbone()).facts()
    (folder,) = (tmp_path / "cache" / "prepared").glob("[!.]*")
    content = (folder / name).read_bytes()
    for cut in (len(content) // 2, 0):
        (folder / name).write_bytes(content[:cut])
        assert set_up(recipe, zoo.backbone()).facts() == before
        assert f"{folder}: made anew" in capsys.readouterr().err
    assert (folder / name).stat().st_size


def test_one_file_of_chats_needs_no_brackets():
    made = load_recipe(None, ["backbone=tiny", "run=r", "data.train=a.jsonl"])
    assert made.data.train == ["a.jsonl"]


class Notebook(tracking.GeneralTracker):
    """A tracker that remembers."""

    name, requires_logging_directory = "notebook", False
    seen: list[tuple[int, dict]] = []

    def __init__(self, run_name, **options):
        super().__init__()
        self.run_name = run_name

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        self.seen.append((0, values))

    def log(self, values, step, **options):
        self.seen.append((step, values))


def test_trackers_are_told_what_the_file_is_told(rows, tmp_path, monkeypatch):
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "notebook", Notebook)
    run = tmp_path / "run"
    train(runs.recipe(run, rows, log__trackers=["notebook"]), backbone=zoo.backbone())
    seen = Notebook.seen
    assert seen[0][1]["optim/lr"] == 3e-3
    assert [step for step, _ in seen[1:]] == [line["step"] for line in runs.lines(run)]
    assert {"loss", "accuracy/0", "accuracy/1", "tokens_per_second"} <= seen[1][1].keys()
    assert "held_out/acceptance_length" in seen[-1][1]


def test_a_tracker_that_is_not_installed_is_named(rows, tmp_path):
    known = {str(name) for name in tracking.get_available_trackers()}
    missing = next(name for name in ("swanlab", "aim", "clearml", "comet_ml", "wandb") if name not in known)
    with pytest.raises(UserError, match=f"pip install {missing}"):
        train(runs.recipe(tmp_path / "run", rows, log__trackers=[missing]), backbone=zoo.backbone())


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_eight_rows_at_once_and_four_times_two_are_one_step(method, rows, tmp_path):
    """Weights within 1e-5, the short last window of an epoch among them (ten rows, eight a step)."""
    trained = []
    for name, most in (("whole", None), ("accumulated", 2)):
        run = tmp_path / name
        changes = {"batch__forward_rows": most, "batch__rows": 8, "optim__lr": 1e-3, "evaluate__prompts": 0}
        train(runs.recipe(run, rows, method, optim__epochs=3, **changes), backbone=zoo.backbone())
        trained.append(runs.weights(run))
    for name, weight in trained[0].items():
        assert (trained[1][name] - weight).abs().max() <= 1e-5, name
