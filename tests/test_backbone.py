"""The backbone: hidden states, logits and trees as the model itself has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import zoo
from headstart.errors import UserError
from headstart.heads.backbone import Backbone
from headstart.heads.load import load_backbone
from headstart.heads.mask import Reach, attention_mask, causal, positions

FAMILIES = list(zoo.FAMILIES)


def ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, zoo.VOCAB, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_features_are_the_models_own(family: str, attention: str) -> None:
    backbone = zoo.backbone(family, attention=attention)
    text = ids(20)
    expected = backbone.model(input_ids=text, output_hidden_states=True)
    features = backbone.forward(text, taps=(0, 2, 3))
    torch.testing.assert_close(backbone.logits(features.last), expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(features.taps, torch.cat([expected.hidden_states[k] for k in (0, 2, 3)], -1))
    torch.testing.assert_close(backbone.embed(text), expected.hidden_states[0])


@torch.no_grad()
def test_the_last_hidden_state_is_tapped_before_the_norm() -> None:
    backbone = zoo.backbone()
    features = backbone.forward(ids(5), taps=(4,))
    torch.testing.assert_close(backbone.norm(features.taps), features.last)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_tree_nodes_see_their_ancestors_only(family: str) -> None:
    """Each node of a tree behind a cached text has the logits of the plain text that leads to it."""
    backbone, text = zoo.backbone(family), ids(13)
    parents = [-1, 0, 0, 1, 3, 2]
    nodes = ids(6, seed=1)
    ancestors = torch.zeros(6, 6, dtype=torch.bool)
    for node, parent in enumerate(parents):
        ancestors[node, node] = True
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    cache = backbone.new_cache(capacity=8)
    backbone.forward(text, cache=cache)
    cache.commit_all()
    found = backbone.logits(backbone.forward(nodes, cache=cache, ancestors=ancestors).last)[0]
    for node in range(6):
        path = nodes[:, ancestors[node]]
        whole = torch.cat([text, path], 1)
        expected = backbone.model(input_ids=whole).logits[0, -1]
        torch.testing.assert_close(found[node], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_cache_after_commit_equals_a_fresh_prefill(family: str) -> None:
    backbone, text = zoo.backbone(family), ids(11)
    cache = backbone.new_cache()
    backbone.forward(text, cache=cache)
    cache.commit_all()
    nodes = ids(5, seed=2)
    ancestors = torch.eye(5, dtype=torch.bool)
    ancestors[:, 0] = True
    ancestors[4, 2] = True  # 0 -> {1, 2 -> 4, 3}
    backbone.forward(nodes, cache=cache, ancestors=ancestors)
    cache.commit([[0, 2, 4]])
    fresh = backbone.new_cache()
    backbone.forward(torch.cat([text, nodes[:, [0, 2, 4]]], 1), cache=fresh)
    fresh.commit_all()
    assert cache.lengths == fresh.lengths == [14]
    for found, expected in zip(cache.keys + cache.values, fresh.keys + fresh.values, strict=True):
        torch.testing.assert_close(found[:, :, :14], expected[:, :, :14], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_ragged_rows_equal_single_rows(family: str) -> None:
    backbone = zoo.backbone(family)
    texts = [ids(n, seed=n)[0] for n in (3, 9, 14)]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    cache = backbone.new_cache(rows=3)
    prefill = backbone.forward(padded, cache=cache)
    cache.commit([list(range(len(text))) for text in texts])
    more = backbone.forward(ids(12, seed=5).reshape(3, 4), cache=cache)
    for row, text in enumerate(texts):
        expected = backbone.forward(text[None]).last[0]
        torch.testing.assert_close(prefill.last[row, : len(text)], expected, rtol=1e-4, atol=1e-4)
        whole = torch.cat([text, ids(12, seed=5).reshape(3, 4)[row]])
        torch.testing.assert_close(more.last[row], backbone.forward(whole[None]).last[0, -4:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("gone", [[], [0], [3], [1, 2], [0, 3], [2, 0, 1], [0, 1, 2, 3]])
@torch.no_grad()
def test_rows_leave_and_the_others_stay_right(gone: list[int]) -> None:
    backbone, text = zoo.backbone(), ids(16).reshape(4, 4)
    cache = backbone.new_cache(rows=4)
    backbone.forward(text, cache=cache)
    cache.commit([[0, 1], [0, 1, 2], [0, 1, 2, 3], [0]])
    order = cache.drop(gone)
    assert sorted(order) == [row for row in range(4) if row not in gone]
    assert cache.lengths == [[2, 3, 4, 1][row] for row in order]
    if not order:
        return
    next_ids = ids(4, seed=3)[0, order, None]
    found = backbone.forward(next_ids, cache=cache).last
    for place, row in enumerate(order):
        whole = torch.cat([text[row, : [2, 3, 4, 1][row]], next_ids[place]])
        torch.testing.assert_close(found[place, 0], backbone.forward(whole[None]).last[0, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reach", [Reach(), Reach(window=3), Reach(chunk=3)], ids=["all", "window", "chunk"])
def test_mask_equals_its_definition(reach: Reach) -> None:
    """Against the plain definition, for ragged rows and a tree whose last level is the query."""
    lengths = [2, 5]
    ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
    queries = ancestors[2:]
    mask = attention_mask(lengths, queries, torch.float32, reach=reach)
    where = positions(lengths, queries)
    depth = ancestors.sum(-1) - 1
    for row, length in enumerate(lengths):
        for query in range(2):
            for slot in range(max(lengths) + 4):
                pending = slot - length
                seen = slot < length or (pending < 4 and bool(queries[query, pending]))
                position = slot if slot < length else length + int(depth[pending]) if pending < 4 else 0
                if reach.window is not None:
                    seen = seen and int(where[row, query]) - position < reach.window
                if reach.chunk is not None:
                    seen = seen and int(where[row, query]) // reach.chunk == position // reach.chunk
                assert (mask[row, 0, query, slot] == 0) == seen


def test_causal_positions_count_up() -> None:
    assert positions([4, 0], causal(3)).tolist() == [[4, 5, 6], [0, 1, 2]]


@torch.no_grad()
def test_capacity_grows_and_keeps_what_is_there() -> None:
    backbone, text = zoo.backbone(), ids(40)
    cache = backbone.new_cache(capacity=4)
    for token in text[0]:
        last = backbone.forward(token.reshape(1, 1), cache=cache).last
        cache.commit_all()
    torch.testing.assert_close(last[0, -1], backbone.forward(text).last[0, -1], rtol=1e-4, atol=1e-4)


def test_fingerprint_knows_the_weights_and_not_the_dtype() -> None:
    backbone = zoo.backbone()
    before = backbone.fingerprint()
    assert Backbone(zoo.model().to(torch.bfloat16)).fingerprint() == before
    assert zoo.backbone(seed=1).fingerprint() != before


def test_encode_takes_texts_chats_and_ids() -> None:
    backbone = zoo.backbone()
    text = backbone.encode("red sun")
    assert text == backbone.encode([{"role": "user", "content": "red sun"}])
    assert backbone.encode(text) == backbone.encode(torch.tensor([text])) == text
    assert backbone.tokenizer.decode(text).endswith("<|im_start|>assistant\n")
    with pytest.raises(UserError, match="outside the vocabulary of 96"):
        backbone.encode([3, 96])
    with pytest.raises(UserError, match="empty"):
        backbone.encode([])
    with pytest.raises(UserError, match="tokenizer"):
        Backbone(zoo.model()).encode("red")


def test_a_tokenizer_without_template_is_named() -> None:
    import copy

    bare = copy.deepcopy(zoo.tokenizer())
    bare.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        Backbone(zoo.model(), bare).encode("red")


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(UserError, match="no such folder"):
        load_backbone("./nowhere")


def test_a_folder_loads(tmp_path) -> None:
    zoo.model().save_pretrained(tmp_path)
    zoo.tokenizer().save_pretrained(tmp_path)
    backbone = load_backbone(str(tmp_path), dtype="bfloat16")
    assert backbone.dtype == torch.bfloat16
    assert backbone.encode("red sun") == zoo.backbone().encode("red sun")


def test_layers_with_a_state_are_refused_by_name() -> None:
    tiny = zoo.model("qwen3")
    tiny.config.layer_types = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    with pytest.raises(UserError, match="linear_attention"):
        Backbone(tiny)


def test_logits_that_are_no_projection_are_refused() -> None:
    tiny = zoo.model()
    plain = tiny.lm_head.forward
    backbone = Backbone(tiny)
    tiny.forward = lambda **kw: type("Out", (), {"logits": 2 * plain(torch.ones(1, 3, 32))})()
    with pytest.raises(UserError, match="not the output projection"):
        backbone.logits(torch.zeros(1, 1, 32))


@pytest.mark.parametrize(
    ("prefix", "fields"),
    [
        ("Bloom", {"n_head": 2}),
        ("Mpt", {"d_model": 32, "n_heads": 2, "n_layers": 2}),
        ("Falcon", {"alibi": True, "num_attention_heads": 2, "new_decoder_architecture": False}),
        ("GPTNeo", {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 2}),
    ],
)
def test_positions_by_slot_are_refused_by_name(prefix: str, fields: dict[str, Any]) -> None:
    config = getattr(transformers, f"{prefix}Config")(vocab_size=96, hidden_size=32, **fields)
    config._attn_implementation = "eager"
    with pytest.raises(UserError, match="reads no position ids"):
        Backbone(getattr(transformers, f"{prefix}ForCausalLM")(config))


def test_weights_that_are_cut_are_named(tmp_path) -> None:
    zoo.model().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(UserError, match="cannot be loaded as a causal LM"):
        load_backbone(str(tmp_path))


@pytest.mark.parametrize("device", ["gpu", "meta", "cpu:x"])
def test_a_device_that_is_not_there_is_named(device: str, tmp_path) -> None:
    with pytest.raises(UserError, match=f"device {device}: cannot be used here"):
        load_backbone(str(tmp_path), device=device)


def test_the_beginning_of_a_text_goes_in_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that knows what is causal, where all is seen; windows and eager attention take masks."""
    assert not zoo.backbone("mistral").unmasked
    assert not zoo.backbone(attention="eager").unmasked
    backbone, ids = zoo.backbone(), torch.arange(3, 23).view(2, 10)
    masked, bare = backbone.new_cache(2), backbone.new_cache(2)
    seen = torch.ones(10, 10, dtype=torch.bool).tril()
    with torch.no_grad():
        expected = backbone.forward(ids, cache=masked, ancestors=seen, taps=(1,))
        monkeypatch.setattr(backbone, "masks", lambda *given: pytest.fail("a mask was made"))
        found = backbone.forward(ids, cache=bare, taps=(1,))
    torch.testing.assert_close(found.last, expected.last)
    torch.testing.assert_close(found.taps, expected.taps)
    for ours, theirs in zip(bare.keys, masked.keys, strict=True):
        torch.testing.assert_close(ours[:, :, :10], theirs[:, :, :10])


def test_two_tensors_under_a_config_that_ties_them_stay_two(tmp_path: Path) -> None:
    """B065."""
    model = zoo.model(tie_word_embeddings=False)
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path, state_dict={name: one.clone() for name, one in model.state_dict().items()})
    zoo.tokenizer().save_pretrained(tmp_path)
    backbone = load_backbone(str(tmp_path))
    assert torch.equal(backbone.output_weight, model.lm_head.weight)
    assert not torch.equal(backbone.output_weight, model.get_input_embeddings().weight)
