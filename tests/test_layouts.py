"""Heads of other tools, written here by hand as their layouts are described, against plain references of their forward.

Nothing of the product makes these files or the expected logits.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plain_eagle
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from test_exchange import IDS, backbone, proposed
from torch import Tensor

import zoo
from headstart.errors import UserError
from headstart.heads.exchange import import_head
from headstart.heads.format import load_head

H, I, V, VD, N = 32, 48, zoo.VOCAB, 40, 8  # noqa: E741
ANCHOR, DEPTHS = 4, 4
IDS_OF = torch.arange(3, 3 + 2 * VD, 2)  # the tokens that a small vocabulary holds


def draw(*shape: int) -> Tensor:
    return 0.3 * torch.randn(shape, generator=DRAWN[0])


DRAWN = [torch.Generator().manual_seed(0)]


@pytest.fixture(autouse=True)
def again() -> None:
    DRAWN[0] = torch.Generator().manual_seed(0)


@functools.cache
def seen() -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Hidden state behind the final norm (T, H), embeddings (T, H), and hidden states, by transformers' own hand."""
    model = backbone().model
    with torch.no_grad():
        out = model.model(input_ids=IDS, output_hidden_states=True)
        kept: dict[int, Tensor] = {}
        handles = [
            layer.register_forward_hook(
                lambda m, a, o, k=k: kept.update({k + 1: (o[0] if isinstance(o, tuple) else o)[0]})
            )
            for k, layer in enumerate(model.model.layers)
        ]
        model.model(input_ids=IDS)
        for handle in handles:
            handle.remove()
        return out.last_hidden_state[0], model.model.embed_tokens(IDS)[0], kept


def layer(prefix: str, inputs: int, heads: int = 4, groups: int = 2, head_dim: int = 8) -> dict[str, Tensor]:
    return {
        f"{prefix}self_attn.q_proj.weight": draw(heads * head_dim, inputs),
        f"{prefix}self_attn.k_proj.weight": draw(groups * head_dim, inputs),
        f"{prefix}self_attn.v_proj.weight": draw(groups * head_dim, inputs),
        f"{prefix}self_attn.o_proj.weight": draw(H, heads * head_dim),
        f"{prefix}mlp.gate_proj.weight": draw(I, H),
        f"{prefix}mlp.up_proj.weight": draw(I, H),
        f"{prefix}mlp.down_proj.weight": draw(H, I),
        f"{prefix}post_attention_layernorm.weight": 1 + draw(H),
    }


def eagle3(prefix: str = "midlayer.") -> dict[str, Tensor]:
    marks = torch.zeros(V, dtype=torch.bool)
    marks[IDS_OF] = True
    return {
        **layer(prefix, 2 * H),
        f"{prefix}hidden_norm.weight": 1 + draw(H),
        f"{prefix}input_layernorm.weight": 1 + draw(H),
        "fc.weight": draw(H, 3 * H),
        "norm.weight": 1 + draw(H),
        "lm_head.weight": draw(VD, H),
        "d2t": IDS_OF - torch.arange(VD),
        "t2d": marks,
    }


SHAPE: dict[str, Any] = {
    "hidden_size": H, "intermediate_size": I, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 1, "vocab_size": V, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
}  # fmt: skip


def folder(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / name) if name.endswith("safetensors") else torch.save(tensors, path / name)
    return path


def spread(logits: Tensor, small: bool) -> Tensor:
    """(n, Vd) over all tokens, -inf where none can be proposed."""
    if not small:
        return logits
    found = torch.full((len(logits), V), -torch.inf)
    found[:, IDS_OF] = logits
    return found


def reference3(tensors: dict[str, Tensor], taps: tuple[int, ...], **switches: Any) -> Tensor:
    _, embedded, states = seen()
    plain = {name.replace("layers.0.", "midlayer."): one for name, one in tensors.items()}
    fields = {
        "norm_before_fc": False, "fc_norm": False, "norm_before_residual": False, "norm_output": False,
        "head_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "qk_norm": "none",
        "hidden_act": "silu", "rope_parameters": {"rope_theta": 10000.0}, "taps": taps,
    }  # fmt: skip
    head = SimpleNamespace(config=SimpleNamespace(**{**fields, **switches}), state_dict=lambda: plain)
    found = plain_eagle.eagle3(head, torch.cat([states[k] for k in taps], -1), embedded, ANCHOR, DEPTHS)
    return spread(torch.stack([logits for _, logits in found]), True)


