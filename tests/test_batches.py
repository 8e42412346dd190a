"""Batches: an order that the step number determines, anchors that mean what they say, a split that nothing moves."""

from __future__ import annotations

import itertools

import datasets
import numpy as np
import pytest
import torch

from headstart.errors import UserError
from headstart.training.batches import Batches, Rows, anchors, collate, forwards, split
from headstart.training.recipe import BatchSettings


def rows_of(lengths, seed=0):
    """Rows whose tokens are all supervised but the first two."""
    generator = np.random.default_rng(seed)
    ids = [generator.integers(0, 90, length).tolist() for length in lengths]
    return Rows.from_lists(ids, [[0, 0, *[1] * (length - 2)] for length in lengths])


def lengths(count, seed=0):
    return np.random.default_rng(seed).integers(5, 40, count).tolist()


def naive_anchors(mask, depths):
    """Position by position, as the definition reads."""
    found = []
    for depth in range(depths):
        here = []
        for b, t in itertools.product(*map(range, mask.shape)):
            needed = range(t + 1, t + 3 + depth)
            if needed[-1] < mask.shape[1] and all(mask[b, place] for place in needed):
                here.append(b * mask.shape[1] + t)
        found.append(here)
    return found


# --- anchors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 3, 4, 11])
def test_anchors_are_those_of_the_definition(width):
    mask = torch.rand(6, width, generator=torch.Generator().manual_seed(width)) < 0.75
    assert [one.tolist() for one in anchors(mask, 5)] == naive_anchors(mask, 5)


def test_a_reply_is_proposed_from_its_second_token_to_its_last():
    """B001: of a reply at positions s .. e - 1, depth 0 proposes s + 1 .. e - 1, nothing before and nothing behind."""
    start, end, width = 4, 9, 12
    mask = torch.zeros(1, width, dtype=torch.bool)
    mask[0, start:end] = True
    for depth, at in enumerate(anchors(mask, 3)):
        assert (at + 2 + depth).tolist() == list(range(start + 1 + depth, end))


def test_no_depth_reaches_from_one_reply_into_the_next():
    mask = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1, 1, 1]], dtype=torch.bool)
    for depth, at in enumerate(anchors(mask, 4)):
        for t in at.tolist():
            assert mask[0, t + 1 : t + 3 + depth].all()


# --- rows -----------------------------------------------------------------------------------------------------------


def test_rows_of_a_prepared_data_set():
    table = datasets.Dataset.from_dict(
        {
            "ids": [[5, 6, 7], [8, 9]],
            "mask": [[0, 1, 1], [1, 1]],
            "key": ["a", "b"],
            "place": ["f, row 1", "f, row 2"],
        },
        datasets.Features(
            ids=datasets.List(datasets.Value("int32")),
            mask=datasets.List(datasets.Value("uint8")),
            key=datasets.Value("string"),
            place=datasets.Value("string"),
        ),
    )
    rows = Rows.of(table.with_format("numpy"))
    assert [(ids.tolist(), mask.tolist()) for ids, mask in (rows[0], rows[1])] == [
        ([5, 6, 7], [False, True, True]),
        ([8, 9], [True, True]),
    ]
    assert (rows.keys, rows.places) == (["a", "b"], ["f, row 1", "f, row 2"])


def test_rows_are_cut_where_nothing_supervised_follows():
    """B024: ids and masks are cut alike, at max_length or sooner, and what has nothing left is gone."""
    ids = [list(range(10)), list(range(10)), list(range(4)), list(range(6))]
    mask = [[0, 0, 0, 1, 1, 1, 0, 0, 0, 0], [0] * 8 + [1, 1], [0, 1, 0, 1], [0, 1, 1, 1, 1, 1]]
    rows = Rows.from_lists(ids, mask)
    trimmed = rows.trimmed(5)
    assert trimmed.keys == ["0", "3"]
    assert [(a.tolist(), b.astype(int).tolist()) for a, b in (trimmed[0], trimmed[1])] == [
        ([0, 1, 2, 3, 4], [0, 0, 0, 1, 1]),
        ([0, 1, 2, 3, 4], [0, 1, 1, 1, 1]),
    ]
    assert rows.trimmed(100).lengths.tolist() == [6, 10, 6]
    assert rows.trimmed(100).keys == ["0", "1", "3"]  # row 2 has no two supervised tokens side by side


def test_the_hash_knows_every_id_mask_and_the_order():
    rows = rows_of([6, 7])
    others = [rows.select([1, 0]), rows.select([0]), rows.trimmed(6)]
    other_id, other_mask = rows_of([6, 7]), rows_of([6, 7])
    other_id.ids[3] += 1
    other_mask.mask[3] = False
    assert len({rows.hash(), other_id.hash(), other_mask.hash(), *(one.hash() for one in others)}) == 6
    assert rows.hash() == rows_of([6, 7]).hash()


# --- the held-out split ---------------------------------------------------------------------------------------------


def test_the_split_goes_by_conversation_whatever_the_order():
    keys = [f"key {number}" for number in range(400)]
    trained, held = split(keys, 0.1)
    assert sorted(trained + held) == list(range(400))
    assert 20 <= len(held) <= 60
    mixed = list(reversed(keys)) + keys[:50]
    _, held_mixed = split(mixed, 0.1)
    assert {mixed[row] for row in held_mixed} == {keys[row] for row in held}
    _, held_more = split(keys, 0.2)
    assert set(held) <= set(held_more)


