"""What holds for every head, whatever its method: a new one in METHODS is tested by being there.

`VARIANTS` lists shapes to try besides the default one.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Features
from headstart.heads.base import DraftHead
from headstart.heads.methods import METHODS
from headstart.heads.vocab import DraftVocab

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "medusa": [{"num_heads": 5, "num_blocks": 2}, {"num_heads": 5, "projection": "own"}],
    "eagle1": [{"fc_bias": False, "qk_norm": "all"}, {"head_layers": 3}],
    "eagle3": [
        {"taps": (0, 2, 3, 4), "norm_before_fc": True, "norm_output": True},
        {"taps": (2,), "fc_norm": True, "norm_before_residual": True},
        {"head_layers": 2, "norm_output": True, "qk_norm": "head"},
        {"width": 24, "head_layers": 3, "norm_before_fc": True, "fc_norm": True},
        {"embedding": "own"},
    ],
    "hydra": [
        {"num_heads": 5, "num_blocks": 3, "projection": "own", "projection_bias": True},
        {"num_heads": 5, "head_arch": "prefix-mlp"},
        {"head_arch": "prefix-mlp", "qk_norm": "head", "num_blocks": 2, "projection": "own"},
    ],
    "mlp_speculator": [
        {"num_heads": 5, "tie_weights": True, "scale_input": True, "inner_size": 24},
        {"num_heads": 4, "scale_input": True},
    ],
}
CASES = [(method, fields) for method in METHODS for fields in [{}, *VARIANTS.get(method, [])]]
DEPTHS = 5
SMALL = range(3, zoo.VOCAB, 2)  # a draft vocabulary


def cases(chosen: list[tuple[str, dict[str, Any]]]) -> pytest.MarkDecorator:
    names = [method for method, _ in chosen]
    return pytest.mark.parametrize(
        ("method", "fields"), chosen, ids=[f"{m}-{names[:i].count(m)}" for i, m in enumerate(names)]
    )


case = cases(CASES)
trained = cases([(method, fields) for method, fields in CASES if METHODS[method].trainable])
family = pytest.mark.parametrize("family", zoo.FAMILIES)
tree = pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])


@functools.cache
def backbone(family: str = "llama") -> Any:
    return zoo.backbone(family)


def built(method: str, fields: dict[str, Any], family: str = "llama", vocab: DraftVocab | None = None) -> DraftHead:
    """A head with random weights: none of them zero or one, so that a part left out is seen."""
    torch.manual_seed(1)
    head = METHODS[method].build(backbone(family), vocab=vocab, **fields)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.08 * torch.randn_like(weight))
    return head


def close(found: Tensor, expected: Tensor) -> None:
    """Equal to 1e-5, or to 1e-5 of the largest value where that is above 1: what grew to 100 is rounded at 1e-5."""
    size = expected.detach().abs().max().item() if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, atol=1e-5 * max(1.0, size), rtol=1e-5)


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, zoo.VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def seen(head: DraftHead, ids: Tensor) -> Features:
    return head.backbone.forward(ids, taps=head.taps)


def depths_of(head: DraftHead) -> int:
    return min(DEPTHS, head.max_depth or DEPTHS)


def every_anchor(ids: Tensor, depths: int) -> list[Tensor]:
    rows, length = ids.shape
    places = torch.arange(rows * length).view(rows, length)
    return [places[:, : length - 1 - depth].flatten() for depth in range(depths)]


def drafted(head: DraftHead, features: Features, ids: Tensor, anchor: int, depths: int, tree: bool) -> list[Tensor]:
    """Logits (B, Vd) of each depth from one anchor along the true tokens; in a tree they stand among others."""
    state = head.start(len(ids))
    step = head.extend(state, features[:, : anchor + 1], ids[:, 1 : anchor + 2])
    assert step.logits.shape == (len(ids), 1, head.vocab.size)
    found, node, handed = [step.logits[:, 0]], -1, 0
    for depth in range(1, depths):
        true = ids[:, anchor + 1 + depth, None]  # (B, 1)
        width, place = (4, depth % 4) if tree else (1, 0)
        guesses = text(len(ids), width, seed=depth)
        guesses[:, place] = true[:, 0]
        parents = torch.full_like(guesses, -1)
        if depth > 1:  # the others hang below other nodes of the depth above, or below the same
            parents = handed - width + torch.arange(width).roll(depth).expand(len(ids), -1).clone()
            parents[:, place] = node
        step = head.step(state, guesses, parents)
        assert step.logits.shape == (len(ids), width, head.vocab.size)
        found.append(step.logits[:, place])
        node, handed = handed + place, handed + width
    return found


@trained
@family
@tree
def test_training_step_equals_draft_step(method: str, fields: dict[str, Any], family: str, tree: bool) -> None:
    head = built(method, fields, family)
    ids = text(2, 12)
    features, depths = seen(head, ids), depths_of(head)
    anchors = every_anchor(ids, depths)
    unrolled = [head.project(hidden, d) for d, hidden in enumerate(head.unroll(features, ids, anchors))]
    assert len(unrolled) == depths
    for anchor in (0, 3, 12 - 1 - depths):
        for depth, logits in enumerate(drafted(head, features, ids, anchor, depths, tree)):
            expected = unrolled[depth].view(2, -1, head.vocab.size)[:, anchor]
            close(logits, expected)


@trained
def test_draft_steps_depend_on_the_anchor(method: str, fields: dict[str, Any]) -> None:
    """The twin of the test above: one position further along, the same comparison has to fail."""
    head = built(method, fields)
    ids = text(1, 12)
    features, depths = seen(head, ids), depths_of(head)
    unrolled = [
        head.project(hidden, d) for d, hidden in enumerate(head.unroll(features, ids, every_anchor(ids, depths)))
    ]
    for depth, logits in enumerate(drafted(head, features, ids, 3, depths, tree=False)):
        assert (logits[0] - unrolled[depth][4]).abs().max() > 1e-3


@trained
def test_unroll_of_some_anchors_equals_unroll_of_all(method: str, fields: dict[str, Any]) -> None:
    head = built(method, fields)
    ids = text(3, 11)
    features, depths = seen(head, ids), depths_of(head)
    everywhere = every_anchor(ids, depths)
    every = list(head.unroll(features, ids, everywhere))
    chosen = torch.tensor([1, 4, 5, 13, 14, 22, 27])
    some = [chosen[torch.isin(chosen, at)][depth:] for depth, at in enumerate(everywhere)]
    for depth, hidden in enumerate(head.unroll(features, ids, some)):
        where = torch.searchsorted(everywhere[depth], some[depth])
        close(hidden, every[depth][where])
    nothing = [at[:0] for at in some]
    assert [len(hidden) for hidden in head.unroll(features, ids, nothing)] == [0] * depths


@trained
def test_padding_on_the_right_changes_nothing(method: str, fields: dict[str, Any]) -> None:
    head = built(method, fields)
    depths = depths_of(head)
    short, padded = text(1, 8), text(2, 13, seed=5)
    features, noise = seen(head, short), seen(head, padded)
    padded[0, :8], noise.last[0, :8] = short[0], features.last[0]
    if features.taps is not None and noise.taps is not None:
        noise.taps[0, :8] = features.taps[0]
    alone = list(head.unroll(features, short, every_anchor(short, depths)))
    together = list(head.unroll(noise, padded, every_anchor(short, depths)))
    for one, other in zip(alone, together, strict=True):
        close(one, other)


@trained
def test_labels_are_not_read(method: str, fields: dict[str, Any]) -> None:
    """Depth d at anchor t knows the tokens up to t + 1 + d, and is to propose the next one."""
    head = built(method, fields)
    depths, ids = depths_of(head), text(1, 12)
    features = seen(head, ids)
    at = [torch.tensor([3])] * depths
    before = torch.cat(list(head.unroll(features, ids, at)))
    for depth in range(depths):
        changed = ids.clone()
        changed[0, 3 + 2 + depth :] = text(1, 12, seed=9)[0, 3 + 2 + depth :]
        after = torch.cat(list(head.unroll(features, changed, at)))
        assert torch.equal(before[: depth + 1], after[: depth + 1])


@case
@pytest.mark.parametrize("pieces", [[14], [1] * 14, [5, 1, 8], [13, 1]], ids=str)
def test_chunks_of_true_tokens_make_no_difference(method: str, fields: dict[str, Any], pieces: list[int]) -> None:
    head = built(method, fields)
    ids = text(2, 15)
    features, depths = seen(head, ids), depths_of(head)
    whole, state, start = head.start(2), head.start(2), 0
    expected = head.extend(whole, features[:, :14], ids[:, 1:])
    for width in pieces:
        found = head.extend(state, features[:, start : start + width], ids[:, start + 1 : start + 1 + width])
        start += width
    close(found.logits, expected.logits)
    for depth in range(1, depths):
        guesses, parents = text(2, 1, seed=depth), torch.full((2, 1), depth - 2)
        expected, found = head.step(whole, guesses, parents), head.step(state, guesses, parents)
        close(found.logits, expected.logits)


@case
@tree
def test_guesses_leave_nothing_behind(method: str, fields: dict[str, Any], tree: bool) -> None:
    """After each round the next drafts are those of a fresh state, whatever was guessed and whatever of it was true."""
    head = built(method, fields)
    ids = text(1, 40)
    features, depths = seen(head, ids), depths_of(head)
    state, known = head.start(), 4
    head.extend(state, features[:, :known], ids[:, 1 : known + 1])
    for round_, accepted in enumerate([0, 3, 1, 4, 0, 2, 4]):
        handed = 0
        for depth in range(1, depths):
            width = 3 if tree else 1
            guesses = text(1, width, seed=100 * round_ + depth)
            if depth <= accepted:
                guesses[0, 0] = ids[0, known + depth]  # guessed right; the path below stays true as well
            parents = torch.full_like(guesses, handed - width if depth > 1 else -1)
            head.step(state, guesses, parents)
            handed += width
        new = accepted + 1
        found = head.extend(state, features[:, known : known + new], ids[:, known + 1 : known + new + 1])
        known += new
        fresh = head.start()
        expected = head.extend(fresh, features[:, :known], ids[:, 1 : known + 1])
        close(found.logits, expected.logits)


@case
def test_rows_of_uneven_luck_equal_single_rows(method: str, fields: dict[str, Any]) -> None:
    head = built(method, fields)
    ids = text(3, 24)
    features, depths = seen(head, ids), depths_of(head)
    together, alone = head.start(3), [head.start() for _ in range(3)]
    known = [0, 0, 0]
    for round_, counts in enumerate([[4, 7, 5], [1, 3, 3], [2, 1, 4]]):
        width = max(counts)
        places = torch.tensor(known)[:, None] + torch.arange(width)
        rows = torch.arange(3)[:, None]
        found = [head.extend(together, features[rows, places], ids[rows, places + 1], counts)]
        expected: list[list[Any]] = [[] for _ in range(3)]
        for row, count in enumerate(counts):
            span = slice(known[row], known[row] + count)
            one = head.extend(
                alone[row], features[row : row + 1, span], ids[row : row + 1, span.start + 1 : span.stop + 1]
            )
            expected[row].append(one)
            known[row] += count
        handed = 0
        for depth in range(1, depths):
            guesses = text(3, 2, seed=10 * round_ + depth)
            parents = torch.stack([torch.full((2,), handed - 1 - row % 2 if depth > 1 else -1) for row in range(3)])
            found.append(head.step(together, guesses, parents))
            for row in range(3):
                expected[row].append(head.step(alone[row], guesses[row : row + 1], parents[row : row + 1]))
            handed += 2
        for depth, step in enumerate(found):
            one_by_one = torch.cat([expected[row][depth].logits for row in range(3)])
            close(step.logits, one_by_one)


@trained
@family
def test_every_parameter_is_trained(method: str, fields: dict[str, Any], family: str) -> None:
    """From its own start, one backward pass reaches all of the head and nothing of the backbone."""
    torch.manual_seed(1)
    head = METHODS[method].build(backbone(family), **fields)
    ids, depths = text(2, 12), depths_of(head)
    anchors = every_anchor(ids, depths)
    losses = []
    for depth, hidden in enumerate(head.unroll(seen(head, ids), ids, anchors)):
        labels = ids.flatten()[(anchors[depth] + 2 + depth).clamp(max=ids.numel() - 1)]
        losses.append(torch.nn.functional.cross_entropy(head.project(hidden, depth), labels))
    torch.stack(losses).sum().backward()
    for name, weight in head.named_parameters():
        assert weight.grad is not None, f"{name} has no gradient"
        assert weight.grad.abs().max() > 0, f"{name} has a gradient of zeros"
        assert weight.dtype == torch.float32
    assert all(weight.grad is None for weight in head.backbone.model.parameters())


@case
def test_nothing_of_the_backbone_is_in_the_module(method: str, fields: dict[str, Any]) -> None:
    head = built(method, fields)
    borrowed = {weight.data_ptr() for weight in head.backbone.model.parameters()}
    assert not borrowed & {tensor.data_ptr() for tensor in head.state_dict().values()}
    own = fields.get("embedding") == "own" or "width" in fields
    assert any("embed" in name for name in head.state_dict()) == own
    assert not any("backbone" in name for name in head.state_dict())
    before = head.backbone.dtype
    head.to(torch.bfloat16)
    assert head.backbone.dtype == before


@trained
def test_a_smaller_vocabulary_is_rows_of_the_larger(method: str, fields: dict[str, Any]) -> None:
    vocab = DraftVocab(SMALL, zoo.VOCAB)
    torch.manual_seed(1)
    full = METHODS[method].build(backbone(), **fields)
    torch.manual_seed(1)
    small = METHODS[method].build(backbone(), vocab=vocab, **fields)
    weights = small.state_dict()
    full.load_state_dict(
        {k: v for k, v in weights.items() if full.state_dict().get(k, torch.empty(0)).shape == v.shape}, strict=False
    )
    ids = text(1, 9)
    features = seen(full, ids)
    found = small.extend(small.start(), features[:, :8], ids[:, 1:]).logits
    expected = full.extend(full.start(), features[:, :8], ids[:, 1:]).logits[..., list(SMALL)]
    close(found, expected)


@case
def test_half_precision_stays_near(method: str, fields: dict[str, Any]) -> None:
    head = built(method, fields)
    ids = text(1, 10)
    features = seen(head, ids)
    expected = drafted(head, features, ids, 4, 3, tree=True)
    halves = Features(features.last.bfloat16(), None if features.taps is None else features.taps.bfloat16())
    for dtype in (torch.float32, torch.bfloat16):  # the head in fp32 on a backbone in bf16, then both in bf16
        found = drafted(head.to(dtype), halves, ids, 4, 3, tree=True)
        for one, other in zip(found, expected, strict=True):
            assert (one.float() - other).norm() < 0.1 * other.norm()


@trained
@pytest.mark.parametrize("vocab", [None, DraftVocab(SMALL, zoo.VOCAB)], ids=["full", "small"])
def test_training_goes_on_after_decoding_in_inference_mode(
    method: str, fields: dict[str, Any], vocab: DraftVocab | None
) -> None:
    head = built(method, fields, vocab=vocab)
    ids, depths = text(1, 12), depths_of(head)
    with torch.inference_mode():
        head.bind(head.backbone)
        longer = text(1, 30)
        drafted(head, seen(head, longer), longer, 20, depths, tree=True)
    for depth, hidden in enumerate(head.unroll(seen(head, ids), ids, every_anchor(ids, depths))):
        head.project(hidden, depth).sum().backward(retain_graph=True)
    assert all(weight.grad is not None for weight in head.parameters())


@trained
@pytest.mark.filterwarnings("error")
def test_autocast_stays_near(method: str, fields: dict[str, Any]) -> None:
    """Training in bf16 over fp32 master weights: gradients are fp32, and close."""
    head = built(method, fields)
    ids, depths = text(2, 12), depths_of(head)
    features = seen(head, ids)
    halves = Features(features.last.bfloat16(), None if features.taps is None else features.taps.bfloat16())
    gradients = []
    for given, enabled in ((features, False), (halves, True)):
        head.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            hidden = head.unroll(given, ids, every_anchor(ids, depths))
            loss = torch.stack([head.project(h, d).float().logsumexp(-1).mean() for d, h in enumerate(hidden)]).sum()
        loss.backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in head.parameters() if weight.grad is not None]))
    assert gradients[1].dtype == torch.float32
    assert (gradients[1] - gradients[0]).norm() < 0.15 * gradients[0].norm()


@case
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 64, "head_dim": 8}, ["width", "32", "64"]),
        ({"vocab_size": 128}, ["vocabulary", "96", "128"]),
        ({"num_hidden_layers": 5}, ["layers", "4", "5"]),
    ],
    ids=["width", "vocabulary", "layers"],
)
def test_another_backbone_is_refused(
    method: str, fields: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    head = built(method, fields)
    before = head.backbone
    with pytest.raises(UserError) as caught:
        head.bind(zoo.backbone("llama", **change))
    assert all(word in str(caught.value) for word in [*words, "tiny-llama"]), str(caught.value)
    assert head.backbone is before


@case
def test_another_tokenizer_is_refused(method: str, fields: dict[str, Any]) -> None:
    import copy

    head = built(method, fields)
    tokenizer = copy.deepcopy(zoo.tokenizer())
    tokenizer.add_tokens(["<extra>"])
    other = type(backbone())(backbone().model, tokenizer, name="other")
    with pytest.raises(UserError, match="tokenizer") as caught:
        head.bind(other)
    assert head.config.tokenizer_hash in str(caught.value)
    without = type(backbone())(backbone().model, None, name="ids only")
    assert head.bind(without).backbone is without


@pytest.mark.parametrize("method", METHODS)
def test_wrong_fields_are_refused(method: str) -> None:
    with pytest.raises(UserError, match="did you mean draft_vocab_size"):
        METHODS[method].build(backbone(), draft_vocab_sise=8)
    with pytest.raises(UserError, match="which of the 96"):
        METHODS[method].build(backbone(), draft_vocab_size=8)
    with pytest.raises(UserError, match="1 to 96"):
        METHODS[method].build(backbone(), draft_vocab_size=97)
    with pytest.raises(UserError, match="12 of 96"):
        METHODS[method].build(backbone(), draft_vocab_size=12, vocab=DraftVocab(range(11), 96))


def test_every_method_is_named_as_it_calls_itself() -> None:
    assert all(head.method == name for name, head in METHODS.items())
    assert set(VARIANTS) <= set(METHODS)
