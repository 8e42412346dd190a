"""Every chat template of the collection, with its verdict on five kinds of chats.

The verdicts are ours; each is proved here by rendering with transformers alone: supervised runs stand behind exactly
what a server would send, masks of templates with generation marks are those that transformers makes of the marks, and
a refusal is right only where the template raises, or where no text of the chat starts as a server would send it.

    m   all replies in one row
    s   all replies, in more than one row
    p   some replies; the others cannot be had as a server would have them, and are told
    x   refused: no reply can be had as a server would have it
    r   refused: the template raises

The five letters stand for: one turn; two; two behind a system message; two with reasoning; a tool call with its answer.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_masks import with_template
from transformers.utils import chat_template_utils

from headstart.data.masks import Made, Masked, Masker
from headstart.data.replies import Unmaskable
from headstart.heads import chat as chats

DATA = os.environ.get("HEADSTART_TEST_DATA")
FOLDER = Path(DATA or ".") / "chat_templates"
needs_data = pytest.mark.skipif(DATA is None, reason="needs HEADSTART_TEST_DATA, a folder of real files")

USER, REPLY = {"role": "user", "content": "hi there"}, {"role": "assistant", "content": "ab cd"}
MORE = [{"role": "user", "content": "yo man"}, {"role": "assistant", "content": "xy zz"}]
WEATHER = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "how it is outside",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CHATS: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([USER, REPLY], []),
    ([USER, REPLY, *MORE], []),
    ([{"role": "system", "content": "be good"}, USER, REPLY, *MORE], []),
    ([USER, {**REPLY, "reasoning_content": "hmm one"}, MORE[0], {**MORE[1], "reasoning_content": "hmm two"}], []),
    (
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", **WEATHER}]},
            {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "sunny"},
            MORE[1],
        ],
        [TOOL],
    ),
]

VERDICTS = {
    "mmmmm": """
axolotl/alpaca.jinja
axolotl/command_a.jinja
axolotl/deepseek_v2.jinja
axolotl/exaone.jinja
axolotl/exaone4.jinja
axolotl/llama3.jinja
axolotl/llama3_2_vision.jinja
axolotl/llava.jinja
axolotl/phi_3.jinja
axolotl/phi_4.jinja
chat_templates/granite-3.0-instruct.jinja
chat_templates/qwen2.5-instruct.jinja
examples/CISCai/Mistral-7B-Instruct-v0.3-SOTA-GGUF
examples/CohereLabs/command-a-reasoning-08-2025
examples/HuggingFaceH4/zephyr-7b-beta (add_generation_prompt=true)
examples/HuggingFaceH4/zephyr-7b-gemma-v0.1
examples/HuggingFaceTB/SmolLM3-3B
examples/LiquidAI/LFM2.5-VL-450M
examples/Qwen/Qwen1.5-72B-Chat
examples/Qwen/Qwen2.5-7B-Instruct
examples/Qwen/Qwen2.5-VL-7B-Instruct
examples/_base
examples/abacusai/Smaug-34B-v0.1
examples/ai21labs/AI21-Jamba-Large-1.6
examples/bloom
examples/cognitivecomputations/dolphin-2.5-mixtral-8x7b
examples/deepseek-ai/DeepSeek-R1
examples/deepseek-ai/deepseek-llm-7b-chat
examples/gpt_neox
examples/internlm/internlm2-chat-7b
examples/meetkai/functionary-medium-v2.2
examples/meta-llama/Llama-3.1-8B-Instruct
examples/meta-llama/Llama-3.2-11B-Vision-Instruct
examples/whisper
llama_cpp/ByteDance-Seed-OSS.jinja
llama_cpp/GigaChat3-10B-A1.8B.jinja
llama_cpp/GigaChat3.1-10B-A1.8B.jinja
llama_cpp/LFM2-8B-A1B.jinja
llama_cpp/LFM2.5-8B-A1B.jinja
llama_cpp/MiMo-VL.jinja
llama_cpp/MiniMax-M1.jinja
llama_cpp/MiniMax-M3.jinja
llama_cpp/Mistral-Small-3.2-24B-Instruct-2506.jinja
llama_cpp/Qwen-Qwen2.5-7B-Instruct.jinja
llama_cpp/Qwen3-Coder.jinja
llama_cpp/deepseek-ai-DeepSeek-V3.1.jinja
llama_cpp/deepseek-ai-DeepSeek-V4-Flash-0731.jinja
llama_cpp/deepseek-ai-DeepSeek-V4.jinja
llama_cpp/ibm-granite-granite-3.3-2B-Instruct.jinja
llama_cpp/ibm-granite-granite-4.0.jinja
llama_cpp/inclusionai-ling-3.0-flash.jinja
llama_cpp/meetkai-functionary-medium-v3.1.jinja
llama_cpp/meetkai-functionary-medium-v3.2.jinja
llama_cpp/meta-llama-Llama-3.2-3B-Instruct.jinja
llama_cpp/meta-llama-Llama-3.3-70B-Instruct.jinja
llama_cpp/mistralai-Ministral-3-14B-Reasoning-2512.jinja
llama_cpp/muse-glimmer.jinja
llama_cpp/poolside-Laguna-S-2.1.jinja
llama_cpp/poolside-Laguna-XS-2.1.jinja
trl/deepseekv3_training.jinja
trl/gptoss_training.jinja
trl/idefics3_training.jinja
trl/lfm2.jinja
trl/lfm2_training.jinja
trl/llama3.jinja
trl/llama3_2.jinja
trl/llama3_training.jinja
trl/nemotron_3_super_training.jinja
trl/nemotron_3_ultra_training.jinja
trl/phi3.jinja
trl/phi3_5_training.jinja
trl/phi3_training.jinja
trl/qwen2_5_training.jinja
trl/qwen2_5_vl.jinja
trl/qwen3_5_think_training.jinja
trl/qwen3_6_training.jinja
trl/qwen3_instruct_2507.jinja
trl/qwen3_training.jinja
trl/qwen3_vl.jinja
vllm/template_chatml.jinja
vllm/template_falcon.jinja
vllm/template_falcon_180b.jinja
vllm/tool_chat_template_granite.jinja
vllm/tool_chat_template_internlm2_tool.jinja
vllm/tool_chat_template_llama3.2_json.jinja
vllm/tool_chat_template_llama3.2_pythonic.jinja
vllm/tool_chat_template_llama4_pythonic.jinja
vllm/tool_chat_template_phi4_mini.jinja
vllm_default/template_blip2.jinja
""",
    "mmmmr": """