def agrees(path: Path, expected: Tensor) -> None:
    found = proposed(load_head(path, backbone()))
    expected = expected[: len(found)]
    size = expected[expected.isfinite()].abs().max().item()  # what grew to 1000 is rounded at 1e-4
    torch.testing.assert_close(found, expected, atol=1e-6 * max(10.0, size), rtol=1e-5)


# -- EAGLE-3 ----------------------------------------------------------------------------------------------------------


def test_official_eagle3(tmp_path: Path) -> None:
    """Layers and rotary base are implied: 2, N // 2, N - 3, and 10000."""
    tensors = eagle3()
    config = SHAPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": VD}
    agrees(folder(tmp_path / "a", config, tensors, "pytorch_model.bin"), reference3(tensors, (2, 4, 5)))
    agrees(folder(tmp_path / "b", config, tensors) / "model.safetensors", reference3(tensors, (2, 4, 5)))


def test_sglang_eagle3(tmp_path: Path) -> None:
    """Outputs of layers are counted, so that 0, 2, 6 are hidden states 1, 3, 7."""
    tensors = eagle3() | {f"fc_norm.{i}.weight": 1 + draw(H) for i in range(3)}
    config = SHAPE | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": VD,
        "rope_theta": 500000.0, "fc_norm": True, "norm_output": True, "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6], "use_aux_hidden_state": True},
    }  # fmt: skip
    expected = reference3(tensors, (1, 3, 7), fc_norm=True, norm_output=True, rope_parameters={"rope_theta": 500000.0})
    agrees(folder(tmp_path / "a", config, tensors), expected)
    renamed = {
        {"fc_norm.0.weight": "aux_norm_low.weight", "fc_norm.1.weight": "aux_norm_mid.weight",
         "fc_norm.2.weight": "aux_norm_high.weight"}.get(name, f"model.{name}"): one for name, one in tensors.items()
    }  # fmt: skip
    used = {key: value for key, value in config.items() if key != "fc_norm"} | {"use_aux_norm": True}
    agrees(folder(tmp_path / "b", used, renamed), expected)


def test_modelopt_eagle3(tmp_path: Path) -> None:
    tensors = eagle3("layers.0.")
    expected = reference3(tensors, (2, 4, 5))
    tensors.pop("t2d")
    config = SHAPE | {
        "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VD,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True,
                         "use_last_layernorm": True, "use_input_layernorm_in_first_layer": True},
    }  # fmt: skip
    agrees(folder(tmp_path / "a", config, tensors), expected)


@pytest.mark.parametrize("switch", [True, False])
def test_speculators_eagle3(switch: bool, tmp_path: Path) -> None:
    tensors = eagle3("layers.0.") | {
        "layers.0.self_attn.q_norm.weight": 1 + draw(8),
        "layers.0.self_attn.k_norm.weight": 1 + draw(8),
        "input_norm.weight": 1 + draw(3 * H),
    }
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "draft_vocab_size": VD, "target_hidden_size": None, "norm_before_residual": switch, "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 6], "tie_word_embeddings": False,
        "transformer_layer_config": SHAPE | {"model_type": "qwen3", "head_dim": 8, "rope_parameters":
                                             {"rope_type": "default", "rope_theta": 99.0}, "attention_bias": False},
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a/b", "architectures": []},
                               "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]},
    }  # fmt: skip
    path = folder(tmp_path / "a", config, tensors)
    switches = {"norm_before_residual": switch, "norm_before_fc": True, "qk_norm": "head"}
    agrees(path, reference3(tensors, (1, 4, 6), rope_parameters={"rope_theta": 99.0}, **switches))
    config.pop("norm_before_residual")
    with pytest.raises(UserError, match="norm_before_residual is missing, which vLLM takes for true"):
        load_head(folder(path, config, tensors), backbone())


