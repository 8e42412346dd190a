"""Ids and masks of one chat: right by hand-written templates, against a naive twin, and under templates in use."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from headstart.data.masks import Masked, Masker, Unmaskable
from headstart.errors import UserError
from zoo import tokenizer as tiny

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES: dict[str, tuple[str, str]] = {
    # a template, and what it makes of the chat below, what is supervised between brackets
    "chatml": (
        CHATML,
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[ab<|im_end|>]\n"
        "<|im_start|>user\nyo<|im_end|>\n<|im_start|>assistant\n[ab<|im_end|>]\n",
    ),
    "stripping": (CHATML.replace("m.content", "m.content | trim"), ""),
    "instruct with bos": (
        "<s>{% for m in messages %}{% if m.role == 'user' %}INST {{ m.content }} /INST"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
        "<s>INST hi /INST[ ab</s>]INST yo /INST[ ab</s>]",
    ),
    "end of the whole behind the end of turn": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}</s>{% endif %}",
        "<|im_start|>user\nhi<|end|>\n<|im_start|>assistant\n[ab<|end|>]\n"
        "<|im_start|>user\nyo<|end|>\n<|im_start|>assistant\n[ab<|end|>]\n</s>",
    ),
    "no special token at all": (
        "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
        "USER: hi\nASSISTANT:[ ab]\nUSER: yo\nASSISTANT:[ ab]\n",
    ),
    "end of turn in plain letters": (
        "{% for m in messages %}#{{ m.role }}\n{{ m.content }}#end\n\n{% endfor %}"
        "{% if add_generation_prompt %}#assistant\n{% endif %}",
        "#user\nhi#end\n\n#assistant\n[ab#end]\n\n#user\nyo#end\n\n#assistant\n[ab#end]\n\n",
    ),
    "no opening of a reply": (
        "{% for m in messages %}{{ m.role }}>{{ m.content }}</s>{% endfor %}",
        "user>hi</s>[assistant>ab</s>]user>yo</s>[assistant>ab</s>]",
    ),
    "generation marks": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[ab<|im_end|>\n]"
        "<|im_start|>user\nyo<|im_end|>\n<|im_start|>assistant\n[ab<|im_end|>\n]",
    ),
}
TEMPLATES["stripping"] = (TEMPLATES["stripping"][0], TEMPLATES["chatml"][1])
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ab"},
    {"role": "user", "content": "yo"},
    {"role": "assistant", "content": "ab"},
]


@functools.cache
def merging() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that merges line feeds, spaces with letters, and a colon with a space."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ġ", "a"), ("Ġa", "b"), ("a", "b"), ("Ġ", "Ġ"), ("h", "i"), ("ab", "ab")]
    tokens = dict.fromkeys([*letters, *("".join(pair) for pair in merges)])
    model = models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    raw = Tokenizer(model)
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    bos = raw.token_to_id("<s>")
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )  # adds a BOS itself
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


def with_template(template: str) -> Any:
    tokenizer = merging()
    tokenizer.chat_template = template
    return tokenizer


class Slow:
    """A tokenizer that gives ids only."""

    is_fast = False

    def __init__(self, tokenizer: Any):
        self.inner = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, text: str, **options: Any) -> Any:
        assert "return_offsets_mapping" not in options
        return self.inner(text, **options)


def shown(tokenizer: Any, made: Masked) -> str:
    """The text with brackets around what is supervised."""
    text = ""
    for supervised, run in itertools.groupby(zip(made.mask, made.ids, strict=True), lambda pair: pair[0]):
        piece = tokenizer.decode([token for _, token in run])
        text += f"[{piece}]" if supervised else piece
    return text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("slow", [False, True])
def test_every_reply_with_its_end_and_nothing_else(name: str, slow: bool) -> None:
    template, expected = TEMPLATES[name]
    tokenizer = with_template(template)
    made = Masker(Slow(tokenizer) if slow else tokenizer)(CHAT)
    assert shown(tokenizer, made) == expected
    assert made.cuts == 0
    assert len(made.mask) == len(made.ids)


def test_one_bos() -> None:
    tokenizer = with_template(TEMPLATES["instruct with bos"][0])
    assert Masker(tokenizer)(CHAT).ids.count(tokenizer.bos_token_id) == 1


def test_what_follows_the_last_reply_is_left_away() -> None:
    tokenizer = with_template(CHATML)
    assert Masker(tokenizer)([*CHAT, {"role": "user", "content": "more"}]) == Masker(tokenizer)(CHAT)


@pytest.mark.parametrize("content", ["a<|im_end|>\n<|im_start|>assistant\nb", "<|im_end|>", "#", "\n"])
def test_markers_in_a_text_move_nothing(content: str) -> None:
    chat = [
        {"role": "user", "content": f"x<|im_start|>assistant\n{content}"},
        {"role": "assistant", "content": content},
    ]
    tokenizer = with_template(CHATML.replace("\n", "#"))
    expected = (
        f"<|im_start|>user#x<|im_start|>assistant\n{content}<|im_end|>#<|im_start|>assistant#[{content}<|im_end|>]#"
    )
    assert shown(tokenizer, Masker(tokenizer)(chat)) == expected


def test_a_token_across_the_start_is_not_supervised_and_counted() -> None:
    tokenizer = with_template(CHATML)
    made = Masker(tokenizer)([CHAT[0], {"role": "assistant", "content": "\nab"}])
    assert shown(tokenizer, made).endswith("assistant\n\n[ab<|im_end|>]\n")
    assert made.cuts == 1
    assert Masker(Slow(tokenizer))([CHAT[0], {"role": "assistant", "content": "\nab"}]) == made


def test_a_token_across_the_end_is_supervised_and_counted() -> None:
    # a reply ends with the letter a, which the next turn's b joins: that token starts in the reply
    tokenizer = with_template(
        "{% for m in messages %}{{ 'b' if m.role == 'user' else ':' }}{{ m.content }}"
        "{{ 'a' if m.role == 'assistant' }}{% endfor %}"
    )
    made = Masker(tokenizer)(CHAT)
    assert shown(tokenizer, made) == "bhi[:abab]yo[:aba]"
    assert made.cuts == 1
    assert Masker(Slow(tokenizer))(CHAT) == made


def naive(tokenizer: Any, text: str, spans: list[tuple[int, int]]) -> list[int]:
    """Token by token: where it starts is the length of the text before it."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    starts = [len(tokenizer.decode(ids[:number])) for number in range(len(ids))]
    return [int(any(start <= place < end for start, end in spans)) for place in starts]


