"""What is said of a head before it is served: the faults that loaders pass over, each by name, and nothing where all is
right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_exchange import backbone, built

from headstart.cli import main
from headstart.errors import UserError
from headstart.heads.exchange import export_head
from headstart.heads.format import load_head, provenance_of, save_head
from headstart.heads.inspection import inspect

EASY: dict[str, dict[str, Any]] = {"eagle1": {"fc_bias": False}}


def exported(method: str, to: str, path: Path, **fields: Any) -> Path:
    head = built(method, EASY.get(method, {}) | fields, small=method == "eagle3")
    return export_head(head, to, path / "out")


def changed(folder: Path, config: Any = None, tensors: Any = None) -> Path:
    path, weights = folder / "config.json", folder / "model.safetensors"
    found = json.loads(path.read_text())
    if config:
        config(found)
        path.write_text(json.dumps(found))
    if tensors:
        held = load_file(weights)
        tensors(held)
        save_file(held, weights)
    return folder


RIGHT = [
    ("eagle1", "vllm", "vllm"), ("eagle1", "sglang", "sglang"), ("eagle3", "vllm", "vllm"),
    ("eagle3", "sglang", "sglang"), ("eagle3", "specforge", "sglang"), ("eagle3", "speculators", "vllm"),
    ("medusa", "vllm", "vllm:0.32"), ("eagle3", "eagle", "vllm"), ("eagle3", "eagle", "eagle"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "to", "engine"), RIGHT)
def test_what_is_exported_for_an_engine_is_right(method: str, to: str, engine: str, tmp_path: Path) -> None:
    report = inspect(exported(method, to, tmp_path), engine, backbone())
    assert report.right, str(report)
    assert report.facts["method"] == method


SWITCHES: list[tuple[str, str, dict[str, Any]]] = [
    ("eagle3", "vllm", {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True, "head_layers": 2}),
    ("eagle3", "vllm", {"fc_norm": True, "taps": (1, 3, 7), "attention_bias": True, "mlp_bias": True}),
    ("eagle3", "sglang", {"fc_norm": True, "taps": (1, 3, 7), "norm_output": True}),
    ("eagle3", "sglang", {"norm_before_fc": True, "width": 24}),
    ("eagle1", "vllm", {"attention_bias": True}),
    ("eagle1", "vllm", {"output_bias": True, "head_layers": 2}),
    ("eagle1", "sglang", {"fc_bias": True, "output_bias": True}),
]


@pytest.mark.parametrize(("method", "engine", "fields"), SWITCHES, ids=str)
def test_switches_are_no_faults(method: str, engine: str, fields: dict[str, Any], tmp_path: Path) -> None:
    report = inspect(exported(method, engine, tmp_path, **fields), engine, backbone())
    assert report.right, str(report)


def drop(name: str) -> Any:
    return lambda held: held.pop(name)


def put(name: str, tensor: torch.Tensor) -> Any:
    return lambda held: held.update({name: tensor})


def say(**values: Any) -> Any:
    return lambda found: found.update(values)


ONE = torch.ones(32)
FAULTS: list[tuple[str, str, str, Any, Any, str]] = [
    ("eagle1", "vllm", "vllm", None, put("fc.bias", ONE), "fc.bias: dropped without a word"),
    ("eagle1", "vllm", "vllm", say(bias=True), None, "biases of the attention, left at random"),
    ("eagle1", "vllm", "vllm", None, drop("fc.weight"), "fc.weight is missing, and would be left at random"),
    ("eagle1", "vllm", "vllm", None, put("layers.0.input_layernorm.weight", ONE), "no place for it and stops"),
    ("eagle1", "vllm", "vllm", say(attention_bias=True), None, "no bias of o_proj: left at random"),
    ("eagle1", "sglang", "sglang", None, drop("fc.bias"), "fc.bias is missing, and would be left at random"),
    ("eagle1", "vllm", "sglang", None, None, "SGLang would load another class"),
    ("eagle3", "sglang", "vllm", None, None, "off by one"),
    ("eagle3", "vllm", "vllm", say(target_hidden_size=None), None, "target_hidden_size is null"),
    ("eagle3", "vllm", "vllm", None, put("fc.weight", torch.ones(32, 128)), "vLLM builds it for 3: it stops"),
    ("eagle3", "vllm", "vllm", say(architectures=["Qwen2ForCausalLM"]), None, "Eagle3Qwen2ForCausalLM"),
    ("eagle3", "vllm", "vllm", say(eagle_config={"use_aux_hidden_state": False}), None, "fc is dropped"),
    ("eagle3", "vllm", "vllm", None, put("layers.0.self_attn.q_norm.weight", ONE), "has no place for it and stops"),
    ("eagle3", "vllm", "vllm", say(architectures=["Eagle3Qwen3ForCausalLM"]), None, "no q_norm: left at one"),
    ("eagle1", "vllm", "vllm", say(architectures=["Qwen2ForCausalLM"]), None, "EagleQwen2ForCausalLM"),
    ("eagle1", "sglang", "vllm", None, None, "EagleLlamaForCausalLMEagle"),
    ("medusa", "vllm", "vllm", None, None, "went with vLLM 0.33"),
    ("medusa", "medusa", "vllm:0.24", None, None, "dropped without a word before vLLM 0.25"),
    ("eagle3", "vllm", "sglang:0.5.11", None, None, "before SGLang 0.5.12 the layer is called midlayer"),
    ("eagle3", "sglang", "sglang", say(bias=True), None, "gives o_proj a bias, too"),
    ("eagle3", "vllm", "tensorrt-llm", say(norm_before_residual=True), None, "there is no such switch"),
    ("eagle3", "vllm", "sglang", None, None, "where SGLang does not look"),
    ("eagle3", "vllm", "vllm", None, drop("d2t"), "would be read as the first 40"),
    ("eagle3", "vllm", "vllm", None, drop("lm_head.weight"), "lm_head.weight is missing"),
    ("eagle3", "vllm", "vllm", None, put("input_norm.weight", torch.ones(96)), "norm_before_fc is not true"),
    ("eagle3", "vllm", "vllm", say(hidden_act="gelu"), None, "computes silu alone"),
    ("eagle3", "vllm", "vllm", say(num_hidden_layers=8), None, "num_hidden_layers is 8, and the file holds 1"),
    ("eagle3", "speculators", "vllm", lambda found: found.pop("norm_before_residual"), None, "takes it for true"),
    ("eagle3", "speculators", "sglang", None, None, "the config inside the config is not read"),
    ("eagle3", "sglang", "sglang", lambda found: found.pop("draft_vocab_size"), None, "draft_vocab_size is missing"),
    ("eagle3", "sglang", "sglang", say(norm_before_residual=True), None, "SGLang has no such switch"),
    ("eagle3", "sglang", "sglang", say(tie_word_embeddings=True), None, "takes the place of lm_head"),
    ("eagle3", "sglang", "sglang", None, put("midlayer.self_attn.q_proj.bias", ONE), "dropped without a word"),
    ("medusa", "vllm", "vllm:0.32", say(medusa_fc_bias=False), None, "since medusa_fc_bias is not true"),
    ("medusa", "vllm", "vllm:0.32", say(original_lm_head=False), None, "lm_head.weight is dropped"),
    ("medusa", "vllm", "vllm:0.32", say(num_hidden_layers=2), None, "num_hidden_layers is 2, and each"),
    ("medusa", "vllm", "vllm:0.32", None, put("lm_heads.1.weight", ONE), "lm_heads.1.weight is dropped"),
    ("medusa", "vllm", "vllm:0.32", None, drop("lm_head.weight"), "does not take the backbone's"),
    ("medusa", "vllm", "vllm:0.32", say(truncated_vocab_size=40), None, "reads token_map, and then stops"),
    ("medusa", "vllm", "sglang", None, None, "it has no such heads"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "to", "engine", "config", "tensors", "words"), FAULTS)
def test_what_an_engine_would_read_otherwise(
    method: str, to: str, engine: str, config: Any, tensors: Any, words: str, tmp_path: Path
) -> None:
    taps = {"taps": (1, 3, 7)} if (method, to) == ("eagle3", "vllm") and engine == "sglang" else {}
    folder = exported(method, to, tmp_path, **taps)
    report = inspect(changed(folder, config, tensors) if config or tensors else folder, engine, backbone())
    assert not report.right
    assert words in str(report), str(report)
    assert all(one.fix for one in report.findings)


SINCE: list[tuple[str, str, dict[str, Any], str]] = [
    ("vllm", "0.16", {"attention_bias": True}, "attention_bias is true"),
    ("vllm", "0.18", {"norm_before_fc": True}, "norm_before_fc is true"),
    ("vllm", "0.22", {"fc_norm": True}, "fc_norm is true"),
    ("vllm", "0.22", {"norm_output": True}, "norm_output is true"),
    ("vllm", "0.22", {"taps": (1, 2, 3, 7)}, "builds it for 3"),
    ("vllm", "0.24", {"qk_norm": "head"}, "known since vLLM 0.24"),
    ("sglang", "0.5.12", {"norm_output": True}, "norm_output is true"),
    ("sglang", "0.5.17", {"norm_before_fc": True}, "norm_before_fc is true"),
]


@pytest.mark.parametrize(("engine", "version", "fields", "words"), SINCE, ids=str)
def test_what_older_versions_do_not_know(
    engine: str, version: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """From that version on it is served right, and one before it is not."""
    folder = exported("eagle3", engine, tmp_path, **fields)
    for able in (f"{engine}:{version}", engine):
        assert inspect(folder, able, backbone()).right, str(inspect(folder, able, backbone()))
    *first, last = map(int, version.split("."))
    older = inspect(folder, f"{engine}:{'.'.join(map(str, (*first, last - 1)))}", backbone())
    assert not older.right
    assert words in str(older)


def test_versions(tmp_path: Path) -> None:
    folder = exported("eagle3", "vllm", tmp_path)
    assert inspect(folder, "vllm", backbone()).facts["engine"] == "vLLM 0.33.0"
    assert inspect(folder, "vllm:v0.32.0rc1", backbone()).facts["engine"] == "vLLM v0.32.0rc1"
    for other in ("vllm:0.50.0", "vllm:0.6.0"):
        report = inspect(folder, other, backbone())
        assert "was read from 0.12.0 to 0.33.0: what others do is not known" in str(report)
    for wrong in ("vllm:new", "vllm:0.3x.1 ", "eagle:1.0"):
        with pytest.raises(UserError, match="is no version of"):
            inspect(folder, wrong)


def test_a_zero_bias_is_no_loss(tmp_path: Path) -> None:
    folder = changed(exported("eagle1", "vllm", tmp_path), lambda found: found.pop("bias"), put("fc.bias", 0 * ONE))
    assert inspect(folder, "vllm", backbone()).right


@pytest.mark.parametrize("to", ["medusa", "medusa-v2", "tensorrt-llm", "medusa-2"])
def test_medusa_for_vllm_has_to_be_its_own(to: str, tmp_path: Path) -> None:
    assert not inspect(exported("medusa", to, tmp_path), "vllm", backbone()).right


def test_the_own_format_and_old_kinds(tmp_path: Path) -> None:
    folder = save_head(built("eagle3", {}), tmp_path / "own")
    assert inspect(folder).right
    assert "headstart export --to vllm" in str(inspect(folder, "vllm"))
    hydra = exported("hydra", "hydra", tmp_path)
    assert inspect(hydra, backbone=backbone()).right
    assert "no such heads" in str(inspect(hydra, "vllm", backbone()))


def test_names_within_a_wrapper(tmp_path: Path) -> None:
    def wrap(held: dict[str, torch.Tensor]) -> None:
        held |= {f"module.{name}": held.pop(name) for name in list(held)}

    folder = changed(exported("eagle3", "vllm", tmp_path), None, wrap)
    assert inspect(folder, backbone=backbone()).right  # it loads here
    report = inspect(folder, "vllm", backbone())
    assert [one.what for one in report.findings if one.wrong] == [
        "every name begins with module., which vLLM 0.33.0 does not know: nothing would be loaded"
    ]


def test_broken_weights_and_unreadable_input(tmp_path: Path) -> None:
    folder = changed(exported("eagle3", "vllm", tmp_path), None, put("fc.weight", torch.full((32, 96), torch.nan)))
    assert "holds numbers that are none" in str(inspect(folder, backbone=backbone()))
    with pytest.raises(UserError, match="did you mean vllm"):
        inspect(folder, "vlm")
    with pytest.raises(UserError, match="no such folder"):
        inspect(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no weights"):
        inspect(tmp_path / "empty")


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = exported("eagle3", "vllm", tmp_path, taps=(1, 3, 7))
    assert main(["inspect", str(folder), "--engine", "vllm"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("an EAGLE-3 head\n")
    assert said.endswith("all right\n")
    assert main(["inspect", str(folder), "--engine", "sglang"]) == 1
    assert "where SGLang does not look" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "none")]) == 2


def test_export_by_the_command_line(tmp_path: Path) -> None:
    backbone().model.save_pretrained(tmp_path / "model")
    folder = save_head(built("medusa", {}, small=False), tmp_path / "own")
    assert main(["export", "--head", str(folder), "--to", "medusa-v2", "--out", str(tmp_path / "two")]) == 0
    line = ["export", "--head", str(folder), "--to", "medusa", "--out", str(tmp_path / "one")]
    assert main(line) == 2  # the head names tiny-llama, which is nowhere to be had
    assert main([*line, "--backbone", str(tmp_path / "model")]) == 0
    assert (tmp_path / "one" / "medusa_lm_head.pt").exists()
    assert main(["export", "--head", str(folder), "--to", "vlm", "--out", str(tmp_path / "x")]) == 2


def test_export_to_the_own_format_in_another_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A head as trained, half as large; and one of another tool."""
    own = save_head(built("medusa", {}), tmp_path / "own", provenance={"loss": "soft"})
    foreign = tmp_path / "foreign"
    export_head(built("eagle3", {}), "vllm", foreign)
    backbone().model.save_pretrained(tmp_path / "model")
    for source, more in ((own, []), (foreign, ["--backbone", str(tmp_path / "model")])):
        out = tmp_path / f"{source.name}-bf16"
        line = ["export", "--head", str(source), "--to", "headstart", "--dtype", "bfloat16", "--out", str(out), *more]
        assert main(line) == 0
        capsys.readouterr()
        assert main(line) == 2
        assert "is not empty" in capsys.readouterr().err
        made, before = load_head(out), load_head(source, backbone())
        assert made.method == before.method
        for name, weight in before.state_dict().items():
            assert made.state_dict()[name].dtype == (torch.bfloat16 if weight.is_floating_point() else weight.dtype)
            assert torch.equal(made.state_dict()[name], weight.to(made.state_dict()[name].dtype))
    assert provenance_of(tmp_path / "own-bf16") == {"loss": "soft"}


def test_heads_that_carry_the_architecture_of_a_model_are_heads(tmp_path: Path) -> None:
    from headstart.options import drafter_of

    folder = exported("eagle1", "eagle", tmp_path)  # LlamaForCausalLM, in a pickle
    assert drafter_of(str(folder), backbone()).method == "eagle1"
