"""EAGLE-3 against a plain reference, its attention against the dense form, and what it takes over from the backbone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from headstart.errors import UserError
from headstart.heads import layer
from headstart.heads.backbone import Features
from headstart.heads.eagle3 import Eagle3, Eagle3Config, default_taps
from headstart.heads.vocab import DraftVocab


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


# -- a reference that shares no code with the product ---------------------------------------------------------------


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """One vector (heads, h) at a position, pair by pair: component i with component i + h / 2."""
    half = x.shape[-1] // 2
    out = x.clone()
    for i in range(half):
        angle = torch.tensor(position / theta ** (i / half))
        out[:, i] = x[:, i] * angle.cos() - x[:, i + half] * angle.sin()
        out[:, i + half] = x[:, i + half] * angle.cos() + x[:, i] * angle.sin()
    return out


def reference(
    weights: dict[str, Tensor],
    taps: Tensor,
    embeddings: Tensor,
    heads: int,
    groups: int,
    eps: float,
    theta: float,
    steps: int,
) -> list[list[Tensor]]:
    """EAGLE-3's training-time test, one position at a time: `result[k][t]` is the output of step k at position t.

    Tensor names are those of the official files. `taps` (T, 3H), `embeddings` (T, H) of the tokens themselves. Step
    k at position t reads the embedding of token t + 1 + k and the output of step k - 1 at t.
    """
    w = {name: weights[f"midlayer.{name}.weight"] for name in (
        "hidden_norm", "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
        "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}  # fmt: skip
    length, hidden = len(taps), [weights["fc.weight"] @ row for row in taps]
    seen: list[list[tuple[Tensor, Tensor]]] = []  # by step, by position: key and value
    results = []
    for step in range(steps):
        entries, queries, reads = [], [], []
        for t in range(length - 1 - step):
            x = torch.cat((
                rms(embeddings[t + 1 + step], w["input_layernorm"], eps), rms(hidden[t], w["hidden_norm"], eps)
            ))  # fmt: skip
            q = turned((w["self_attn.q_proj"] @ x).view(heads, -1), t + step, theta)
            k = turned((w["self_attn.k_proj"] @ x).view(groups, -1), t + step, theta)
            entries.append((k, (w["self_attn.v_proj"] @ x).view(groups, -1)))
            queries.append(q)
            reads.append(hidden[t])
        seen.append(entries)
        outputs = []
        for t, query in enumerate(queries):
            visible = seen[0][: t + 1] + [seen[later][t] for later in range(1, step + 1)]
            mixed = []
            for head in range(heads):
                group = head // (heads // groups)
                scores = torch.stack([query[head] @ k[group] for k, _ in visible]) / query.shape[-1] ** 0.5
                mixed.append(scores.softmax(0) @ torch.stack([v[group] for _, v in visible]))
            y = reads[t] + w["self_attn.o_proj"] @ torch.cat(mixed)
            z = rms(y, w["post_attention_layernorm"], eps)
            outputs.append(y + w["mlp.down_proj"] @ (F.silu(w["mlp.gate_proj"] @ z) * (w["mlp.up_proj"] @ z)))
        results.append(outputs)
        hidden = outputs
    return results


@pytest.mark.parametrize("heads", [(4, 2, 8), (4, 4, 8), (4, 1, 16), (2, 2, 32)], ids=str)
def test_equals_a_plain_reference(heads: tuple[int, int, int]) -> None:
    queries, groups, width = heads
    changes = {"num_attention_heads": queries, "num_key_value_heads": groups, "head_dim": width}
    changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    head = built("qwen3", changes)
    features, ids = example(head, 9)
    assert features.taps is not None
    weights = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    assert head.config.rope_parameters["rope_theta"] == 500.0
    expected = reference(
        weights,
        features.taps[0],
        head.backbone.embed(ids)[0].detach(),
        queries,
        groups,
        head.config.rms_norm_eps,
        500.0,
        4,
    )
    anchors = [torch.arange(8 - depth) for depth in range(4)]
    for depth, hidden in enumerate(head.unroll(features, ids, anchors)):
        outputs = torch.stack(expected[depth])
        torch.testing.assert_close(hidden, outputs, atol=1e-5, rtol=1e-5)
        logits = rms(outputs, weights["norm.weight"], head.config.rms_norm_eps) @ weights["lm_head.weight"].T
        torch.testing.assert_close(head.project(hidden, depth), logits, atol=1e-5, rtol=1e-5)


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
    assert torch.equal(head._embedded(ids), head.backbone.embed(ids))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(head._embedded(ids), raw)  # Gemma multiplies by sqrt(H)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_projection_starts_as_the_backbones(family: str) -> None:
    backbone = zoo.backbone(family)
    vocab = DraftVocab([4, 7, 50], zoo.VOCAB)
    head = Eagle3.build(backbone, vocab=vocab)
    hidden = torch.randn(2, 3, 32)
    expected = F.linear(backbone.norm(hidden), backbone.output_weight)[..., [4, 7, 50]]
    torch.testing.assert_close(head.project(hidden, 0), expected, atol=1e-4, rtol=1e-4)


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
    found = layer.rotated(states, cos, sin)
    assert torch.equal(found[..., 4:], states[..., 4:])
    assert torch.equal(found[..., :4], layer.rotated(states[..., :4], cos, sin))


def test_alternating_layers_lend_the_rotary_of_full_attention() -> None:
    rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
    found = layer._rope(type("Config", (), {"rope_parameters": rope}))
    assert found == {"rope_type": "default", "rope_theta": 1e6}
    assert layer._rope(object()) == {"rope_type": "default", "rope_theta": 1e4}


def test_config_survives_json() -> None:
    import json

    from headstart.settings import build, dump

    config = built("llama", {"rope_parameters": ROPES["llama3"]}).config
    assert build(Eagle3Config, json.loads(json.dumps(dump(config)))) == config