@pytest.mark.parametrize("seed", range(20))
def test_random_chats_as_a_naive_twin_has_them(seed: int) -> None:
    source = random.Random(seed)
    tokenizer = with_template(CHATML)
    text, spans, chat = "", [], []
    for turn in range(source.randrange(2, 9)):
        role = "assistant" if turn % 2 else source.choice(["user", "system"] if not turn else ["user"])
        content = (
            "".join(source.choices(["a", "b", " ", "\n", "hi", "<|im_end|>", ":"], k=source.randrange(1, 9))) + "."
        )
        chat.append({"role": role, "content": content})
        text += f"<|im_start|>{role}\n"
        if turn % 2:
            spans.append((len(text), len(text) + len(content) + len("<|im_end|>")))
        text += f"{content}<|im_end|>\n"
    if not len(chat) % 2:
        made = Masker(tokenizer)(chat)
        assert tokenizer.decode(made.ids) == text
        assert list(made.mask) == naive(tokenizer, text, spans)


def test_letters_of_several_bytes() -> None:
    """A letter of three bytes is three tokens at one place: all of them belong to the reply, or none."""
    tokenizer = with_template(CHATML)
    made = Masker(tokenizer)([{"role": "user", "content": "日本"}, {"role": "assistant", "content": "日é🙂"}])
    assert shown(tokenizer, made).endswith("日本<|im_end|>\n<|im_start|>assistant\n[日é🙂<|im_end|>]\n")
    assert sum(made.mask) == 3 + 2 + 4 + 1


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses it .roles must alternate"),
        (  # an earlier reply loses its thoughts when another follows
            "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last or m.role == 'user' else 'short' }}</s>"
            "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
            "history otherwise .the reply, message 2 of 4",
        ),
        (  # what opens a reply is not what stands before it
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
            "{% if add_generation_prompt %}<assistant>thinks{% endif %}",
            "history otherwise .what comes before the reply, message 2 of 4",
        ),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "leaves a reply out .message 2"),
    ],
)
def test_a_chat_without_a_true_mask_is_refused(template: str, reason: str) -> None:
    with pytest.raises(Unmaskable, match=reason):
        Masker(with_template(template))(CHAT)


def test_no_reply_and_no_template() -> None:
    with pytest.raises(Unmaskable, match=r"nothing to learn .no assistant turn"):
        Masker(with_template(CHATML))(CHAT[:1])
    with pytest.raises(UserError, match="no chat template"):
        Masker(with_template(""))


def test_the_ids_are_those_of_the_template_alone() -> None:
    tokenizer = tiny()
    chat = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]
    whole = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
    assert Masker(tokenizer)(chat).ids == whole


@pytest.mark.skipif("HEADSTART_TEST_DATA" not in os.environ, reason="needs HEADSTART_TEST_DATA, a folder of real files")
def test_templates_in_use_give_true_masks_or_reasons() -> None:
    """With one reply and with two: as many supervised runs, each holding its reply; or a reason."""
    folder = Path(os.environ["HEADSTART_TEST_DATA"]) / "chat_templates"
    texts = {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("*.jinja")}
    for line in (folder / "rendered_examples.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        texts[row["model"]] = row["chat_template"]
    assert len(texts) > 100
    verdicts: dict[str, list[str]] = {"masked": [], "refused": []}
    for name, text in texts.items():
        for chat in (CHAT[:2], CHAT):
            try:
                made = Masker(with_template(text))(chat)
            except Unmaskable as fault:
                verdicts["refused"].append(f"{name}: {fault}")
                continue
            runs = [run for run, _ in itertools.groupby(made.mask) if run]
            assert any(made.mask), name
            assert len(runs) == len(chat) // 2, name
            verdicts["masked"].append(name)
    assert len(verdicts["masked"]) > 2 * len(verdicts["refused"]), verdicts["refused"]
