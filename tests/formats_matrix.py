"""Which format can say what: the cases of tests/test_exchange.py, and the tables of docs/formats.md that they make.

`scripts/write_formats.py` runs these tests and writes the tables of what passed; a test keeps the page equal to
the cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headstart.heads.exchange import FORMATS
from headstart.heads.methods import METHODS

# method, fields, family, small vocabulary -> the formats that can say it
CASES: list[tuple[str, dict[str, Any], str, bool, set[str]]] = [
    ("eagle3", {}, "llama", True, {"eagle", "specforge", "sglang", "modelopt", "vllm", "speculators"}),
    ("eagle3", {}, "llama", False, {"eagle", "specforge", "sglang", "modelopt", "vllm", "speculators"}),
    ("eagle3", {"taps": (1, 3, 8)}, "llama", True, {"specforge", "sglang", "modelopt", "vllm", "speculators"}),
    ("eagle3", {"taps": (0, 3, 8)}, "llama", True, {"vllm", "speculators"}),
    ("eagle3", {"taps": (1, 2, 3, 8)}, "llama", True, {"sglang", "vllm", "speculators"}),
    ("eagle3", {"taps": (5, 4, 2)}, "llama", True, set()),
    ("eagle3", {"norm_before_fc": True}, "llama", True, {"sglang", "vllm", "speculators"}),
    ("eagle3", {"fc_norm": True}, "llama", True, {"specforge", "sglang", "vllm", "speculators"}),
    ("eagle3", {"norm_before_fc": True, "fc_norm": True}, "llama", True, set()),
    ("eagle3", {"norm_before_residual": True}, "llama", True, {"vllm", "speculators"}),
    ("eagle3", {"norm_output": True}, "llama", True, {"sglang", "vllm", "speculators"}),
    ("eagle3", {"head_layers": 3}, "llama", True, {"vllm", "speculators"}),
    ("eagle3", {"embedding": "own"}, "llama", True, {"eagle", "vllm", "speculators"}),
    ("eagle3", {"width": 24}, "llama", True, {"specforge", "sglang", "vllm"}),
    ("eagle3", {"width": 32 + 16, "head_dim": 12}, "llama", True, {"eagle", "specforge", "sglang", "vllm"}),
    ("eagle3", {"qk_norm": "head"}, "llama", True, {"vllm", "speculators"}),
    ("eagle3", {"qk_norm": "all"}, "llama", True, set()),
    ("eagle3", {"head_dim": 16}, "llama", True, {"specforge", "sglang", "modelopt", "vllm", "speculators"}),
    ("eagle3", {"num_key_value_heads": 1}, "llama", True, set(FORMATS)),
    ("eagle3", {"hidden_act": "gelu_pytorch_tanh"}, "llama", True, {"eagle", "specforge", "speculators"}),
    ("eagle3", {"rms_norm_eps": 0.1}, "llama", True, set(FORMATS)),
    ("eagle3", {"attention_bias": True}, "llama", True, {"vllm", "speculators"}),
    ("eagle3", {"output_bias": True}, "llama", True, {"vllm", "speculators"}),
    ("eagle3", {"mlp_bias": True, "attention_bias": True, "output_bias": True}, "llama", True, {"vllm", "speculators"}),
    ("eagle3", {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, "llama", True, set(FORMATS)),
    ("eagle3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}}, "llama", True,
     set(FORMATS)),
    ("eagle3", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 77.0, "low_freq_factor": 1.0,
     "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}, "llama", True, set(FORMATS) - {"eagle"}),
    ("eagle3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "llama", True, set()),
    ("eagle3", {}, "qwen2", True, {"vllm", "speculators"}),
    ("eagle3", {}, "qwen3", True, {"vllm", "speculators"}),
    ("eagle3", {"hidden_act": "silu"}, "gemma", True, {"vllm", "speculators"}),
    ("eagle3", {"hidden_act": "silu", "head_dim": 8}, "gemma", True, {"eagle", "vllm", "speculators"}),
    ("eagle1", {}, "llama", False, {"eagle", "sglang"}),
    ("eagle1", {}, "llama", True, set()),
    ("eagle1", {"fc_bias": False}, "llama", False, {"eagle", "vllm", "sglang"}),
    ("eagle1", {"fc_bias": False, "head_layers": 3}, "llama", False, {"eagle", "vllm"}),
    ("eagle1", {"fc_bias": False, "head_dim": 16}, "llama", False, {"vllm", "sglang"}),
    ("eagle1", {"fc_bias": False, "output_bias": True}, "llama", False, {"vllm", "sglang"}),
    ("eagle1", {"fc_bias": False, "mlp_bias": True}, "llama", False, {"vllm"}),
    ("eagle1", {"fc_bias": False, "qk_norm": "head"}, "llama", False, set()),
    ("eagle1", {"fc_bias": False, "hidden_act": "gelu"}, "llama", False, {"eagle"}),
    ("eagle1", {"fc_bias": False}, "qwen2", False, {"eagle", "vllm", "sglang"}),
    ("eagle1", {"fc_bias": False, "hidden_act": "silu", "head_dim": 8}, "gemma", False, {"eagle", "vllm"}),
    ("medusa", {}, "llama", False, {"medusa", "medusa-v2", "medusa-2", "tensorrt-llm", "vllm"}),
    ("medusa", {}, "llama", True, set()),
    ("medusa", {"num_heads": 2, "num_blocks": 3}, "qwen3", False, set(FORMATS)),
    ("medusa", {"num_heads": 5, "projection": "own"}, "llama", False, set(FORMATS) - {"medusa-v2"}),
    ("medusa", {"num_heads": 2, "num_blocks": 2, "projection": "own"}, "llama", True, set()),
    ("hydra", {}, "llama", False, {"hydra"}),
    ("hydra", {}, "llama", True, set()),
    ("hydra", {"num_heads": 2, "num_blocks": 3, "projection": "own"}, "llama", False, {"hydra"}),
    ("hydra", {"projection": "own", "projection_bias": True, "head_arch": "prefix-mlp"}, "qwen3", False, {"hydra"}),
    ("hydra", {"head_arch": "prefix-mlp", "num_blocks": 2}, "qwen2", False, {"hydra"}),
    ("hydra", {"head_arch": "prefix-mlp", "rms_norm_eps": 0.1}, "llama", False, set()),
]  # fmt: skip

OWN = "headstart"
READ_ONLY = {"mlp_speculator": "accelerator"}  # formats that are read and not written


def formats_of(method: str) -> list[str]:
    """The formats of a method, the own one first."""
    return [OWN, *(name for name, writers in FORMATS.items() if method in writers)]


def pairs() -> list[tuple[str, str, str]]:
    """Method, from, to: all ways between two formats of one method, but the one between the own and itself."""
    found = []
    for method in METHODS:
        sources = [*formats_of(method), *([READ_ONLY[method]] if method in READ_ONLY else [])]
        found += [(method, one, other) for one in sources for other in formats_of(method) if other != OWN]
    return found


Passed = Callable[[str], bool]
"""Whether a test of this name passed."""


def pair_table(passed: Passed = lambda test: True) -> str:
    """From each format (a row) to each other; what no test showed is said to be that."""
    columns = [OWN, *FORMATS]
    lines = [["from", *columns], ["---"] * (len(columns) + 1)]
    for method in METHODS:
        for source in [*formats_of(method), *([READ_ONLY[method]] if method in READ_ONLY else [])]:
            cells = [_pair(method, source, to, passed) for to in columns]
            lines.append([f"{method}: {source}", *cells])
    return _lines(lines)


def _pair(method: str, source: str, to: str, passed: Passed) -> str:
    able = formats_of(method)
    if to not in able:
        return "impossible" if passed(f"test_a_format_without_such_heads_says_so[{method}]") else "not shown"
    if to != OWN:
        test = f"test_from_every_format_to_every_other[{method}-{source}-{to}]"
    elif source in READ_ONLY.values():
        test = "test_mlp_speculator[False-False]"
    elif source == OWN:
        test = f"test_round_trip_is_exact[full-llama-{method}]"
    else:  # what is read there becomes one of ours on the way
        test = f"test_from_every_format_to_every_other[{method}-{source}-{able[1]}]"
    return "exact" if passed(test) else "not shown"


def case_table(method: str, passed: Passed = lambda test: True) -> str:
    """What of a head each format can say."""
    columns = formats_of(method)[1:]
    lines = [["head", *columns], ["---"] * (len(columns) + 1)]
    for number, (one, fields, family, small, able) in enumerate(CASES):
        if one == method:
            tests = [
                f"test_the_way_out_and_back_is_exact_or_refused[{number}-{method}-{family}-{to}]" for to in columns
            ]
            said = ["exact" if name in able else "refused" for name in columns]
            cells = [words if passed(test) else "not shown" for words, test in zip(said, tests, strict=True)]
            lines.append([_named(fields, family, small, method), *cells])
    return _lines(lines)


def _named(fields: dict[str, Any], family: str, small: bool, method: str) -> str:
    shown = {
        key: f"{value['rope_type']}{', part of a head' if 'partial_rotary_factor' in value else ''}"
        if isinstance(value, dict)
        else list(value)
        if isinstance(value, tuple)
        else str(value).lower()
        if isinstance(value, bool)
        else value
        for key, value in fields.items()
    }
    said = ", ".join(f"`{key}: {value}`" for key, value in shown.items()) or "as the method makes it"
    said += f", on {family}" if family != "llama" else ""
    return (
        said
        + (", draft vocabulary" if small and method != "eagle3" else "")
        + (", full vocabulary" if not small and method == "eagle3" else "")
    )


def _lines(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
