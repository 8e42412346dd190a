"""The draft vocabulary: maps both ways, counting, and what is refused."""

from __future__ import annotations

import pytest
import torch

from headstart.errors import UserError
from headstart.heads.vocab import DraftVocab

KEPT = [2, 3, 7, 11]


def test_maps_go_both_ways() -> None:
    vocab = DraftVocab(KEPT, 12)
    assert vocab.ids.tolist() == KEPT
    assert vocab.to_target(torch.tensor([[0, 3], [1, 2]])).tolist() == [[2, 11], [3, 7]]
    everything = torch.arange(12)
    assert vocab.contains(everything).nonzero().flatten().tolist() == KEPT
    assert vocab.to_draft(everything).tolist() == [-1, -1, 0, 1, -1, -1, -1, 2, -1, -1, -1, 3]
    assert torch.equal(vocab.to_draft(vocab.to_target(torch.arange(4))), torch.arange(4))
    weight = torch.randn(12, 5)
    assert torch.equal(vocab.rows(weight), weight[KEPT])


def test_files_hold_offsets_and_marks() -> None:
    buffers = DraftVocab(KEPT, 12).state_dict()
    assert buffers["d2t"].dtype == torch.int64
    assert (buffers["d2t"] + torch.arange(4)).tolist() == KEPT
    assert buffers["t2d"].dtype == torch.bool
    assert buffers["t2d"].nonzero().flatten().tolist() == KEPT
    assert DraftVocab.from_maps(buffers["d2t"], buffers["t2d"], 12).ids.tolist() == KEPT


def test_full_vocabulary_is_the_identity() -> None:
    for vocab in (DraftVocab(None, 12), DraftVocab(range(12), 12)):
        ids = torch.tensor([0, 5, 11])
        assert vocab.full
        assert not vocab.state_dict()
        assert vocab.to_target(ids).tolist() == vocab.to_draft(ids).tolist() == [0, 5, 11]
        assert vocab.contains(ids).all()
        assert torch.equal(vocab.rows(ids.new_ones(12)), ids.new_ones(12))
        assert vocab.ids.tolist() == list(range(12))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 5, 12], "draft id 2 stands for token 12; the vocabulary is 0..11"),
        ([1, 2, -1, 40], "draft id 2 stands for token -1"),
        ([1, 5, 5, 5], "draft id 2 .* twice: token 5"),
        ([1, 8, 4, 9], "draft id 2 .* out of order: token 4 after 8"),
        ([], "shape"),
    ],
)
def test_bad_entries_are_named(ids: list[int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        DraftVocab(ids, 12)


def test_bad_maps_are_refused() -> None:
    good = DraftVocab(KEPT, 12).state_dict()
    with pytest.raises(UserError, match="d2t is int32"):
        DraftVocab.from_maps(good["d2t"].int(), good["t2d"], 12)
    with pytest.raises(UserError, match=r"t2d is bool \(12,\); expected bool \(13,\)"):
        DraftVocab.from_maps(good["d2t"], good["t2d"], 13)
    with pytest.raises(UserError, match="twice: token 2"):
        DraftVocab.from_maps(good["d2t"].clone().index_fill_(0, torch.tensor(1), 1), good["t2d"], 12)
    with pytest.raises(UserError, match="token 12"):  # ids where offsets belong
        DraftVocab.from_maps(torch.arange(9, 13) - torch.arange(4), good["t2d"], 12)
    flipped = good["t2d"].clone()
    flipped[5] = True
    with pytest.raises(UserError, match=r"t2d\[5\] is True, and d2t says False"):
        DraftVocab.from_maps(good["d2t"], flipped, 12)


def test_counts_supervised_tokens_only() -> None:
    rows = [([1, 1, 1, 4, 6], [0, 0, 0, 1, 1]), ([6, 9, 9, 9], [1, 1, 1, 0]), (torch.tensor([1]), torch.tensor([True]))]
    assert DraftVocab.count(rows, 12, 2).ids.tolist() == [6, 9]  # twice each
    assert DraftVocab.count(rows, 12, 3).ids.tolist() == [1, 6, 9]  # 1 and 4 once each: the lower one
    assert DraftVocab.count(rows, 12, 6).ids.tolist() == [0, 1, 2, 4, 6, 9]  # unseen ones by id
    assert DraftVocab.count(rows, 12, 12).full
    assert DraftVocab.count(reversed(rows), 12, 3).ids.tolist() == [1, 6, 9]


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(UserError, match="13 tokens was asked for; the backbone has 12"):
        DraftVocab.count([], 12, 13)
    with pytest.raises(UserError, match="row 1 has 2 tokens and a mask of 3"):
        DraftVocab.count([([1], [1]), ([1, 2], [1, 1, 1])], 12, 3)
    with pytest.raises(UserError, match="row 0 has token 12"):
        DraftVocab.count([([1, 12], [1, 1])], 12, 3)
    assert DraftVocab.count([([1, 12], [1, 0])], 12, 1).ids.tolist() == [1]
