"""EAGLE-3 against a plain transformer, its attention against the dense form, and what it takes from the backbone."""

from __future__ import annotations

from typing import Any

import plain_eagle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from headstart.errors import UserError
from headstart.heads import layer, rotary
from headstart.heads.backbone import Features
from headstart.heads.eagle3 import Eagle3, Eagle3Config, default_taps
from headstart.heads.vocab import DraftVocab
from headstart.training.optimizer import build_optimizer
from headstart.training.recipe import OptimSettings


def built(family: str = "llama", changes: dict[str, Any] | None = None, **fields: Any) -> Eagle3:
    torch.manual_seed(3)
    head = Eagle3.build(zoo.backbone(family, **(changes or {})), **fields)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return head


def example(head: Eagle3, length: int, rows: int = 1) -> tuple[Features, Tensor]:
    ids = torch.randint(3, zoo.VOCAB, (rows, length), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return head.backbone.forward(ids, taps=head.taps), ids


# -- a plain transformer that shares no code with the product --------------------------------------------------------

HEADS = [(4, 2, 8), (4, 4, 8), (4, 1, 16), (2, 2, 32)]
SWITCHES: list[dict[str, Any]] = [
    {},
    {"qk_norm": "none"},
    {"qk_norm": "all"},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"norm_before_residual": True},
    {"norm_output": True},
    {"head_layers": 2},
    {"norm_before_fc": True, "fc_norm": True, "norm_before_residual": True, "norm_output": True, "head_layers": 3},
    {"width": 24, "taps": (0, 3)},
    {"width": 48, "norm_output": True, "head_layers": 2},
    {"embedding": "own"},
]