# -- EAGLE-1 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_official_eagle1(bias: bool, tmp_path: Path) -> None:
    last, embedded, _ = seen()
    tensors = {**layer("layers.0.", H), "fc.weight": draw(H, 2 * H)} | ({"fc.bias": draw(H)} if bias else {})
    # without norms between them, states that are read again and again would grow, and their rounding with them
    tensors = {name: 0.3 * one if one.ndim == 2 else one for name, one in tensors.items()}
    config = SHAPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | ({} if bias else {"bias": False})
    fields = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "qk_norm": "none",
              "hidden_act": "silu", "rope_parameters": {"rope_theta": 10000.0}, "head_layers": 1}  # fmt: skip
    head = SimpleNamespace(config=SimpleNamespace(**fields), state_dict=lambda: tensors)
    states = torch.stack(plain_eagle.eagle1(head, last, embedded, ANCHOR, DEPTHS))
    expected = states @ backbone().model.lm_head.weight.T.detach()
    copy = {"embed_tokens.weight": backbone().model.model.embed_tokens.weight.detach().clone()}
    agrees(folder(tmp_path / "a", config, tensors | copy, "pytorch_model.bin"), expected)
    agrees(folder(tmp_path / "b", config, tensors), expected)
    with pytest.raises(UserError, match="embed_tokens.weight"):
        load_head(folder(tmp_path / "c", config, tensors | {"embed_tokens.weight": draw(V, H)}), backbone())


# -- Medusa -----------------------------------------------------------------------------------------------------------

HEADS, BLOCKS = 3, 2


def medusa() -> tuple[list[list[tuple[Tensor, Tensor]]], list[Tensor]]:
    return [[(draw(H, H), draw(H)) for _ in range(BLOCKS)] for _ in range(HEADS)], [draw(V, H) for _ in range(HEADS)]


def said(blocks: Any, projections: list[Tensor]) -> Tensor:
    found = []
    for head, rows in zip(blocks, projections, strict=True):
        x = seen()[0][ANCHOR]
        for weight, bias in head:
            x = x + F.silu(weight @ x + bias)
        found.append(rows @ x)
    return torch.stack(found)


MEDUSA = {
    "v1": ("{i}.{j}.linear.{p}", f"{{i}}.{BLOCKS}.weight", {"medusa_num_heads": HEADS, "medusa_num_layers": BLOCKS}),
    "bare": ("{i}.{j}.linear.{p}", f"{{i}}.{BLOCKS}.weight", {}),
    "trt": ("medusa_heads.{i}.medusa_layers.{j}.linear.{p}", "medusa_heads.{i}.lm_head.weight", {}),
    "vllm": ("blocks.{i}.layers.{j}.{p}", "lm_heads.{i}.weight",
             {"model_type": "medusa", "num_heads": HEADS, "num_hidden_layers": BLOCKS, "medusa_fc_bias": True,
              "hidden_size": H, "vocab_size": V}),
    "vllm-old": ("medusa_heads.blocks.{i}.layers.{j}.{p}", "medusa_heads.lm_heads.{i}.weight",
                 {"medusa_fc_bias": True}),
    "medusa-2": ("medusa_head.{i}.{j}.linear.{p}", f"medusa_head.{{i}}.{BLOCKS}.weight",
                 SHAPE | {"num_hidden_layers": N, "medusa_num_heads": HEADS, "medusa_num_layers": BLOCKS}),
}  # fmt: skip


@pytest.mark.parametrize("kind", MEDUSA)
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "model.safetensors"])
def test_medusa(kind: str, file: str, tmp_path: Path) -> None:
    block, projection, config = MEDUSA[kind]
    blocks, projections = medusa()
    tensors = {projection.format(i=i): rows for i, rows in enumerate(projections)}
    for i, head in enumerate(blocks):
        for j, (weight, bias) in enumerate(head):
            tensors |= {block.format(i=i, j=j, p="weight"): weight, block.format(i=i, j=j, p="bias"): bias}
    if kind == "medusa-2":
        tensors |= {name: one.detach().clone() for name, one in backbone().model.state_dict().items()}
    agrees(folder(tmp_path / "a", config, tensors, file), said(blocks, projections))


def test_medusa_version_2(tmp_path: Path) -> None:
    blocks, _ = medusa()
    rows = backbone().model.lm_head.weight.detach()
    tensors = {f"{i}.{j}.linear.{p}": one for i, head in enumerate(blocks) for j, pair in enumerate(head)
               for p, one in zip(("weight", "bias"), pair, strict=True)}  # fmt: skip
    config = {"medusa_num_heads": HEADS, "medusa_num_layers": BLOCKS, "version": "2"}
    agrees(folder(tmp_path / "a", config, tensors, "medusa_lm_head.safetensors"), said(blocks, [rows] * HEADS))


