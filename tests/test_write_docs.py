"""The tables of the pages are those that `--help` and the settings would give today, and none is forgotten."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

import zoo
from headstart.heads.base import HeadConfig
from headstart.heads.methods import METHODS
from headstart.training.recipe import load_recipe
from headstart.verbs import VERBS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
RECIPE = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
FAULT = re.compile(r'\b(?:_?NoChat|Unmaskable)\(\s*"([^"{]+)"')


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_docs", ROOT / "scripts" / "write_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _loaded()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert script.renewed(text) == text, f"docs/{page.name} is stale; renew it: {script.COMMAND}"


def test_every_verb_and_method_has_its_table():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name, verb in VERBS.items():
        assert text.count(f"<!-- flags of {name} -->") == 1, f"headstart {name} has no table"
        assert not verb.recipe or f"<!-- keys of {verb.recipe} -->" in text, f"{verb.recipe} has no table"
    for name, method in METHODS.items():
        config = method.config_class
        assert f"<!-- keys of head in {config.__module__}:{config.__name__} -->" in text, f"{name} has no table"


def test_a_table_says_what_the_source_says():
    flags = script.renewed("before\n\n<!-- flags of data prepare -->\nold\n<!-- end -->\n\nafter\n")
    assert flags.startswith("before\n\n<!-- flags of data prepare -->\n\n| flag | what it does |\n| --- | --- |\n")
    assert flags.endswith(" |\n\n<!-- end -->\n\nafter\n")
    assert "| `--out PATH` | The folder to make. (required) |\n" in flags
    assert "(default: 2048) |\n" in flags
    assert "`--input TEXT [TEXT ...]`" in flags
    assert script.renewed(flags) == flags
    keys = script.renewed("<!-- keys of headstart.training.recipe:Recipe -->\n<!-- end -->\n")
    assert "| `optim.lr` | `0.0001` | Peak learning rate. |\n" in keys
    assert "| `backbone` | required |" in keys
    heads = script.renewed("<!-- keys of head in headstart.heads.medusa:MedusaConfig -->\n<!-- end -->\n")
    assert "| `head.num_blocks` | `1` |" in heads
    assert "head.hidden_size" not in heads


@pytest.mark.parametrize("name", METHODS)
def test_what_follows_from_the_backbone_is_told_so(name):
    config = METHODS[name].config_class
    given = config.facts(zoo.backbone()).keys() - {one.name for one in fields(HeadConfig)}
    rows = script.renewed(f"<!-- keys of head in {config.__module__}:{config.__name__} -->\n<!-- end -->\n")
    assert set(re.findall(r"^\| `head\.(\w+)` \| from the backbone", rows, re.MULTILINE)) == given


@pytest.mark.parametrize(
    "text",
    [
        "<!-- flags of trian -->\n<!-- end -->\n",
        "<!-- flags of train -->\n",
        "<!-- flag of train -->\n<!-- end -->\n",
        "<!-- keys of headstart.training.recipe:Recip -->\n<!-- end -->\n",
        "<!-- keys of headstart.training.recip:Recipe -->\n<!-- end -->\n",
    ],
)
def test_a_wrong_comment_is_refused(text):
    with pytest.raises(ValueError, match=r"no |comment"):
        script.renewed(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipes_in_pages_can_be_read(page, tmp_path):
    for number, text in enumerate(RECIPE.findall(page.read_text(encoding="utf-8"))):
        (tmp_path / f"{number}.yaml").write_text(text, encoding="utf-8")
        load_recipe(tmp_path / f"{number}.yaml")


def test_every_fault_of_a_row_is_explained():
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "data").glob("*.py")]
    found = {fault for source in sources for fault in FAULT.findall(source)}
    assert found, "faults are raised otherwise now: tell this test how"
    assert not [fault for fault in sorted(found) if fault not in text]