axolotl/aya.jinja
axolotl/cohere.jinja
axolotl/gemma3.jinja
axolotl/nemotron_h.jinja
examples/llama
llama_cpp/Kimi-K2-Instruct.jinja
llama_cpp/Kimi-K2-Thinking.jinja
trl/cohere.jinja
trl/cohere2_training.jinja
trl/cohere_training.jinja
trl/gemma3.jinja
trl/llava_next_training.jinja
""",
    "xxxxr": """
chat_templates/alpaca.jinja
chat_templates/amberchat.jinja
chat_templates/chatqa.jinja
chat_templates/falcon-instruct.jinja
chat_templates/openchat-3.5.jinja
chat_templates/phi-3.jinja
chat_templates/solar-instruct.jinja
chat_templates/vicuna.jinja
examples/codellama/CodeLlama-70b-Instruct-hf
llama_cpp/llama-cpp-deepseek-r1.jinja
""",
    "mmmmp": """
examples/maywell/Synatra-Mixtral-8x7B
examples/upstage/SOLAR-10.7B-Instruct-v1.0
llama_cpp/Apertus-8B-Instruct.jinja
vllm/template_baichuan.jinja
vllm/template_chatglm2.jinja
vllm/template_teleflm.jinja
vllm/tool_chat_template_hermes.jinja
vllm_default/template_basic.jinja
vllm_default/template_fuyu.jinja
""",
    "mssss": """
axolotl/metharme.jinja
examples/Qwen/Qwen3.5-4B
llama_cpp/Qwen3.5-4B.jinja
llama_cpp/StepFun3.5-Flash.jinja
trl/qwen3.jinja
trl/qwen3_5_think.jinja
""",
    "mmrmr": """
axolotl/gemma.jinja
examples/mistralai/Mixtral-8x7B-Instruct-v0.1
llama_cpp/google-gemma-2-2b-it.jinja
trl/gemma.jinja
trl/gemma_training.jinja
""",
    "xxxxp": """
axolotl/gemma4.jinja
axolotl/gemma4_unified.jinja
llama_cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja
llama_cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja
vllm/template_alpaca.jinja
""",
    "xxxxx": """
examples/blenderbot
llama_cpp/Apriel-1.6-15b-Thinker-fixed.jinja
llama_cpp/Qwen-QwQ-32B.jinja
llama_cpp/google-gemma-4-31B-it-interleaved.jinja
vllm/tool_chat_template_deepseekv3.jinja
""",
    "mmmsm": """
llama_cpp/GLM-4.6.jinja
llama_cpp/upstage-Solar-Open-100B.jinja
trl/diffusion_gemma.jinja
trl/glm4moe.jinja
""",
    "mmxmm": """
