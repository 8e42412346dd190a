"""Trees: what follows from parents, what is refused, and the shapes."""

from __future__ import annotations

import random
import runpy

import pytest

from headstart.errors import UserError
from headstart.inference.costs import Costs
from headstart.inference.tree import MAX_NODES, Chain, Dynamic, Gain, Static, Tree, limited, parse_shape


def ancestors_of(parents: list[int], node: int) -> set[int]:
    return {node} | (ancestors_of(parents, parents[node]) if parents[node] >= 0 else set())


def test_layout_equals_its_definition() -> None:
    random.seed(0)
    for _ in range(30):
        size = random.randint(1, 12)
        parents = [-1, *(random.randrange(node) for node in range(1, size))]
        tree = Tree([5] * size, parents)
        for node in range(size):
            expected = ancestors_of(parents, node)
            assert {m for m in range(size) if tree.ancestors[node, m]} == expected
            assert tree.depths[node] == len(expected) - 1
            assert list(tree.children[node]) == [m for m in range(size) if parents[m] == node]
        assert tree.depth == max(tree.depths)
        assert len(tree) == size


def test_equal_forms_share_their_tensors() -> None:
    assert Tree([1, 2, 3], [-1, 0, 0]).ancestors is Tree([4, 5, 6], [-1, 0, 0]).ancestors
    assert not Tree([1, 2, 3], [-1, 0, 1]).ancestors.is_inference()


def test_chain() -> None:
    tree = Tree.chain([4, 5, 6])
    assert list(tree.parents) == [-1, 0, 1]
    assert tree.depths == (0, 1, 2)
    assert Tree.chain([4]).depth == 0


def test_child_is_found_by_its_token() -> None:
    tree = Tree([1, 7, 8, 7, 9], [-1, 0, 0, 2, 0])
    assert tree.child(0, 7) == 1
    assert tree.child(2, 7) == 3
    assert tree.child(0, 9) == 4
    assert tree.child(0, 5) is None
    assert tree.child(1, 7) is None


@pytest.mark.parametrize(
    ("tokens", "parents", "words"),
    [
        ([], [], "node 0: .*not nothing"),
        ([1], [0], "node 0: .*not 0"),
        ([1, 2], [-1], "2 tokens needs as many parents, not 1"),
        ([1, 2, 3], [-1, 0, 2], "node 2: .*0 to 1, not 2"),
        ([1, 2, 3], [-1, 2, 0], "node 1: .*0 to 0, not 2"),
        ([1, 2, 3], [-1, 0, -1], "node 2: .*not -1"),
    ],
)
def test_malformed_trees_are_refused_by_node(tokens: list[int], parents: list[int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Tree(tokens, parents)


def test_drafters_are_held_to_their_task() -> None:
    tree = Tree([1, 2, 3, 4], [-1, 0, 1, 0])
    tree.check(root=1, vocab_size=5, budget=2)
    with pytest.raises(UserError, match="node 0: .*rooted in the last token, 2, not in 1"):
        tree.check(root=2, vocab_size=5, budget=2)
    with pytest.raises(UserError, match="node 3: token 4 lies outside .* 4"):
        tree.check(root=1, vocab_size=4, budget=2)
    with pytest.raises(UserError, match="node 2: lies 2 deep .* at most 1"):
        tree.check(root=1, vocab_size=5, budget=1)
    with pytest.raises(UserError, match="node 3: token 2 is there twice below node 0"):
        Tree([1, 2, 2, 2], [-1, 0, 1, 0]).check(root=1, vocab_size=5, budget=2)
    with pytest.raises(UserError, match="node 2: a token is an int, not 2.0"):
        Tree([1, 2, 2.0], [-1, 0, 1]).check(root=1, vocab_size=5, budget=2)  # type: ignore[list-item]
    with pytest.raises(UserError, match=f"node {MAX_NODES}: a tree has at most {MAX_NODES} nodes"):
        Tree([1, *range(MAX_NODES)], [-1] + [0] * MAX_NODES).check(root=1, vocab_size=9999, budget=2)


def test_static_trees_are_sorted_by_depth() -> None:
    shape = Static(((0, 1), (1,), (0,), (0, 0), (0, 1, 0)))
    assert shape.paths == ((0,), (1,), (0, 0), (0, 1), (0, 1, 0))
    assert shape.depth == 3
    assert Static([[0], [0, 0]]) == Static(((0,), (0, 0)))  # lists, as Medusa's files have them


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (((0,), (1, 0)), r"path \[1, 0\]: its parent \[1\] is missing"),
        (((0,), (0,)), r"path \[0\]: is there twice"),
        (((0,), (-1,)), r"path \[-1\]: a path is a list of ranks"),
        (((),), r"path \[\]: a path is a list of ranks"),
        ((), "has no paths"),
    ],
)
def test_malformed_static_trees_are_refused_by_path(paths: tuple, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Static(paths)


def test_empty_shapes_are_refused() -> None:
    with pytest.raises(UserError, match="depth has to be 1 or more, not 0"):
        Chain(0)
    with pytest.raises(UserError, match="nodes has to be 1 or more, not 0"):
        Dynamic(2, 2, 0)


@pytest.mark.parametrize(
    "shape", [Chain(4), Dynamic(5, 4, 10), Gain(6, 4), Static(((0,), (1,), (0, 0), (0, 12), (0, 0, 0)))]
)
def test_shapes_are_read_as_they_are_written(shape) -> None:
    assert parse_shape(str(shape)) == shape


@pytest.mark.parametrize(
    "text",
    ["", "chain", "chain:x", "dynamic:4", "dynamic:4x4", "gain:4", "gain:2x2x2", "static:", "static:a", "bush:3"],
)
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="expected chain:DEPTH"):
        parse_shape(text)


def test_shapes_can_be_cut() -> None:
    assert limited(Chain(4), 2) == Chain(2)
    assert limited(Chain(4), 9) == Chain(4)
    assert limited(Dynamic(4, 3, 8), 1) == Dynamic(1, 3, 8)
    costs = Costs({1: 1.0}, {1: 2.0})
    assert limited(Gain(4, 3, costs), 2) == Gain(2, 3, costs)
    assert limited(Static(((0,), (1,), (0, 0), (0, 0, 0))), 2) == Static(((0,), (1,), (0, 0)))


def test_drawing(capsys, monkeypatch) -> None:
    assert Tree([1, 2, 3, 4, 5], [-1, 0, 0, 1, 1]).draw(lambda token: f"t{token}") == "\n".join(
        ["t1", "├─ t2", "│  ├─ t4", "│  └─ t5", "└─ t3"]
    )
    monkeypatch.setattr("sys.argv", ["tree", "static:0,1,1.0"])
    monkeypatch.delitem(__import__("sys").modules, "headstart.inference.tree")
    runpy.run_module("headstart.inference.tree", run_name="__main__")
    assert capsys.readouterr().out == "0\n├─ 0\n└─ 1\n   └─ 0\n"
