"""Ids and masks of one chat: right by hand-written templates, against a naive twin, and under templates in use."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from headstart.data.masks import Masked, Masker
from headstart.data.replies import Unmaskable
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


def only(masker: Masker, chat: Any, **options: Any) -> Masked:
    """The one row of a chat, all of whose turns are supervised."""
    made = masker(chat, **options)
    assert not made.lost
    (row,) = made.rows
    return row


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
    made = only(Masker(Slow(tokenizer) if slow else tokenizer), CHAT)
    assert shown(tokenizer, made) == expected
    assert made.cuts == 0
    assert len(made.mask) == len(made.ids)


def test_one_bos() -> None:
    tokenizer = with_template(TEMPLATES["instruct with bos"][0])
    assert only(Masker(tokenizer), CHAT).ids.count(tokenizer.bos_token_id) == 1


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
    assert shown(tokenizer, only(Masker(tokenizer), chat)) == expected


@pytest.mark.parametrize("slow", [False, True])
def test_a_start_inside_a_token_gets_a_row_tokenised_as_a_server_does(slow: bool) -> None:
    """The line feed of the opening and that of the reply are one token of the whole text."""
    tokenizer = with_template(CHATML)
    chat = [CHAT[0], {"role": "assistant", "content": "\nab"}, *CHAT[2:]]
    made = Masker(Slow(tokenizer) if slow else tokenizer)(chat)
    whole, apart = made.rows
    assert shown(tokenizer, whole).count("[") == 1
    assert shown(tokenizer, whole).endswith("[ab<|im_end|>]\n")
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"]
    assert apart.ids[: len(prompt)] == prompt
    assert shown(tokenizer, apart).endswith("<|im_start|>assistant\n[\nab<|im_end|>]\n")
    assert apart.mask.index(1) == len(prompt)
    assert whole.cuts == apart.cuts == 0


def test_a_start_inside_a_token_where_parts_cannot_be_put_together() -> None:
    """A tokenizer that starts every text with a space: the token across the start is left unsupervised, and counted."""
    tokenizer = copy.deepcopy(merging())
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    tokenizer.chat_template = CHATML.replace("<|im_start|>", "#").replace("<|im_end|>", "#")
    row = only(Masker(tokenizer), [CHAT[0], {"role": "assistant", "content": "\nab"}])
    assert shown(tokenizer, row).endswith("assistant\n\n[ab#]\n")
    assert row.cuts == 1


def test_a_token_across_the_end_is_supervised_and_counted() -> None:
    # a reply ends with the letter a, which the next turn's b joins: that token starts in the reply
    tokenizer = with_template(
        "{% for m in messages %}{{ 'b' if m.role == 'user' else ':' }}{{ m.content }}"
        "{{ 'a' if m.role == 'assistant' }}{% endfor %}"
    )
    made = only(Masker(tokenizer), CHAT)
    assert shown(tokenizer, made) == "bhi[:abab]yo[:aba]"
    assert made.cuts == 1
    assert only(Masker(Slow(tokenizer)), CHAT) == made


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
    if len(chat) % 2:
        return
    rows, found = Masker(tokenizer)(chat).rows, []
    for row in rows:
        assert text.startswith(tokenizer.decode(row.ids))
        first = row.mask.index(1)
        assert row.ids[:first] in prompts(tokenizer, chat)
        for supervised, run in itertools.groupby(zip(row.mask, row.ids, strict=True), lambda pair: pair[0]):
            found += [tokenizer.decode([token for _, token in run])] if supervised else []
    assert sorted(found) == sorted(text[start:stop] for start, stop in spans)
    if len(rows) == 1:
        assert list(rows[0].mask) == naive(tokenizer, text, spans)


def prompts(tokenizer: Any, chat: list[dict[str, str]]) -> list[list[int]]:
    """What a server would send before each reply."""
    replies = [k for k, message in enumerate(chat) if message["role"] == "assistant"]
    return [tokenizer.apply_chat_template(chat[:k], add_generation_prompt=True)["input_ids"] for k in replies]


def test_letters_of_several_bytes() -> None:
    """A letter of three bytes is three tokens at one place: all of them belong to the reply, or none."""
    tokenizer = with_template(CHATML)
    made = only(Masker(tokenizer), [{"role": "user", "content": "日本"}, {"role": "assistant", "content": "日é🙂"}])
    assert shown(tokenizer, made).endswith("日本<|im_end|>\n<|im_start|>assistant\n[日é🙂<|im_end|>]\n")
    assert sum(made.mask) == 3 + 2 + 4 + 1


HISTORY = (  # an earlier reply loses its thoughts when another follows
    "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last or m.role == 'user' else 'short' }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHANGING = (  # the end of turn of the last reply is another one, as in gpt-oss
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{{ '</s>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("template", [HISTORY, CHANGING])
def test_a_template_that_writes_history_otherwise_gets_a_row_for_each_turn(template: str) -> None:
    tokenizer = with_template(template)
    made = Masker(tokenizer)(CHAT)
    assert not made.lost
    history = "short</s>" if template == HISTORY else "ab<|end|>"
    user = "hi</s>" if template == HISTORY else "hi<|end|>"
    assert [shown(tokenizer, row) for row in made.rows] == [
        f"<user>{user}<assistant>[ab</s>]",
        f"<user>{user}<assistant>{history}<user>{user.replace('hi', 'yo')}<assistant>[ab</s>]",
    ]


def test_turns_that_no_row_can_hold_are_told() -> None:
    """The second reply is opened otherwise than written; the first one is still supervised."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% if messages|length > 2 %}thinks{% endif %}{% endif %}"
    )
    tokenizer = with_template(template)
    made = Masker(tokenizer)(CHAT)
    assert [shown(tokenizer, row) for row in made.rows] == ["<user>hi</s><assistant>[ab</s>]"]
    (fault,) = made.lost
    assert "server would open" in fault.reason
    assert "message 4 of 4: a server sends 'thinks' where the chat has 'ab</s>'" in fault.detail