axolotl/mistral_v2v3.jinja
axolotl/mistral_v3_tekken.jinja
llama_cpp/mistralai-Mistral-Nemo-Instruct-2407.jinja
vllm/tool_chat_template_mistral.jinja
""",
    "rrrrr": """
examples/CohereForAI/c4ai-command-r-v01
examples/CohereForAI/c4ai-command-r-v01 (JSON Schema)
examples/fireworks-ai/firefunction-v1
vllm/template_vlm2vec.jinja
""",
    "mmmms": """
axolotl/command_a_tool_use.jinja
examples/CohereLabs/c4ai-command-a-03-2025
examples/TheBloke/deepseek-coder-33B-instruct-AWQ
llama_cpp/unsloth-Apriel-1.5.jinja
""",
    "msssm": """
examples/zai-org/GLM-5.1
llama_cpp/openai-gpt-oss-120b.jinja
trl/gptoss.jinja
""",
    "msssr": """
chat_templates/llama-2-chat.jinja
chat_templates/mistral-instruct.jinja
vllm_default/template_deepseek_vl2.jinja
""",
    "mssxs": """
axolotl/qwen3.jinja
axolotl/qwen3_5.jinja
""",
    "xxxmx": """
llama_cpp/Cohere2MoE.jinja
llama_cpp/Spark2.5.jinja
""",
    "xxxsx": """
trl/nemotron_3_nano.jinja
trl/nemotron_3_super.jinja
""",
    "msssp": """
llama_cpp/NVIDIA-Nemotron-Nano-v2.jinja
""",
    "mmmps": """
llama_cpp/tencent-Hy3.jinja
""",
    "mmxmp": """
vllm/tool_chat_template_mistral_parallel.jinja
""",
    "mmxmr": """
axolotl/pixtral.jinja
""",
    "mssxm": """
trl/qwen3_5_nothink.jinja
""",
    "rrrrm": """
examples/NousResearch/Hermes-2-Pro-Llama-3-8B (JSON Schema)
""",
    "rrrrp": """
