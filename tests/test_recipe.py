"""Recipes: strict, with overrides, and compared where a run goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from headstart import settings
from headstart.errors import UserError
from headstart.flags import describe
from headstart.training.recipe import Recipe, differences, load_recipe

CONFIGS = Path(__file__).parents[1] / "configs"


def recipe(**fields):
    return Recipe(backbone="b", run=Path("r"), **fields)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_read_and_say_their_command(path):
    made = load_recipe(path)
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith(f"# headstart train configs/{path.name}")
    assert made.run.name in (path.stem, "quickstart")


def test_overrides_as_texts_and_as_a_mapping_are_the_same():
    path = CONFIGS / "tiny.yaml"
    as_texts = load_recipe(path, ["optim.lr=2e-4", "head.num_blocks=2", "data.train=[a.jsonl, b.jsonl]"])
    as_mapping = load_recipe(path, {"optim.lr": 2e-4, "head.num_blocks": 2, "data.train": ["a.jsonl", "b.jsonl"]})
    assert as_texts.optim.lr == 2e-4
    assert as_texts.data.train == ["a.jsonl", "b.jsonl"]
    assert not list(differences(as_texts, as_mapping))


def test_a_recipe_in_memory_takes_overrides_and_stays_as_it_is():
    before = recipe(head={"num_heads": 2})
    made = load_recipe(before, {"optim.lr": 3e-3, "head.num_blocks": 2})
    assert (made.optim.lr, made.head) == (3e-3, {"num_heads": 2, "num_blocks": 2})
    assert (before.optim.lr, before.head) == (1e-4, {"num_heads": 2})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("optim.learning_rate", 1, "optim"),
        ("optim.lrr", 1, "did you mean optim.lr?"),
        ("lr", 1, "unknown setting lr; did you mean optim.lr?"),
        ("batch.epochs", 1, "did you mean optim.epochs?"),
        ("optim.Epochs", 1, "did you mean optim.epochs?"),
        ("batch.rows.most", 1, "batch.rows is {'most': 1}, a block; expected a whole number"),
        ("loss.name", "soff", "did you mean soft?"),
        ("loss.terms", {"smoth_l1": 1.0}, "smooth_l1; did you mean smooth_l1?"),
        ("loss.terms.soft", 0, "loss.terms.soft is 0.0; expected a number above 0"),
        ("loss.weights", [1.0, -1.0], "loss.weights is [1.0, -1.0]; expected numbers above 0"),
        ("loss.noise", -0.1, "loss.noise is -0.1; expected a number of 0 or more"),
        ("loss.over", "every", "loss.over"),
        ("optim.lr", -1, "optim.lr is -1.0; expected a number above 0"),
        ("optim.lr", ".inf", "optim.lr is inf; expected a number above 0"),
        ("optim.lr", ".nan", "optim.lr is nan; expected a number above 0"),
        ("optim.warmup", ".inf", "optim.warmup is inf"),
        ("optim.lr", "fast", "optim.lr is 'fast'"),
        ("batch.rows", 0, "batch.rows is 0; expected 1 or more"),
        ("data.held_out", 1.5, "data.held_out is 1.5"),
        ("data.max_length", 2, "data.max_length is 2"),
        ("loss.depths", 0, "loss.depths is 0"),
        ("draft_vocab", 0, "draft_vocab is 0"),
    ],
)
def test_wrong_settings_are_named(key, value, said):
    """B158."""
    with pytest.raises(UserError) as error:
        load_recipe(recipe(), {key: value})
    assert said in str(error.value)


def test_what_a_run_may_change_and_what_not():
    before = recipe()
    free = load_recipe(before, {"run": "elsewhere", "log.every": 1, "save.keep": 7, "evaluate.rows": 1})
    assert not list(differences(before, free))
    changed = load_recipe(before, {"optim.lr": 1e-3, "seed": 1, "data.train": ["a.jsonl"]})
    assert {key for key, _, _ in differences(before, changed)} == {"optim.lr", "seed", "data.train"}
    assert ("optim.lr", 1e-4, 1e-3) in list(differences(before, changed))


def test_a_recipe_survives_its_own_yaml(tmp_path):
    made = load_recipe(CONFIGS / "smollm2-medusa.yaml", {"optim.max_minutes": 2.5, "log.trackers": ["wandb"]})
    path = tmp_path / "recipe.yaml"
    path.write_text(settings.dump_text(made))
    assert load_recipe(path) == made


def test_every_setting_has_help():
    described = describe("headstart.training.recipe", "Recipe")
    assert {"optim.lr", "head", "data.train", "evaluate.tree"} <= {one.key for one in described}
    assert all(len(one.help) > 10 for one in described)
    assert len(described) == sum(1 for _ in _leaves(recipe()))


def _leaves(block):
    for field in dataclasses.fields(block):
        value = getattr(block, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value)
        else:
            yield field.name