def test_medusa_of_vllm_with_a_map(tmp_path: Path) -> None:
    blocks, _ = medusa()
    rows = draw(VD, H)
    tensors = {f"blocks.{i}.layers.{j}.weight": pair[0] for i, head in enumerate(blocks) for j, pair in enumerate(head)}
    config = {"model_type": "medusa", "num_heads": HEADS, "num_hidden_layers": BLOCKS, "original_lm_head": True,
              "hidden_size": H, "vocab_size": V, "truncated_vocab_size": VD}  # fmt: skip
    path = folder(tmp_path / "a", config, tensors | {"lm_head.weight": rows, "token_map": IDS_OF})
    plain = [[(weight, torch.zeros(H)) for weight, _ in head] for head in blocks]
    agrees(path, spread(said(plain, [rows] * HEADS), True))


def test_medusa_of_vllm_with_one_projection(tmp_path: Path) -> None:
    """vLLM takes the first head's for all, and drops the others."""
    blocks, projections = medusa()
    tensors = {f"blocks.{i}.layers.{j}.{p}": one for i, head in enumerate(blocks) for j, pair in enumerate(head)
               for p, one in zip(("weight", "bias"), pair, strict=True)}  # fmt: skip
    config = MEDUSA["vllm"][2] | {"original_lm_head": True}
    first = {"lm_heads.0.weight": projections[0]}
    agrees(folder(tmp_path / "a", config, tensors | first), said(blocks, projections[:1] * HEADS))
    for change, held, words in (
        ({}, first | {"lm_heads.1.weight": projections[1]}, r"lm_heads\.1\.weight differs from lm_heads\.0"),
        ({}, {}, r"original_lm_head is true, and lm_head\.weight is missing"),
        ({"original_lm_head": False}, {"lm_head.weight": projections[0]}, "original_lm_head is not true"),
        ({"original_lm_head": "true"}, first, "original_lm_head is 'true'"),
    ):
        with pytest.raises(UserError, match=words):
            load_head(folder(tmp_path / "b", config | change, tensors | held), backbone())


# -- Hydra and the MLP speculator -------------------------------------------------------------------------------------


def test_hydra(tmp_path: Path) -> None:
    last, embedded, _ = seen()
    tensors: dict[str, Tensor] = {"input_embed_fn.weight": backbone().model.model.embed_tokens.weight.detach().clone()}
    expected = []
    for i in range(HEADS):
        wide = (i + 2) * H
        made = {
            f"hydra_mlp.{i}.0.linear.weight": draw(H, wide), f"hydra_mlp.{i}.0.linear.bias": draw(H),
            f"hydra_mlp.{i}.0.res_connection.weight": draw(H, wide), f"hydra_mlp.{i}.0.res_connection.bias": draw(H),
            f"hydra_mlp.{i}.1.linear.weight": draw(H, H), f"hydra_mlp.{i}.1.linear.bias": draw(H),
            f"hydra_lm_head.{i}.weight": draw(V, H), f"hydra_lm_head.{i}.bias": draw(V),
        }  # fmt: skip
        tensors |= made

        def of(name: str, x: Tensor, made: dict[str, Tensor] = made) -> Tensor:
            return made[f"{name}.weight"] @ x + made[f"{name}.bias"]

        x = torch.cat([last[ANCHOR], *(embedded[ANCHOR + 1 + k] for k in range(i + 1))])
        x = of(f"hydra_mlp.{i}.0.res_connection", x) + F.silu(of(f"hydra_mlp.{i}.0.linear", x))
        x = x + F.silu(of(f"hydra_mlp.{i}.1.linear", x))
        expected.append(of(f"hydra_lm_head.{i}", x))
    config = {"hydra_num_heads": HEADS, "hydra_num_layers": 2, "hydra_head_arch": "mlp", "grounded_heads": True,
              "base_model_name_or_path": "a/b", "hidden_state_offset": 0}  # fmt: skip
    agrees(folder(tmp_path / "a", config, tensors, "hydra_lm_head.pt"), torch.stack(expected))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_mlp_speculator(tied: bool, scaled: bool, tmp_path: Path) -> None:
    inner, levels = 24, 3
    parts: dict[str, Tensor] = {}
    for i in range(levels):
        own = 0 if tied else i
        for name, shape in (("emb", (V, inner)), ("head", (V, inner)), ("ln", (inner,))):
            parts[f"{name}.{i}"] = parts[f"{name}.{own}"] if own < i else draw(*shape)
        parts[f"bias.{i}"] = parts["bias.0"] if own < i else draw(inner)
        parts[f"proj.{i}"] = parts["proj.1"] if tied and i > 1 else draw(inner, H if i == 0 else inner)
    kept = 0.5 ** (0.5 / levels)
    share = math.sqrt((1 - kept**2) * inner / 2) / kept

    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean() + 1e-6)

    x, expected = seen()[0][ANCHOR], []
    x = norm(x) / math.sqrt(2) if scaled else x
    for i in range(levels):
        x = parts[f"proj.{i}"] @ x + share * parts[f"emb.{i}"][IDS[0, ANCHOR + 1 + i]]
        x = F.gelu(norm(x) * parts[f"ln.{i}"] + parts[f"bias.{i}"])
        expected.append(parts[f"head.{i}"] @ x)
    tensors = {f"speculator.{name}.weight": one.clone() for name, one in parts.items() if not name.startswith("bias")}
    tensors |= {f"speculator.ln.{i}.bias": parts[f"bias.{i}"].clone() for i in range(levels)}
    config = {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"], "vocab_size": V,
              "emb_dim": H, "inner_dim": inner, "n_predict": levels, "top_k_tokens_per_head": [4, 3, 2],
              "n_candidates": 5, "tie_weights": tied, "scale_input": scaled}  # fmt: skip
    agrees(folder(tmp_path / "a", config, tensors), torch.stack(expected))
    if tied:
        tensors["speculator.head.2.weight"] = draw(V, inner)
        with pytest.raises(UserError, match=r"tie_weights is true, and head\.2\.weight differs"):
            load_head(folder(tmp_path / "b", config, tensors), backbone())