def test_a_small_set_holds_out_one_and_trains_on_one():
    for share in (0.001, 0.999):
        trained, held = split(["a", "b", "a"], share)
        assert trained
        assert held
    assert split(["a", "a"], 0.5) == ([0, 1], [])
    assert split(["a", "b"], 0.0) == ([0, 1], [])


# --- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [BatchSettings(rows=4), BatchSettings(tokens=100)], ids=["rows", "tokens"])
def test_every_epoch_sees_each_row_once_in_an_order_of_its_own(settings):
    batches = Batches(rows_of(lengths(30)), settings, seed=3)
    orders = [list(itertools.chain(*batches.plan(epoch))) for epoch in range(3)]
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    again = Batches(rows_of(lengths(30)), settings, seed=3)
    assert [again.rows_of(step) for step in range(batches.steps(3))] == list(
        itertools.chain(*(batches.plan(epoch) for epoch in range(3)))
    )
    assert Batches(rows_of(lengths(30)), settings, seed=4).plan(0) != batches.plan(0)


def test_a_step_is_found_in_its_epoch():
    batches = Batches(rows_of(lengths(10)), BatchSettings(rows=4), seed=0)
    assert batches.steps(2) == 6  # two whole windows and a short one an epoch
    assert [batches.place(step) for step in range(7)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert [len(batches.rows_of(step)) for step in range(6)] == [4, 4, 2, 4, 4, 2]


@pytest.mark.parametrize("settings", [BatchSettings(rows=4), BatchSettings(tokens=100)], ids=["rows", "tokens"])
def test_a_late_step_is_found_without_dealing_out_all_epochs_again(settings, monkeypatch):
    """Of 300 epochs: each is dealt out at most once, however many steps are asked for."""
    dealt, plain = [], Batches._plan
    monkeypatch.setattr(Batches, "_plan", lambda self, epoch: dealt.append(epoch) or plain(self, epoch))
    batches = Batches(rows_of(lengths(10)), settings, seed=0)
    last = batches.steps(300) - 1
    counted = len(dealt)
    assert batches.place(last)[0] == 299
    for step in range(last - 4, last + 1):
        assert batches.rows_of(step)
    assert counted <= 300
    assert len(dealt) - counted <= 5


def test_steps_by_tokens_reach_what_was_asked_for():
    rows = rows_of(lengths(50))
    steps = Batches(rows, BatchSettings(tokens=100), seed=0).plan(0)
    counted = [int(rows.lengths[step].sum()) for step in steps]
    assert all(100 <= tokens < 140 for tokens in counted[:-1])
    assert sum(counted) == int(rows.lengths.sum())


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_processes_share_a_step_and_none_is_without_a_batch(world):
    rows = rows_of(lengths(7))
    for step in range(4):
        seen = []
        for rank in range(world):
            batches = Batches(rows, BatchSettings(rows=4, forward_rows=2), 0, rank=rank, world=world)
            mine = batches.forwards(step)
            assert mine
            assert all(batch.ids.shape[0] <= 2 for batch in mine)
            seen += [row for batch in mine if batch.mask.any() for row in batch.rows]
        assert sorted(seen) == sorted(batches.rows_of(step))


def test_forwards_keep_to_their_limits_and_padding_is_not_supervised():
    rows = rows_of(lengths(40))
    settings = BatchSettings(forward_tokens=120)
    made = forwards(rows, range(40), settings)
    assert sorted(itertools.chain(*(batch.rows for batch in made))) == list(range(40))
    for batch in made:
        assert batch.ids.numel() <= 120 or len(batch.rows) == 1
        for place, row in enumerate(batch.rows):
            ids, mask = rows[row]
            assert batch.ids[place, : len(ids)].tolist() == ids.tolist()
            assert batch.mask[place].tolist() == mask.tolist() + [False] * (batch.ids.shape[1] - len(ids))
        assert batch.tokens == int(rows.lengths[batch.rows].sum())
    assert sum(batch.ids.numel() for batch in made) < 1.2 * int(rows.lengths.sum())  # rows of a length go together


def test_a_long_row_has_a_forward_of_its_own():
    made = forwards(rows_of([50, 5, 5]), [0, 1, 2], BatchSettings(forward_tokens=10))
    assert [batch.rows for batch in made] == [[0], [1, 2]]
    assert collate(rows_of([50, 5]), [1]).ids.shape == (1, 5)


def test_nothing_to_train_on_is_said():
    with pytest.raises(UserError, match="nothing to train on"):
        Batches(rows_of([5]).trimmed(3).select([]), BatchSettings(), 0)


def test_the_longest_run_is_what_the_deepest_anchors_need() -> None:
    """It neither joins rows nor counts what was cut off behind a row."""
    rows = Rows.from_lists([[1] * 6, [1] * 7], [[0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 0, 1, 0]])
    assert rows.longest == 3
    assert [len(at) for at in anchors(torch.tensor(rows[1][1])[None], 2)] == [1, 0]
    assert rows.select([0]).longest == 2
    assert Rows.from_lists([[1] * 3], [[0] * 3]).longest == 0
    assert Rows.from_lists([[1] * 3], [[1] * 3]).longest == 3