llama_cpp/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja
""",
}


def templates() -> dict[str, str]:
    """All of them, those of the rendered examples under `examples/`."""
    found = {str(path.relative_to(FOLDER)): path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.jinja")}
    return found | {f"examples/{row['model']}": row["chat_template"] for row in examples()}


def examples() -> list[dict[str, Any]]:
    lines = (FOLDER / "rendered_examples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def listed() -> dict[str, str]:
    return {name: verdict for verdict, names in VERDICTS.items() for name in names.split("\n") if name}


# --- a reference that knows transformers alone -----------------------------------------------------------------------


class Reference:
    """Renders a chat with one template, in the form that the template takes."""

    def __init__(self, tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]]):
        self.tokenizer, self.tools = tokenizer, tools or None
        rendered = [(form, self.tried(form)) for form in self._forms(messages)]
        said = [
            str(message[name]) for message in messages for name in ("content", "reasoning_content") if name in message
        ]
        forms = [(sum(one in text for one in said), form) for form, text in rendered if text is not None]
        self.raises = not forms
        self.messages = max(forms, key=lambda pair: pair[0])[1] if forms else messages

    @staticmethod
    def _forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        """As they are; reasoning under other names; arguments as texts; content as parts."""
        yield messages
        yield [{key: value for key, value in one.items() if key != "content" or value} for one in messages]
        for name in ("reasoning", "thinking", "thought"):
            if any("reasoning_content" in message for message in messages):
                yield [
                    {name if key == "reasoning_content" else key: value for key, value in message.items()}
                    for message in messages
                ]
        called = json.loads(json.dumps(messages))
        for message in called:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        yield called
        yield [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tools=self.tools, tokenize=False, **options))

    def tried(self, messages: list[dict[str, Any]], **options: Any) -> str | None:
        try:
            return self.render(messages, **options)
        except Exception:
            return None

    def prompt(self, k: int) -> str | None:
        """What a server would send for reply `k`."""
        return self.tried(self.messages[:k], add_generation_prompt=True)

    def texts(self, k: int) -> list[str]:
        """All texts that hold reply `k`, the shortest first."""
        texts = [self.tried(self.messages[:stop]) for stop in range(k + 1, len(self.messages) + 1)]
        return [text for text in texts if text is not None]

    def can(self, k: int) -> bool:
        """Whether some text of the chat starts as a server would send it before reply `k`, and goes on with its words;
        without words, whether anything is written of it."""
        prompt, said = self.prompt(k), content(self.messages[k])
        if prompt is None:
            return False
        texts = self.texts(k) if said else self.texts(k)[:1]
        rests = [text[len(prompt) :] for text in texts if text.startswith(prompt)]
        return any(rest.strip() and said in rest for rest in rests)


def content(message: dict[str, Any]) -> str:
    """The text of a message in any form."""
    found = message.get("content", "")
    return found if isinstance(found, str) else "".join(part["text"] for part in found)


def runs(tokenizer: Any, row: Masked, prompts: list[list[int]]) -> Iterator[tuple[list[int], str]]:
    """(ids before it, its text) of each supervised run; one ends where a server would send a prompt."""
    starts = {len(prompt) for prompt in prompts if row.ids[: len(prompt)] == prompt}
    of = [sum(start <= place for start in starts) for place in range(len(row.ids))]
    place = 0
    for (supervised, _), run in itertools.groupby(zip(row.mask, of, strict=True)):
        length = len(list(run))
        if supervised:
            yield row.ids[:place], tokenizer.decode(row.ids[place : place + length])
        place += length


def proved(reference: Reference, rows: list[Masked], replies: list[int]) -> list[int]:
    """The replies that the rows supervise; each run has to be one, behind exactly what a server would send."""
    tokenizer, found = reference.tokenizer, []
    prompts = {k: reference.prompt(k) for k in replies}
    sent = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts.values() if prompt]
    for row in rows:
        for before, text in runs(tokenizer, row, sent):
            k = next(k for k in replies if prompts[k] is not None and tokenizer.decode(before) == prompts[k])
            assert before == tokenizer(prompts[k], add_special_tokens=False)["input_ids"]
            assert content(reference.messages[k]) in text
            whole = f"{prompts[k]}{text}"
            assert any(one.startswith(whole) or whole.startswith(one) for one in reference.texts(k)), text
            found.append(k)
    assert len(set(found)) == len(found)
    return found


def made_or_refused(tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Made | Unmaskable:
    try:
        return Masker(tokenizer)(messages, tools)
    except Unmaskable as fault:
        return fault


def verdict(template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """The verdict on a chat, proved."""
    tokenizer = with_template(template)
    reference = Reference(tokenizer, messages, tools)
    replies = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    marks = chats.MARK.search(template) is not None
    made = made_or_refused(tokenizer, messages, tools)
    if isinstance(made, Unmaskable):
        assert reference.raises == (made.reason == "the template refuses it"), made
        assert reference.raises or not marks, made
        assert reference.raises or not any(reference.can(k) for k in replies), f"could be had: {made}"
        return "r" if reference.raises else "x"
    if marks:
        truth = tokenizer.apply_chat_template(
            reference.messages, tools=tools or None, return_dict=True, return_assistant_tokens_mask=True
        )
        (row,) = made.rows
        assert row.ids == truth["input_ids"]
        assert list(row.mask) == truth["assistant_masks"]
        return "m"
    found = proved(reference, made.rows, replies)
    assert len(found) + len(made.lost) == len(replies)
    assert not any(reference.can(k) for k in replies if k not in found)
    return "p" if made.lost else "m" if len(made.rows) == 1 else "s"


@needs_data
def test_every_template_is_listed() -> None:
    assert set(listed()) == set(templates())


@pytest.mark.parametrize("name", listed())
@needs_data
def test_verdict(name: str) -> None:
    template = templates()[name]
    assert "".join(verdict(template, *chat) for chat in CHATS) == listed()[name]


@pytest.mark.parametrize("number", range(36))
@needs_data
def test_rendered_examples(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is rendered to the letter, at the date when the examples were made."""
    row = examples()[number]
    monkeypatch.setattr(chat_template_utils, "datetime", Frozen)
    data = dict(row["data"])
    messages, tools = data.pop("messages"), data.pop("tools", None)
    asked = data.pop("add_generation_prompt", False)
    tokenizer = copy.deepcopy(with_template(""))
    tokenizer.bos_token, tokenizer.eos_token = data.pop("bos_token", None), data.pop("eos_token", None)
    # what render does not hand on stands in front of the template
    front = "".join(f"{{%- set {name} = {json.dumps(value)} -%}}" for name, value in data.items())
    tokenizer.chat_template = front + row["chat_template"]
    try:
        text = chats.render(tokenizer, messages, tools=tools, add_generation_prompt=asked)
    except chats.Refusal:
        text = "refused"
    assert (text == row["expected"]) == (row["model"] not in OTHERWISE)


OTHERWISE = {
    "meetkai/functionary-medium-v2.2": "a content of null, which transformers takes away",
    "ai21labs/AI21-Jamba-Large-1.6": "asks whether the opening of a reply is defined, which transformers always does",
}


class Frozen(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Frozen:
        return cls(2025, 7, 10, 12, tzinfo=tz)