# -- what a file may not be -------------------------------------------------------------------------------------------


class Bomb:
    """A pickle that would create a file as soon as it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_pickles_are_read_for_their_tensors_alone(tmp_path: Path) -> None:
    torch.save({"0.0.linear.weight": draw(H, H), "x": Bomb(tmp_path / "gone")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(UserError, match=r"holds more than tensors .* not opened"):
        load_head(tmp_path, backbone())
    assert not (tmp_path / "gone").exists()


def test_what_the_backbone_alone_knows(tmp_path: Path) -> None:
    config = SHAPE | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": VD}
    with pytest.raises(UserError, match="does not say which layers it reads.*give the backbone"):
        load_head(folder(tmp_path / "a", config, eagle3()))
    said = config | {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}
    head = load_head(folder(tmp_path / "b", said, eagle3()))
    assert head.config.num_layers == 0
    assert head.bind(backbone()).config.num_layers == N
    with pytest.raises(UserError, match="no three"):
        import_head(folder(tmp_path / "c", config, eagle3()), zoo.backbone(num_hidden_layers=6))


def test_a_config_that_says_two_things(tmp_path: Path) -> None:
    config = SHAPE | {"draft_vocab_size": VD, "eagle_aux_hidden_state_layer_ids": [1, 4, 6]}
    for more, words in (
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 4, 5]}}, "which is it"),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "which was it trained"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true, and the file has an lm_head.weight"),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"]}, "see a window of 8"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm: True"),
        ({"parallel_drafting": True}, "in parallel"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
    ):
        with pytest.raises(UserError, match=words):
            load_head(folder(tmp_path / "a", config | more, eagle3()), backbone())
    with pytest.warns(UserWarning, match="not heeded: magic_switch"):
        load_head(folder(tmp_path / "a", config | {"magic_switch": 1}, eagle3()), backbone())


@pytest.mark.parametrize("layers", [1, 2])
def test_a_whole_model_is_no_head(layers: int, tmp_path: Path) -> None:
    zoo.backbone(num_hidden_layers=layers).model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="a whole causal LM, which is to be given as the backbone"):
        load_head(tmp_path, backbone())


def test_an_adapter_is_no_head(tmp_path: Path) -> None:
    names = [f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_{p}.weight" for i in range(2) for p in "AB"]
    path = folder(tmp_path, {"peft_type": "LORA"}, {name: draw(4, H) for name in names}, "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"an adapter \(LoRA\), which changes a model"):
        load_head(path)