def assert_plain(head: Eagle3) -> None:
    features, ids = example(head, 9)
    assert features.taps is not None
    embedded = head.embedded(ids)[0].detach()
    unrolled = list(head.unroll(features, ids, [torch.tensor([1, 4])] * 4))
    for place, anchor in enumerate((1, 4)):
        expected = plain_eagle.eagle3(head, features.taps[0], embedded, anchor, 4)
        for depth, (hidden, logits) in enumerate(expected):
            torch.testing.assert_close(unrolled[depth][place], hidden, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(head.project(unrolled[depth], depth)[place], logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_equals_a_plain_transformer(heads: tuple[int, int, int]) -> None:
    queries, groups, width = heads
    changes = {"num_attention_heads": queries, "num_key_value_heads": groups, "head_dim": width}
    changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    head = built("qwen3", changes)
    assert head.config.rope_parameters["rope_theta"] == 500.0
    assert_plain(head)


@pytest.mark.parametrize("fields", SWITCHES, ids=str)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_every_switch_is_what_it_says(family: str, fields: dict[str, Any]) -> None:
    assert_plain(built(family, **fields))


@pytest.mark.parametrize("fields", SWITCHES[2:], ids=str)
def test_a_switch_changes_what_is_proposed(fields: dict[str, Any]) -> None:
    """The twin of the test above: a head that ignored the switch would not be told from one that has it."""
    plain, head = built("llama"), built("llama", **fields)
    shared = {
        name: one for name, one in plain.state_dict().items() if head.state_dict().get(name, one[:0]).shape == one.shape
    }
    head.load_state_dict(shared, strict=False)
    found = []
    for one in (plain, head):
        features, ids = example(one, 9)
        found.append([one.project(hidden, 0) for hidden in one.unroll(features, ids, [torch.tensor([4])] * 2)][1])
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_a_head_of_another_width_starts_near_the_backbone() -> None:
    """Wider than the backbone it loses nothing: behind the norm its projection is that of the backbone's states."""
    backbone = zoo.backbone()
    head = Eagle3.build(backbone, width=48)
    assert head.embed_tokens is not None
    basis = torch.linalg.lstsq(
        backbone.embed(torch.arange(zoo.VOCAB)).detach(), head.embed_tokens.weight.detach()
    ).solution
    torch.testing.assert_close(basis @ basis.T, torch.eye(32), atol=1e-4, rtol=1e-4)
    hidden = torch.randn(5, 32)
    found = head.project(hidden @ basis, 0)
    expected = F.linear(backbone.norm(hidden), backbone.output_weight)
    torch.testing.assert_close(
        found / found.norm(dim=-1, keepdim=True), expected / expected.norm(dim=-1, keepdim=True), atol=1e-3, rtol=1e-3
    )
    with pytest.raises(UserError, match="width is 0"):
        Eagle3.build(backbone, width=0)


def test_own_embedding_starts_as_a_copy_and_is_trained() -> None:
    head = Eagle3.build(zoo.backbone("gemma"), embedding="own")
    ids = torch.arange(5)
    assert torch.equal(head.embedded(ids), head.backbone.embed(ids))
    assert head.embedded(ids).requires_grad


# -- attention that has run ahead -----------------------------------------------------------------------------------


def dense(queries: Tensor, text: tuple[Tensor, Tensor], ahead: tuple[Tensor, Tensor], at: Tensor) -> Tensor:
    """What `attend_ahead` computes, with every key in one row for each query."""
    length, shared = text[0].shape[1], queries.shape[1] // text[0].shape[2]
    keys, values = (
        torch.cat((t[at // length], a), 1).repeat_interleave(shared, 2) for t, a in zip(text, ahead, strict=True)
    )
    scores = torch.einsum("mnh,msnh->mns", queries, keys) / queries.shape[-1] ** 0.5
    hidden = torch.arange(keys.shape[1]) > (at % length)[:, None]
    hidden[:, length:] = False
    return torch.einsum("mns,msnh->mnh", scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1), values).flatten(1)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("scores", [1, 100, 1 << 20])
def test_attention_ahead_equals_the_dense_form(steps: int, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layer._SCORES, "cpu", scores)
    torch.manual_seed(0)
    at = torch.tensor([0, 1, 2, 6, 7, 9, 12, 13, 20])  # rows of 7 positions; in the last row the last position only
    shapes = [(9, 4, 8), (3, 7, 2, 8), (3, 7, 2, 8), (9, steps, 2, 8), (9, steps, 2, 8)]
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    weight = torch.randn(9, 32)
    found = layer.attend_ahead(leaves[0], (leaves[1], leaves[2]), (leaves[3], leaves[4]), at)
    expected = dense(leaves[0], (leaves[1], leaves[2]), (leaves[3], leaves[4]), at)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    gradients = [torch.autograd.grad((out * weight).sum(), leaves) for out in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        silent = layer.attend_ahead(leaves[0], (leaves[1], leaves[2]), (leaves[3], leaves[4]), at)
    assert torch.equal(silent, found)


def test_what_is_kept_for_backward_grows_linearly() -> None:
    def kept(length: int) -> int:
        head = built()
        features, ids = example(head, 8)
        features, ids = (
            Features(features.last.repeat(1, length, 1), features.taps.repeat(1, length, 1)),
            ids.repeat(1, length),
        )
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            total = sum(h.sum() for h in head.unroll(features, ids, [torch.arange(8 * length - 8)] * 4))
        assert isinstance(total, Tensor)
        return sum(sizes.values())

    assert kept(128) < 2.3 * kept(64)


# -- what follows from the backbone ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma"])
def test_shape_follows_the_backbone(family: str) -> None:
    head = built(family)
    model, names = head.backbone.model, head.state_dict()
    attention = model.get_decoder().layers[0].self_attn
    for part in ("q_proj", "k_proj", "v_proj"):
        ours, theirs = getattr(head.midlayer.self_attn, part), getattr(attention, part)
        assert ours.weight.shape == (theirs.weight.shape[0], 2 * theirs.weight.shape[1])
        assert (f"midlayer.self_attn.{part}.bias" in names) == (family == "qwen2") == (theirs.bias is not None)
    assert head.midlayer.self_attn.o_proj.weight.shape == attention.o_proj.weight.shape
    assert head.midlayer.self_attn.o_proj.bias is None
    assert head.midlayer.mlp.gate_proj.weight.shape == model.get_decoder().layers[0].mlp.gate_proj.weight.shape
    assert head.config.hidden_act == ("gelu_pytorch_tanh" if family == "gemma" else "silu")
    assert head.config.max_position_embeddings == 256


def test_biases_follow_the_backbone() -> None:
    head = built("llama", {"attention_bias": True, "mlp_bias": True})
    with_bias = {name.removesuffix(".bias") for name in head.state_dict() if name.endswith(".bias")}
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    expected = {f"midlayer.self_attn.{part}" for part in parts}
    assert with_bias == expected | {f"midlayer.mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")}


def test_embedding_is_the_backbones_with_its_scale() -> None:
    head = built("gemma")
    ids = torch.tensor([[5, 9]])
    raw = head.backbone.model.get_input_embeddings().weight[ids]
    assert torch.equal(head.embedded(ids), head.backbone.embed(ids))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(head.embedded(ids), raw)  # Gemma multiplies by sqrt(H)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_projection_starts_as_the_backbones(family: str) -> None:
    backbone = zoo.backbone(family)
    vocab = DraftVocab([4, 7, 50], zoo.VOCAB)
    head = Eagle3.build(backbone, vocab=vocab)
    hidden = torch.randn(2, 3, 32)
    expected = F.linear(backbone.norm(hidden), backbone.output_weight)[..., [4, 7, 50]]
    found = head.project(hidden, 0)
    torch.testing.assert_close(found, expected * (found.norm() / expected.norm()), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_a_start_does_not_depend_on_how_large_the_backbones_states_are(scale: float) -> None:
    """What precedes the taps is multiplied: fused states and logits have the same size, and `fc` learns more slowly."""
    backbone = zoo.backbone()
    with torch.no_grad():
        backbone.model.get_input_embeddings().weight.mul_(scale)
        for layer in backbone.layers:
            layer.self_attn.o_proj.weight.mul_(scale)
            layer.mlp.down_proj.weight.mul_(scale)
    torch.manual_seed(0)
    head = Eagle3.build(backbone)
    features = backbone.forward(torch.randint(3, zoo.VOCAB, (2, 30)), taps=head.taps)
    assert features.taps is not None
    fused = head.true_states(features)
    assert fused.pow(2).mean().sqrt().item() == pytest.approx(2.0, rel=0.2)
    assert head.project(fused, 0).std().item() == pytest.approx(1.0, rel=0.3)
    size = features.taps.pow(2).mean().sqrt().item()
    assert head.shares()["fc.weight"] == pytest.approx(min(1.0, 1 / size), rel=0.3)
    groups = build_optimizer(head, OptimSettings()).param_groups
    assert [group["share"] for group in groups if group["params"][0] is head.fc.weight] == [head.shares()["fc.weight"]]
    muons = build_optimizer(head, OptimSettings(name="muon")).param_groups
    assert [group["share"] for group in muons if any(one is head.fc.weight for one in group["params"])] == [5.0]
    assert Eagle3.build(backbone, fc_norm=True).shares() == {"fc.weight": 1.0}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(1, (0, 0, 1)), (2, (0, 1, 2)), (4, (1, 2, 3)), (6, (2, 3, 4)), (7, (2, 3, 4)), (8, (2, 4, 5)), (30, (2, 15, 27))],
)
def test_default_taps(layers: int, expected: tuple[int, ...]) -> None:
    assert default_taps(layers) == expected
    assert all(0 <= k <= layers for k in expected)


def test_taps_are_read_at_the_documented_places() -> None:
    head = built(taps=(0, 4))
    features, ids = example(head, 6)
    assert features.taps is not None
    with torch.no_grad():
        states = head.backbone.model(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(features.taps[..., :32], states[0])
    torch.testing.assert_close(head.backbone.norm(features.taps[..., 32:]), features.last)  # before the final norm
    assert head.fc.weight.shape == (32, 64)


def test_wrong_shapes_are_refused() -> None:
    backbone = zoo.backbone()
    with pytest.raises(UserError, match=r"taps are \[1, 5\]"):
        Eagle3.build(backbone, taps=[1, 5])
    with pytest.raises(UserError, match="multiple"):
        Eagle3.build(backbone, num_key_value_heads=3)
    with pytest.raises(UserError, match="silly"):
        Eagle3.build(backbone, hidden_act="silly")
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"):
        with pytest.raises(UserError, match=f"{name} is 0; it has to be at least 1"):
            Eagle3.build(backbone, **{name: 0})
    with pytest.raises(UserError, match="head_dim is 7; .* even"):
        Eagle3.build(backbone, head_dim=7)


# -- rotary positions -----------------------------------------------------------------------------------------------

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_rotary_equals_the_backbones(name: str) -> None:
    head = built("llama", {"rope_parameters": ROPES[name]})
    assert ROPES[name].items() <= head.config.rope_parameters.items()
    rotary = head.backbone.model.get_decoder().rotary_emb
    signs = torch.ones(8)
    signs[:4] = -1
    for length in (100, 200, 300):  # the last passes what the backbone was made for, 256
        cos, sin = head.rotary.table(length, torch.zeros(()))
        expected_cos, expected_sin = rotary(torch.zeros(()), torch.arange(max(length, len(cos) * (length > 256)))[None])
        torch.testing.assert_close(cos[:length, 0], expected_cos[0, :length])
        torch.testing.assert_close(sin[:length, 0], expected_sin[0, :length] * signs)


@torch.inference_mode()
def test_a_rotary_made_while_decoding_can_change_with_the_length() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 64}
    head = built("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **factors}})
    short = head.rotary.table(20, torch.zeros(()))[0][1:20].clone()
    assert not torch.equal(short, head.rotary.table(200, torch.zeros(()))[0][1:20])


@pytest.mark.parametrize("name", ROPES)
def test_drafting_passes_the_first_slots_and_the_first_table(name: str) -> None:
    head = built("llama", {"rope_parameters": ROPES[name], "max_position_embeddings": 512})
    features, ids = example(head, 300)
    state = head.start()
    for start in range(0, 290, 29):
        stop = start + 29
        found = head.extend(state, features[:, start:stop], ids[:, start + 1 : stop + 1])
    at = [torch.tensor([289])] * 2
    unrolled = list(head.unroll(features, ids, at))
    torch.testing.assert_close(found.logits[0], head.project(unrolled[0], 0), atol=1e-5, rtol=1e-5)
    deeper = head.step(state, ids[:, 291:292], torch.tensor([[-1]]))
    torch.testing.assert_close(deeper.logits[0], head.project(unrolled[1], 1), atol=1e-5, rtol=1e-5)


def test_casting_the_head_rounds_no_frequency() -> None:
    head, other = built(), built()
    head.to(torch.bfloat16)
    like = torch.zeros((), dtype=torch.float32)
    assert torch.equal(head.rotary.table(200, like)[0], other.rotary.table(200, like)[0])


def test_a_narrow_table_turns_the_first_part_only() -> None:
    states, cos, sin = torch.randn(3, 2, 8), torch.rand(3, 1, 4), torch.rand(3, 1, 4)
    found = rotary.rotated(states, cos, sin)
    assert torch.equal(found[..., 4:], states[..., 4:])
    assert torch.equal(found[..., :4], rotary.rotated(states[..., :4], cos, sin))


def test_alternating_layers_lend_the_rotary_of_full_attention() -> None:
    rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
    found = rotary.rope_of(type("Config", (), {"rope_parameters": rope}))
    assert found == {"rope_type": "default", "rope_theta": 1e6}
    assert rotary.rope_of(object()) == {"rope_type": "default", "rope_theta": 1e4}


def test_config_survives_json() -> None:
    import json

    from headstart.settings import build, dump

    config = built("llama", {"rope_parameters": ROPES["llama3"]}).config
    assert build(Eagle3Config, json.loads(json.dumps(dump(config)))) == config
