"""Heads to other tools' formats and back: the same logits, or a refusal that says why."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from formats_matrix import CASES, OWN, READ_ONLY, case_table, formats_of, pair_table, pairs
from torch import Tensor

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Backbone
from headstart.heads.base import DraftHead
from headstart.heads.exchange import FORMATS, export_head
from headstart.heads.format import load_head
from headstart.heads.methods import METHODS
from headstart.heads.vocab import DraftVocab

SMALL = DraftVocab(range(5, 45), zoo.VOCAB)
IDS = torch.randint(3, zoo.VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
USUAL = (2, 4, 5)  # of eight layers


@functools.cache
def backbone(family: str = "llama", **changes: Any) -> Backbone:
    return zoo.backbone(family, num_hidden_layers=8, **changes)


def built(method: str, fields: dict[str, Any], family: str = "llama", small: bool = True) -> DraftHead:
    """A head with random weights: none of them zero or one, so that a part left out is seen."""
    torch.manual_seed(0)
    head = METHODS[method].build(backbone(family), vocab=SMALL if small else None, **fields)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return head


@torch.no_grad()
def proposed(head: DraftHead) -> Tensor:
    """Logits (Vd) of the anchor and of three steps, over all tokens: -inf where none can be proposed."""
    features = head.backbone.forward(IDS, taps=head.taps)
    state = head.start()
    steps = [head.extend(state, features[:, :5], IDS[:, 1:6])]
    for depth in range(min(3, (head.max_depth or 4) - 1)):
        parent = torch.tensor([[depth - 1]])
        steps.append(head.step(state, IDS[:, 6 + depth : 7 + depth], parent))
    logits = torch.cat([step.logits[0, :1] for step in steps])
    found = torch.full((len(logits), head.config.vocab_size), -torch.inf)
    found[:, head.vocab.ids] = logits
    return found


def cases() -> Iterator[Any]:
    for number, (method, fields, family, small, able) in enumerate(CASES):
        for to in FORMATS:
            if method in FORMATS[to]:
                yield pytest.param(method, fields, family, small, to, to in able, id=f"{number}-{method}-{family}-{to}")


@pytest.mark.parametrize(("method", "fields", "family", "small", "to", "able"), list(cases()))
def test_the_way_out_and_back_is_exact_or_refused(
    method: str, fields: dict[str, Any], family: str, small: bool, to: str, able: bool, tmp_path: Path
) -> None:
    head = built(method, fields, family, small)
    if not able:
        with pytest.raises(UserError, match="cannot be written|scales its embedding"):
            export_head(head, to, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    found = load_head(export_head(head, to, tmp_path / "out"), head.backbone)
    assert found.taps == head.taps
    assert torch.equal(found.vocab.ids, head.vocab.ids)
    torch.testing.assert_close(proposed(found), proposed(head), atol=1e-6, rtol=1e-6)


EASY: dict[str, dict[str, Any]] = {"eagle1": {"fc_bias": False}}  # what every format of a method can say


@pytest.mark.parametrize(("method", "source", "to"), [pair for pair in pairs() if pair[1] not in READ_ONLY.values()])
def test_from_every_format_to_every_other(method: str, source: str, to: str, tmp_path: Path) -> None:
    head = built(method, EASY.get(method, {}), small=method == "eagle3")
    expected = proposed(head)
    if source != OWN:
        head = load_head(export_head(head, source, tmp_path / "one"), head.backbone)
    found = load_head(export_head(head, to, tmp_path / "two"), head.backbone)
    torch.testing.assert_close(proposed(found), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_format_without_such_heads_says_so(method: str, tmp_path: Path) -> None:
    head = built(method, {}, small=False)
    for to in FORMATS.keys() - set(formats_of(method)):
        with pytest.raises(UserError, match=f"the format {to} has no {method} heads"):
            export_head(head, to, tmp_path / to)


def test_the_page_says_what_was_tried() -> None:
    """`python scripts/write_formats.py` writes it anew."""
    page = (Path(__file__).parent.parent / "docs" / "formats.md").read_text(encoding="utf-8")
    for table in (pair_table(), *(case_table(method) for method in ("eagle3", "eagle1", "medusa", "hydra"))):
        assert table in page