@pytest.mark.parametrize("template", [CHATML, TEMPLATES["generation marks"][0], HISTORY])
def test_the_last_turn_alone(template: str) -> None:
    tokenizer = with_template(template)
    text = shown(tokenizer, only(Masker(tokenizer, last_turn=True), CHAT))
    assert text.count("[") == 1
    assert text.index("[") > text.index("yo")


@pytest.mark.parametrize("template", [CHATML, TEMPLATES["generation marks"][0]])
def test_turns_that_are_not_to_be_trained_on(template: str) -> None:
    tokenizer = with_template(template)
    text = shown(tokenizer, only(Masker(tokenizer), CHAT, muted=[3]))
    assert text.count("[") == 1
    assert "yo" not in text  # nothing behind the last supervised reply is needed
    text = shown(tokenizer, only(Masker(tokenizer), CHAT, muted=[1]))
    assert text.count("[") == 1
    assert text.index("[") > text.index("yo")
    with pytest.raises(Unmaskable, match=r"no reply .no assistant turn of weight 1"):
        Masker(tokenizer)(CHAT, muted=[1, 3])


def test_thinking_is_told_to_the_template() -> None:
    template = CHATML.replace(
        "{% endif %}", "{% if enable_thinking is defined %}{{ enable_thinking }}{{ thinking }}{% endif %}{% endif %}"
    ).replace("{{ m.content }}", "{{ 'TrueTrue' if thinking and m.role == 'assistant' }}{{ m.content }}")
    tokenizer = with_template(template)
    assert "TrueTrue[ab" in shown(tokenizer, only(Masker(tokenizer, thinking=True), CHAT[:2]))
    assert "TrueTrue" not in shown(tokenizer, only(Masker(tokenizer), CHAT[:2]))
    with pytest.raises(Unmaskable, match="a server sends 'FalseFalse'"):
        Masker(tokenizer, thinking=False)(CHAT[:2])


def test_what_a_template_leaves_out_is_counted() -> None:
    template = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    chat = [{"role": "system", "content": "s"}, CHAT[0], {**CHAT[1], "reasoning_content": "because"}, *CHAT[2:]]
    made = Masker(with_template(template))(chat)
    assert dict(made.notes) == {
        "system messages that the template leaves out": 1,
        "replies whose reasoning the template leaves out": 1,
    }
    trimmed = Masker(with_template(CHATML.replace("m.content", "m.content | upper")))([*CHAT[:1], CHAT[1]])
    assert not trimmed.notes


@pytest.mark.parametrize(("said", "expected"), [("", "[<|im_end|>]"), ("ab", "[ab<|im_end|>]")])
def test_a_call_that_a_template_leaves_out_is_learned_as_it_is_written(said: str, expected: str) -> None:
    """ChatML prints no calls: a server's next prompt has an empty reply there, and so has the row."""
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    chat = [CHAT[0], {"role": "assistant", "content": said, "tool_calls": [call]}]
    made = Masker(with_template(CHATML))([*chat, {"role": "tool", "content": "sun"}, CHAT[3]])
    (row,) = made.rows
    assert not made.lost
    assert f"assistant\n{expected}" in shown(with_template(CHATML), row)
    assert shown(with_template(CHATML), row).count("[") == 2
    assert made.notes["replies whose tool calls the template leaves out"] == 1
    strict = CHATML.replace("{{", "{{ raise_exception('no tools') if m.role == 'tool' }}{{", 1)
    made = Masker(with_template(strict))
    if said:  # a reply in words is used, also where the rest is refused
        assert len(made([*chat, {"role": "tool", "content": "sun"}, CHAT[3]]).lost) == 1
    else:
        with pytest.raises(Unmaskable, match="no tools"):
            made([*chat, {"role": "tool", "content": "sun"}, CHAT[3]])


def test_plain_text_is_supervised_as_a_whole() -> None:
    tokenizer = with_template(CHATML)
    row = Masker(tokenizer).plain("hi <|im_end|> ab")
    assert row.ids == tokenizer("hi <|im_end|> ab")["input_ids"]
    assert row.ids[0] == tokenizer.bos_token_id  # this tokenizer adds it
    assert list(row.mask) == [0] + [1] * (len(row.ids) - 1)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            "refuses it .roles must alternate; roles user, assistant, user, assistant",
        ),
        (  # what opens a reply is not what stands before it
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
            "{% if add_generation_prompt %}<assistant>thinks{% endif %}",
            "otherwise than a server would open it .message 2 of 4: a server sends 'thinks' where the chat has 'ab",
        ),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "leaves a reply out .message 2"),
        ("{{ 1 // 0 }}", "refuses it .integer division"),
        ("{% for m in messages %}{{ m.no.such }}{% endfor %}", "refuses it .'dict object' has no attribute 'no'"),
    ],
)
def test_a_chat_without_a_true_mask_is_refused(template: str, reason: str) -> None:
    with pytest.raises(Unmaskable, match=reason):
        Masker(with_template(template))(CHAT)


def test_no_reply_and_no_template() -> None:
    with pytest.raises(Unmaskable, match=r"no reply .no assistant turn"):
        Masker(with_template(CHATML))(CHAT[:1])
    with pytest.raises(UserError, match="no chat template"):
        Masker(with_template(""))


def test_the_ids_are_those_of_the_template_alone() -> None:
    tokenizer = tiny()
    chat = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]
    whole = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
    assert only(Masker(tokenizer), chat).ids == whole
