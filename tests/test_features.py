"""Cached features: those of a fresh forward, of nothing stale, whole or named, however the writing was disturbed."""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from safetensors import safe_open

import zoo
from headstart import cli
from headstart.data import answers, eight_bits
from headstart.data import capture as capturing
from headstart.data import regenerate as regenerating
from headstart.data.capture import batches_of, capture, size_of
from headstart.data.chats import read_chats
from headstart.data.feature_key import Reads, settings_of
from headstart.data.features import HEADER, FeatureCache, read_header
from headstart.data.regenerate import RegenerateSettings
from headstart.errors import UserError
from headstart.files import cache_folder, write_jsonl
from headstart.heads import chat
from headstart.heads.backbone import Backbone, Features
from headstart.heads.eagle3 import LOOKED_AT
from headstart.heads.forms import weights_hash
from headstart.heads.load import load_backbone
from headstart.heads.methods import TRAINABLE
from headstart.training import cached as caching
from headstart.training import setup as setting
from headstart.training.batches import Rows, anchors, collate
from headstart.training.loop import train
from headstart.training.setup import cache_features, set_up

SMOLLM2 = cache_folder() / "backbones" / "smollm2-135m"
TAPS = Reads((0, 2, 4), whole_last=False)
LENGTHS = (3, 40, 7, 18, 5, 31, 12, 9)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def in_small_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(caching, "GROUP_TOKENS", 300)
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))


def not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backbone fails where it is asked for the states of rows; a new head may look at how large they are."""
    plain = Backbone.forward

    def forward(backbone: Backbone, ids: torch.Tensor, **options: Any) -> Any:
        assert ids.shape == (1, LOOKED_AT), "asked the backbone"
        return plain(backbone, ids, **options)

    monkeypatch.setattr(Backbone, "forward", forward)


def texts(lengths: Any = LENGTHS, seed: int = 0) -> Rows:
    """Rows of random tokens, the second half of each supervised, and a bit in the middle of the long ones."""
    source = np.random.default_rng(seed)
    ids = [source.integers(3, zoo.VOCAB, length).tolist() for length in lengths]
    mask = [[int(at > n // 2 or (n > 20 and 3 < at < 8)) for at in range(n)] for n in lengths]
    return replace(Rows.from_lists(ids, mask).trimmed(1000), numbers=None)


def made(
    out: Path, backbone: Backbone, rows: Rows, reads: Reads = TAPS, group: int = 64, store: Any = "auto", **more: Any
) -> FeatureCache:
    settings = settings_of(
        backbone, weights_hash(backbone.model), rows, reads, store=store, max_length=1000, group_tokens=group
    )
    capture(backbone, rows, range(len(rows)), reads, settings, out, **more)
    return FeatureCache(out, settings, dtype=backbone.dtype)


def read(cache: FeatureCache, rows: Rows, order: list[int]) -> Features:
    return collate(cached(rows, cache), order).cached()


def cached(rows: Rows, cache: FeatureCache) -> Rows:
    rows.cache = cache
    return rows


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@torch.no_grad()
def stock(backbone: Backbone, rows: Rows, order: list[int], side: str, taps: Any) -> list[tuple[Any, Any]]:
    """Taps and last of each row by transformers alone, padded to a side."""
    chosen = [torch.from_numpy(rows[row][0].astype(np.int64)) for row in order]
    width = max(map(len, chosen))
    ids, mask = torch.full((len(order), width), 2), torch.zeros(len(order), width, dtype=torch.long)
    spans = [slice(width - len(one), width) if side == "left" else slice(0, len(one)) for one in chosen]
    for row, (span, one) in enumerate(zip(spans, chosen, strict=True)):
        ids[row, span], mask[row, span] = one, 1
    places = (mask.cumsum(1) - 1).clamp(min=0)
    found = backbone.model(input_ids=ids, attention_mask=mask, position_ids=places, output_hidden_states=True)
    states = found.hidden_states  # before any norm, but for the last one
    return [
        (torch.cat([states[k][row, span] for k in taps], -1), states[-1][row, span]) for row, span in enumerate(spans)
    ]


# --- what is in it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma", "mistral", "qwen3"])
@pytest.mark.parametrize("whole", [False, True], ids=["anchors", "whole"])
def test_features_are_those_of_a_fresh_forward(tmp_path: Path, family: str, whole: bool) -> None:
    backbone = zoo.backbone(family, initializer_range=0.15)  # values of size one: two stock forwards agree to 1e-6
    rows, reads = texts(), Reads((1, 2, 3), whole)
    caches = [made(tmp_path / str(group), backbone, rows, reads, group) for group in (1, 64, 1000)]
    everything = list(range(len(rows)))
    orders = [everything, random.Random(1).sample(everything, len(rows))]
    for side, order, size in [("left", orders[1], 4), ("right", orders[1], 4), ("right", orders[0], 1)]:
        for start in range(0, len(order), size):
            part = order[start : start + size]
            for row, (taps, last) in zip(part, stock(backbone, rows, part, side, reads.taps), strict=True):
                ids, mask = rows[row]
                text, at = reads.positions(mask)
                for cache in caches:
                    found = read(cache, rows, [row])
                    assert cache.ids(row).tolist() == ids.tolist()
                    assert found.taps is not None
                    torch.testing.assert_close(found.taps[0, :text], taps[:text], atol=1e-5, rtol=0)
                    torch.testing.assert_close(found.last[0, at], last[at], atol=1e-5, rtol=0)
    together = read(caches[1], rows, orders[1])
    for place, row in enumerate(orders[1]):
        alone = read(caches[1], rows, [row])
        assert torch.equal(together.last[place, : alone.last.shape[1]], alone.last[0])


def test_the_teacher_is_rebuilt_from_it(tmp_path: Path) -> None:
    """B029: the projection of what is stored is the model's own logits, at each token that is proposed."""
    backbone, rows = zoo.backbone(), texts()
    batch = collate(cached(rows, made(tmp_path / "f", backbone, rows)), [1, 3])
    taught = anchors(batch.mask, 1)[0] + 1
    with torch.no_grad():
        logits = backbone.logits(batch.cached().last.flatten(0, 1)[taught])
        expected = backbone.model(input_ids=batch.ids).logits.flatten(0, 1)[taught]
        bare = backbone.model.lm_head(backbone.model.model.norm(batch.cached().last)).flatten(0, 1)[taught]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert (bare - expected).abs().max() > 1e-2  # normed twice is something else


def test_a_blank_forward_reads_what_is_stored_too(tmp_path: Path) -> None:
    """A sharded backbone would be asked by one process alone."""
    backbone, rows = zoo.backbone(), texts()
    batch = collate(cached(rows, made(tmp_path / "f", backbone, rows)), [1, 3])
    blank = batch.blank()
    assert (blank.ids.tolist(), blank.rows, blank.tokens) == (batch.ids[-1:].tolist(), [3], 0)
    assert not blank.mask.any()
    assert blank.cached is not None
    assert torch.equal(blank.cached().last, batch.cached().last[-1:])


def test_the_header_says_what_it_is(tmp_path: Path) -> None:
    backbone, rows = zoo.backbone(), texts()
    cache = made(tmp_path / "f", backbone, rows)
    said = {
        "layers": 4, "width": 32, "precision": "float32", "taps": [0, 2, 4], "taps norm": "before any norm",
        "last norm": "after the final norm", "last at": "anchors", "store": "float32", "max_length": 1000,
        "rows": rows.hash(), "weights": weights_hash(backbone.model),
    }  # fmt: skip
    header = json.loads((tmp_path / "f" / HEADER).read_text())
    assert said.items() <= header["settings"].items()
    assert {"tokenizer", "template"} <= header["settings"].keys()
    assert header["backbone"] == "tiny-llama"
    with safe_open(tmp_path / "f" / cache.shards[0].file, "pt") as shard:
        assert json.loads(shard.metadata()["headstart"]) == header["settings"]
        assert shard.get_tensor("lengths").tolist() == [rows.lengths[row] for row in shard.get_tensor("rows")]
    assert sorted(row for one in cache.shards for row in one.rows) == list(range(len(rows)))


def test_no_taps_are_no_tensors(tmp_path: Path) -> None:
    """B031, B145: what is not asked for takes no room."""
    backbone, rows = zoo.backbone(), texts()
    with_taps = made(tmp_path / "taps", backbone, rows)
    without = made(tmp_path / "none", backbone, rows, Reads((), False))
    with safe_open(tmp_path / "none" / without.shards[0].file, "pt") as shard:
        assert not any(name.startswith("taps") for name in shard.keys())  # noqa: SIM118
    assert read(without, rows, [0]).taps is None
    positions = sum(TAPS.positions(rows[row][1])[0] for row in range(len(rows)))
    saved = sum(one.bytes for one in with_taps.shards) - sum(one.bytes for one in without.shards)
    assert saved == pytest.approx(positions * 3 * 32 * 4, rel=0.05)


def test_the_size_is_known_before(tmp_path: Path) -> None:
    """B145: tokens times width, for each state that is read, and no more than 5% beside."""
    backbone = zoo.backbone(hidden_size=64)
    rows = texts([200] * 16)
    for store, each in (("float32", 64 * 4), ("bfloat16", 64 * 2), ("int8", 64 + 20)):
        cache = made(tmp_path / store, backbone, rows, store=store, group=1000)
        size = sum(one.bytes for one in cache.shards)
        groups = batches_of(rows.lengths, 1000)
        assert sum(size_of(rows, group, TAPS, cache.settings) for group in groups) == pytest.approx(size, rel=0.05)
        assert size <= 1.05 * rows.lengths.sum() * 4 * each


def test_too_little_room_is_said_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 1 << 30, 20_000))
    monkeypatch.setattr(Backbone, "forward", lambda *_, **__: pytest.fail("began"))
    with pytest.raises(UserError, match=r"the features need \d+\.\d KiB, and 19\.5 KiB are free"):
        made(tmp_path / "f", zoo.backbone(), texts())


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """B026: a folder that is not there is made; one that cannot be is an error."""
    made(tmp_path / "new" / "deep" / "f", zoo.backbone(), texts())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        made(tmp_path / "file" / "f", zoo.backbone(), texts())
    for name in ("file", "new"):
        with pytest.raises(UserError, match="holds something else than cached features"):
            made(tmp_path / name, zoo.backbone(), texts())


# --- eight bits -----------------------------------------------------------------------------------------------------


def wild(count: int = 200, width: int = 576) -> torch.Tensor:
    """States with single channels a thousand times the rest."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(count, width, generator=generator) * torch.rand(width, generator=generator).exp()
    states[::3, 7] = 24_000.0
    states[::3, 130] = -9_000.0
    states[1] = 0
    return states


def test_eight_bits_keep_what_stands_beside_a_giant() -> None:
    states = wild()
    found = eight_bits.decoded(eight_bits.encoded(states))
    rest = states.abs() < 1000
    error = ((found - states) * rest).norm(dim=-1) / (states * rest).norm(dim=-1).clamp(min=1e-9)
    assert error.max() < 0.02
    torch.testing.assert_close(found[~rest], states[~rest], rtol=4e-3, atol=0)
    assert not found[1].any()
    scale = states.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127  # a scale alone leaves the rest nothing
    plain = (states / scale).round() * scale
    assert (((plain - states) * rest).norm(dim=-1)[::3] / (states * rest).norm(dim=-1)[::3]).min() > 0.9


def test_eight_bits_are_those_of_a_plain_loop() -> None:
    states = wild(6)
    found = eight_bits.decoded(eight_bits.encoded(states))
    for state, seen in zip(states.tolist(), found.tolist(), strict=True):
        order = sorted(range(len(state)), key=lambda channel: -abs(state[channel]))
        scale = abs(state[order[4]]) / 127
        for channel, value in enumerate(state):
            close = 4e-3 * abs(value) if channel in order[:4] else 0.501 * scale
            assert abs(value - seen[channel]) <= close + 1e-12


def test_a_broken_state_stays_visible_in_eight_bits() -> None:
    states = wild(3)
    states[0, 5], states[2, 9] = float("nan"), float("inf")
    found = eight_bits.decoded(eight_bits.encoded(states))
    assert found.isfinite().all(-1).tolist() == [False, True, False]


def test_eight_bits_halve_it_and_stay_close(tmp_path: Path) -> None:
    backbone = zoo.backbone(hidden_size=256, num_attention_heads=4)
    rows = texts([60] * 6)
    cache, exact = (made(tmp_path / store, backbone, rows, store=store) for store in ("int8", "bfloat16"))
    small, large = (sum(one.bytes for one in which.shards) for which in (cache, exact))
    assert small < 0.57 * large
    one, other = read(cache, rows, [0, 2]), read(exact, rows, [0, 2])
    assert one.taps is not None
    assert other.taps is not None
    for ours, theirs in ((one.last, other.last), (one.taps, other.taps)):
        assert (ours - theirs).norm() < 0.015 * theirs.norm()


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason="not in the cache yet: headstart fetch smollm2-135m")
def test_features_of_smollm2_and_their_eight_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states that reach 24,000: equal to 1e-6 of a row's largest value, and in eight bits the rest survives."""
    monkeypatch.setenv("HEADSTART_CACHE", str(SMOLLM2.parent.parent))
    backbone = load_backbone("smollm2-135m", dtype="float32")
    ids = [chat.encode(backbone.tokenizer, one.messages) for one in read_chats(["shipped"])[0][:6]]
    mask = [[int(at > len(one) // 3) for at in range(len(one))] for one in ids]
    rows = replace(Rows.from_lists(ids, mask).trimmed(160), numbers=None)
    reads = Reads((2, 15, 27), whole_last=True)
    exact = made(tmp_path / "exact", backbone, rows, reads, 600)
    eight = made(tmp_path / "eight", backbone, rows, reads, 600, store="int8")
    largest = 0.0
    for side, order in (("right", [[row] for row in range(len(rows))]), ("left", [[4, 1, 5], [0, 3, 2]])):
        for part in order:
            for row, (taps, last) in zip(part, stock(backbone, rows, part, side, reads.taps), strict=True):
                text, at = reads.positions(rows[row][1])
                found = read(exact, rows, [row])
                assert found.taps is not None
                scale = float(taps.abs().max())
                largest = max(largest, scale)
                assert (found.taps[0, :text] - taps[:text]).abs().max() <= 1e-6 * scale
                assert (found.last[0, at] - last[at]).abs().max() <= 1e-6 * scale
    assert largest > 10_000
    for row in range(len(rows)):
        text, at = reads.positions(rows[row][1])
        true, seen = read(exact, rows, [row]), read(eight, rows, [row])
        assert true.taps is not None
        assert seen.taps is not None
        states, close = (one.taps[0, :text].reshape(-1, 576) for one in (true, seen))
        rest = torch.ones_like(states).scatter(-1, states.abs().topk(4, -1).indices, 0)
        assert (((close - states) * rest).norm(dim=-1) <= 0.04 * (states * rest).norm(dim=-1)).all()
        with torch.no_grad():
            p, q = (backbone.logits(one.last[0, at]).log_softmax(-1) for one in (true, seen))
        assert (p.exp() * (p - q)).sum(-1).mean() < 2e-3  # nats


# --- stale, or not --------------------------------------------------------------------------------------------------


def folder_of(tmp_path: Path, backbone: Backbone, prepared: Path, method: str = "eagle3", **changes: Any) -> Path:
    recipe = runs.recipe(tmp_path / "run", prepared, method, data__cache="auto", **changes)
    return cache_features(recipe, backbone).folder


def test_an_unchanged_run_does_no_forward(tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = folder_of(tmp_path, zoo.backbone(), prepared)
    before = bytes_of(first)
    not_asked(monkeypatch)
    assert folder_of(tmp_path, zoo.backbone(), prepared) == first
    # nothing of these changes a feature
    others = {"seed": 3, "data__held_out": 0.4, "batch__rows": 2, "loss__depths": 1, "optim__lr": 1.0}
    assert folder_of(tmp_path, zoo.backbone(), prepared, **others) == first
    assert bytes_of(first) == before


def nudged(backbone: Backbone) -> Backbone:
    """One weight of all of them a little otherwise."""
    with torch.no_grad():
        backbone.model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-4
    return backbone


def test_an_adapter_changes_the_key_and_so_does_its_switch() -> None:
    peft = pytest.importorskip("peft")
    backbone = zoo.backbone()
    seen = [weights_hash(backbone.model)]
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.inject_adapter_in_model(lora, backbone.model)
    layers = [layer for layer in model.modules() if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer)]
    for on in (True, False, True):
        for layer in layers:
            layer.enable_adapters(on)
        seen.append(weights_hash(backbone.model))
    assert len(set(seen[:3])) == 3
    assert seen[3] == seen[1]


class Switched(torch.nn.Linear):
    """What peft's layers say of themselves."""

    active_adapters, disable_adapters, merged_adapters = ("default",), False, ()

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        torch.nn.init.ones_(self.weight)
        self.scaling = {"default": 2.0}


def with_adapter(**said: Any) -> Backbone:
    backbone = zoo.backbone()
    backbone.model.model.layers[0].extra = Switched()
    for name, value in said.items():
        setattr(backbone.model.model.layers[0].extra, name, value)
    return backbone


def with_words(backbone: Backbone, template: str | None = None, token: str | None = None) -> Backbone:
    backbone.tokenizer = copy.deepcopy(backbone.tokenizer)
    if template:
        backbone.tokenizer.chat_template = template
    if token:
        backbone.tokenizer.add_tokens([token])
    return backbone


BACKBONES = {
    "weights": lambda: nudged(zoo.backbone()),
    "another": lambda: zoo.backbone(seed=1),
    "config": lambda: zoo.backbone(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "attention": lambda: zoo.backbone(attention="eager"),
    "dtype": lambda: Backbone(zoo.model().bfloat16(), zoo.tokenizer(), "tiny-llama"),
    "template": lambda: with_words(zoo.backbone(), zoo.TEMPLATE + "{# #}"),
    "tokenizer": lambda: with_words(zoo.backbone(), token="zebra"),
    "adapter": with_adapter,
    "adapter off": lambda: with_adapter(disable_adapters=True),
    "adapter weaker": lambda: with_adapter(scaling={"default": 1.0}),
}
CHANGES: dict[str, dict[str, Any]] = {
    "length": {"data__max_length": 60},
    "store": {"data__cache_store": "int8"},
    "taps": {"head": {"taps": [0, 1, 2]}},
    "method": {"method": "medusa"},
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    write_jsonl(file, [{"messages": chat} for chat in zoo.chats(6)])
    return file


def test_whatever_changes_the_features_is_a_miss(tmp_path: Path, chats: Path) -> None:
    found = {"": folder_of(tmp_path, zoo.backbone(), chats)}
    for name, other in BACKBONES.items():
        found[name] = folder_of(tmp_path, other(), chats)
    for name, change in CHANGES.items():
        found[name] = folder_of(tmp_path, zoo.backbone(), chats, **change)
    content = chats.read_text()
    try:
        chats.write_text(content.replace("red", "sun", 1))
        found["file"] = folder_of(tmp_path, zoo.backbone(), chats)
    finally:
        chats.write_text(content)
    names = list(found)
    same = [(one, other) for at, one in enumerate(names) for other in names[:at] if found[one] == found[other]]
    assert not same
    assert folder_of(tmp_path, zoo.backbone(), chats) == found[""]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data__max_length": 60}, "max_length was 1024, is now 60"),  # B024
        ({"head": {"taps": [0, 1, 2]}}, r"taps was \[1, 2, 3\], is now \[0, 1, 2\]"),
        ({"data__cache_store": "bfloat16"}, "store was float32, is now bfloat16"),
        ({"method": "eagle1"}, r"taps was \[1, 2, 3\], is now \[\]; last at was anchors, is now every position"),
    ],
)
def test_a_folder_of_other_features_is_refused(tmp_path: Path, prepared: Path, change: Any, message: str) -> None:
    folder = str(tmp_path / "features")
    backbone = zoo.backbone()
    cache_features(runs.recipe(tmp_path / "run", prepared, "eagle3", data__cache=folder), backbone)
    other = runs.recipe(tmp_path / "run", prepared, **{"method": "eagle3", "data__cache": folder, **change})
    with pytest.raises(UserError, match=message):
        set_up(other, backbone)
    cache_features(other, backbone, restart=True)
    set_up(other, backbone)


# --- training with it -----------------------------------------------------------------------------------------------


def losses(recipe: Any, backbone: Backbone) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses and gradients of a step, over forwards with padding."""
    setup = set_up(recipe, backbone)
    found = torch.zeros(setup.objective.depths)
    for batch in setup.batches.forwards(1):
        scale = torch.full((setup.objective.depths,), 0.02)
        result = setup.objective(batch, setup.objective.features(batch), scale)
        result.total.backward()
        found += result.losses.detach()
    return found, {name: one.grad for name, one in setup.head.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("method", TRAINABLE)
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_losses_and_gradients_are_those_of_online_features(
    tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch, method: str, family: str
) -> None:
    backbone = zoo.backbone(family)
    recipe, other = (runs.recipe(tmp_path / "run", prepared, method, data__cache=cache) for cache in (None, "auto"))
    expected, gradients = losses(recipe, backbone)
    cache_features(other, backbone)
    with monkeypatch.context() as patch:
        not_asked(patch)
        found, theirs = losses(other, backbone)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert gradients.keys() == theirs.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(theirs[name], gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()))
    # what is not stored is not needed: anything in its place gives the same
    plain = FeatureCache.read

    def poisoned(self: FeatureCache, *arguments: Any) -> Features:
        features = plain(self, *arguments)
        for states in (features.last, features.taps):
            if states is not None:
                states[(states == 0).all(-1)] = 3.0
        return features

    monkeypatch.setattr(FeatureCache, "read", poisoned)
    found, theirs = losses(other, backbone)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for name, gradient in gradients.items():
        torch.testing.assert_close(theirs[name], gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()))


@pytest.mark.parametrize("method", TRAINABLE)
def test_a_run_on_cached_features_and_one_resumed(tmp_path: Path, prepared: Path, method: str) -> None:
    """Each method, cached: fresh runs end as those online, resumed ones bit for bit as the undisturbed."""
    backbone = zoo.backbone()
    train(runs.recipe(tmp_path / "online", prepared, method), backbone=backbone)
    train(runs.recipe(tmp_path / "whole", prepared, method, data__cache="auto"), backbone=backbone)
    broken = runs.recipe(tmp_path / "resumed", prepared, method, data__cache="auto")
    real, steps = setting.Objective.forward, []

    def fails_late(self: Any, *arguments: Any) -> Any:
        steps.append(0)
        if len(steps) == 10:
            raise KeyboardInterrupt
        return real(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setting.Objective, "forward", fails_late)
        with pytest.raises(KeyboardInterrupt):
            train(broken, backbone=backbone)
    train(broken, backbone=backbone)
    whole, online = (runs.weights(tmp_path / name) for name in ("whole", "online"))
    assert runs.same_bits(runs.weights(tmp_path / "resumed"), whole)
    for name, weight in online.items():
        torch.testing.assert_close(whole[name], weight, rtol=0, atol=2e-3)
    ours, theirs = (runs.lines(tmp_path / name)[-1]["held_out"] for name in ("whole", "online"))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


def test_a_run_does_not_go_on_with_other_features(tmp_path: Path, prepared: Path) -> None:
    folder = tmp_path / "features"
    backbone = zoo.backbone()
    recipe = runs.recipe(tmp_path / "run", prepared, data__cache=str(folder), optim__max_steps=3, save__every=1)
    setup = set_up(recipe, backbone)
    before = setup.facts()
    header = json.loads((folder / HEADER).read_text())
    assert before["the cached features"] == FeatureCache(folder).identity()
    assert header["settings"]["rows"] != before["the rows trained on"]  # all of them, held-out ones too
    with pytest.raises(UserError, match=r"data.cache was .*features, is now None"):
        train(recipe, backbone=backbone)
        train(runs.recipe(tmp_path / "run", prepared, optim__max_steps=3), backbone=backbone)


def test_a_broken_row_of_the_cache_is_named(tmp_path: Path, prepared: Path) -> None:
    """Features that are not finite are told by tensor and row, as online ones are."""
    backbone = zoo.backbone()
    recipe = runs.recipe(tmp_path / "run", prepared, data__cache="auto")
    cache_features(recipe, backbone)
    plain = FeatureCache.read

    def poisoned(self: FeatureCache, places: Any, *arguments: Any) -> Features:
        features = plain(self, places, *arguments)
        for number, row, _ in places:
            if number == 4:
                features.last[row] = float("nan")
        return features

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureCache, "read", poisoned)
        with pytest.raises(UserError, match=r"last hidden state, from position 0 on, is not finite in .*row 5"):
            train(recipe, backbone=backbone)


# --- whole, or named ------------------------------------------------------------------------------------------------


def spoil(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[:-9])
    elif how == "flipped":
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["cut", "flipped", "missing"])
def test_a_damaged_shard_is_named_and_made_anew(tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    backbone, rows, out = zoo.backbone(), texts(), tmp_path / "f"
    cache = made(out, backbone, rows)
    before = bytes_of(out)
    stamps = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert len(cache.shards) >= 3
    spoil(out / "000001.safetensors", how)
    row = cache.shards[1].rows[0]
    with pytest.raises(UserError, match=r"000001\.safetensors: (has|is missing).*data cache"):
        read(FeatureCache(out), rows, [row])
    read(made(out, backbone, rows, thorough=True), rows, [row])
    assert "000001.safetensors" in capsys.readouterr().out
    assert bytes_of(out) == before
    assert {n for n, stamp in stamps.items() if (out / n).stat().st_mtime_ns != stamp} == {"000001.safetensors"}


def test_medusa_heads_train_on_the_features_of_an_eagle_3_head(tmp_path: Path, prepared: Path) -> None:
    folder = str(tmp_path / "features")
    train(
        runs.recipe(tmp_path / "own", prepared, "medusa", data__cache=str(tmp_path / "less")), backbone=zoo.backbone()
    )
    cache_features(runs.recipe(tmp_path / "run", prepared, "eagle3", data__cache=folder), zoo.backbone())
    train(runs.recipe(tmp_path / "run", prepared, "medusa", data__cache=folder), backbone=zoo.backbone())
    for name, weight in runs.weights(tmp_path / "own").items():
        assert torch.equal(runs.weights(tmp_path / "run")[name], weight)


def test_one_folder_serves_methods_that_read_otherwise(tmp_path: Path, prepared: Path) -> None:
    folder = str(tmp_path / "features")
    recipes = [runs.recipe(tmp_path / name, prepared, name, data__cache=folder) for name in ("eagle3", "eagle1")]
    cache_features(recipes[0], zoo.backbone(), also=recipes[1:])
    before = bytes_of(Path(folder))
    for name in ("eagle3", "eagle1", "medusa"):
        own = str(tmp_path / "features of its own" / name)
        train(runs.recipe(tmp_path / f"own {name}", prepared, name, data__cache=own), backbone=zoo.backbone())
        train(runs.recipe(tmp_path / name, prepared, name, data__cache=folder), backbone=zoo.backbone())
        for part, weight in runs.weights(tmp_path / f"own {name}").items():
            assert torch.equal(runs.weights(tmp_path / name)[part], weight)
    assert bytes_of(Path(folder)) == before


@pytest.mark.parametrize("store", ["auto", "int8"])
def test_features_that_hold_more_serve_a_head_that_reads_less(tmp_path: Path, store: str) -> None:
    """Those of three taps, for Medusa heads and for a head of two taps; never the other way."""
    backbone, rows = zoo.backbone(), texts()
    everything = Reads((0, 2, 4), whole_last=True)
    made(tmp_path / "more", backbone, rows, everything, store=store)
    for number, less in enumerate((Reads((), False), Reads((4, 2), False), Reads((2,), True))):
        found = made(tmp_path / "more", backbone, rows, less, store=store)  # finds it, and makes nothing
        own = made(tmp_path / f"own{number}", backbone, rows, less, store=store)
        here, there = (read(cache, rows, [0, 3, 5]) for cache in (own, found))
        stands = here.last != 0
        assert torch.equal(here.last[stands], there.last[stands])
        assert (here.taps is None) == (there.taps is None) == (not less.taps)
        if here.taps is not None:
            assert torch.equal(here.taps, there.taps)
        with pytest.raises(UserError, match="taps was|last at was"):
            made(tmp_path / f"own{number}", backbone, rows, everything, store=store)
    (tmp_path / "more" / "000001.safetensors").unlink()
    with pytest.raises(UserError, match=r"000001.*is missing.*hold more than is asked for \(taps was"):
        made(tmp_path / "more", backbone, rows, Reads((), False), store=store)
    made(tmp_path / "more", backbone, rows, everything, store=store)


def test_shards_of_other_features_are_told_apart(tmp_path: Path) -> None:
    """A shard under the name of another, with a header that agrees."""
    backbone, rows = zoo.backbone(), texts()
    made(tmp_path / "a", backbone, rows)
    made(tmp_path / "b", zoo.backbone(seed=1), rows)
    header = json.loads((tmp_path / "b" / HEADER).read_text())
    header["settings"] = json.loads((tmp_path / "a" / HEADER).read_text())["settings"]
    (tmp_path / "b" / HEADER).write_text(json.dumps(header))
    with pytest.raises(UserError, match="belongs to other features.*weights was"):
        read(FeatureCache(tmp_path / "b"), rows, [0])


def test_an_interrupted_run_keeps_its_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """B027: what is there stays as it is, byte and time, and the summary says how much that was."""
    backbone, rows, out = zoo.backbone(), texts(), tmp_path / "f"
    made(tmp_path / "whole", backbone, rows)
    plain, calls = Backbone.forward, []

    def fragile(self: Backbone, *arguments: Any, **options: Any) -> Any:
        calls.append(arguments[0].shape)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(self, *arguments, **options)

    monkeypatch.setattr(Backbone, "forward", fragile)
    with pytest.raises(KeyboardInterrupt):
        made(out, backbone, rows)
    assert not out.exists()
    parts = tmp_path / "f.parts"
    stamps = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.safetensors")}
    assert len(stamps) == 2
    (parts / ".000002.safetensors.77.part").write_text("left by a kill")
    with pytest.raises(UserError, match="store was float32, is now int8"):
        made(out, backbone, rows, store="int8")
    made(out, backbone, rows)
    assert calls.count(calls[2]) == 2
    assert calls.count(calls[0]) == calls.count(calls[1]) == 1
    assert {name: (out / name).stat().st_mtime_ns for name in stamps} == stamps
    assert bytes_of(out) == bytes_of(tmp_path / "whole")
    assert "2 shards are there already" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "whole"]


@pytest.mark.parametrize("moment", ["header", "notes", "rename"])
def test_a_killed_finish_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    backbone, rows, out = zoo.backbone(), texts(), tmp_path / "f"
    made(tmp_path / "whole", backbone, rows)
    with monkeypatch.context() as patch:
        if moment == "rename":
            move = os.replace

            def late(old: Any, new: Any) -> None:
                if new == out:
                    raise KeyboardInterrupt
                move(old, new)

            patch.setattr(os, "replace", late)
        else:
            real, seen = Path.unlink, []

            def fragile(self: Path, missing_ok: bool = False) -> None:
                if self.suffix == ".json":
                    seen.append(self)
                    if len(seen) > (0 if moment == "header" else 2):
                        raise KeyboardInterrupt
                real(self, missing_ok)

            patch.setattr(Path, "unlink", fragile)
        with pytest.raises(KeyboardInterrupt):
            made(out, backbone, rows)
    not_asked(monkeypatch)
    made(out, backbone, rows)
    assert bytes_of(out) == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("moment", [1, 3])
def test_a_killed_restart_leaves_no_note_without_its_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    backbone, rows, out = zoo.backbone(), texts(), tmp_path / "f"
    made(tmp_path / "whole", backbone, rows)
    plain, calls = Backbone.forward, []

    def fragile(self: Backbone, *arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(self, *arguments, **options)

    remove, gone = Path.unlink, []

    def late(self: Path, missing_ok: bool = False) -> None:
        if self.parent.name == "f.parts" and self.suffix != ".part":
            gone.append(self)
            if len(gone) > moment:
                raise KeyboardInterrupt
        remove(self, missing_ok)

    for owner, name, change in ((Backbone, "forward", fragile), (Path, "unlink", late)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, change)
            with pytest.raises(KeyboardInterrupt):
                made(out, backbone, rows, restart=True)
    assert len(gone) == moment + 1
    made(out, backbone, rows)
    assert bytes_of(out) == bytes_of(tmp_path / "whole")


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, rows, plain, calls = zoo.backbone(), texts(), Path.write_bytes, []

    def full(self: Path, content: bytes) -> int:
        if ".safetensors." not in self.name:
            return plain(self, content)
        calls.append(self)
        if len(calls) == 3:
            plain(self, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(self, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match=r"000002\.safetensors: cannot be written \(No space left"):
        made(tmp_path / "f", backbone, rows)
    made(tmp_path / "f", backbone, rows)
    assert len(calls) == len({str(path) for path in calls}) + 1
    monkeypatch.undo()
    made(tmp_path / "whole", backbone, rows)
    assert bytes_of(tmp_path / "f") == bytes_of(tmp_path / "whole")


def test_restart_replaces_ours_and_nothing_else(tmp_path: Path) -> None:
    backbone, rows, out = zoo.backbone(), texts(), tmp_path / "f"
    made(out, backbone, rows)
    with pytest.raises(UserError, match="weights was"):
        made(out, zoo.backbone(seed=1), rows)
    (out / "notes.txt").write_text("precious")
    with pytest.raises(UserError, match="did not write"):
        made(out, zoo.backbone(seed=1), rows, restart=True)
    assert any(path.read_text() == "precious" for path in tmp_path.rglob("notes.txt"))
    shutil.rmtree(tmp_path / "f.parts", ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    made(out, backbone, rows)
    made(out, zoo.backbone(seed=1), rows, restart=True)
    assert read_header(out)["settings"]["weights"] == weights_hash(zoo.backbone(seed=1).model)


def test_two_runs_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, rows, plain = zoo.backbone(), texts(), Backbone.forward
    seen = []

    def second(self: Backbone, *arguments: Any, **options: Any) -> Any:
        if not seen:
            seen.append(1)
            with pytest.raises(UserError, match="another process"):
                made(tmp_path / "f", backbone, rows)
        return plain(self, *arguments, **options)

    monkeypatch.setattr(Backbone, "forward", second)
    made(tmp_path / "f", backbone, rows)
    assert seen


# --- several processes, kills ---------------------------------------------------------------------------------------


class Rank:
    """One of several threads that stand for processes."""

    def __init__(self, rank: int, barrier: threading.Barrier) -> None:
        self.process_index, self.num_processes, self.barrier = rank, barrier.parties, barrier

    def wait_for_everyone(self) -> None:
        self.barrier.wait(timeout=60)


def test_ranks_write_shards_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, writers = texts([*LENGTHS, *LENGTHS]), {}
    made(tmp_path / "whole", zoo.backbone(), rows)
    plain = capturing._write
    monkeypatch.setattr(
        capturing, "_write", lambda *all: (writers.setdefault(all[-1], threading.get_ident()), plain(*all))
    )
    for world in (3, 2):  # made by three, found there by two
        barrier = threading.Barrier(world)
        threads = [
            threading.Thread(
                target=made, args=(tmp_path / "f", zoo.backbone(), rows), kwargs={"world": Rank(rank, barrier)}
            )
            for rank in range(world)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert bytes_of(tmp_path / "f") == bytes_of(tmp_path / "whole")
        assert len(set(writers.values())) == 3


def slowly(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function takes a while, so that there are moments in which it can be killed."""
    plain = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *all, **options: (time.sleep(0.01), plain(*all, **options))[1])


def killed(tmp_path: Path, make: Callable[[Path], object], kills: int) -> None:
    """`make` in processes that are killed at random moments of its work, and once to its end, undisturbed."""
    make(tmp_path / "whole")
    one, other = tmp_path / "killed", tmp_path / "whole"
    source, count, rounds = random.Random(3), 0, 0
    while count < kills or not one.exists():
        process = get_context("fork").Process(target=make, args=(one,))
        process.start()
        while process.is_alive() and not (tmp_path / ".killed.lock").exists():
            time.sleep(0.001)
        if count < kills:
            time.sleep(source.random() * 0.08)
            process.kill()
        process.join()
        count += process.exitcode == -signal.SIGKILL
        if one.exists():
            if process.exitcode:  # killed at the very end of its work: the same again finds it, and tidies up
                make(one)
            assert (bytes_of(one) == bytes_of(other)) if one.is_dir() else (one.read_bytes() == other.read_bytes())
            assert not (tmp_path / "killed.parts").exists()
            rounds += 1
            if count < kills:  # it was done before so many: from the start again
                for path in tmp_path.glob("killed*"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert rounds


def test_features_after_kills_are_those_of_an_undisturbed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, rows = zoo.backbone(), texts([*LENGTHS] * 4)
    slowly(capturing, "_captured", monkeypatch)
    killed(tmp_path, lambda out: made(out, backbone, rows), kills=20)


def test_answers_after_kills_are_those_of_an_undisturbed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "prompts.jsonl", [{"messages": chat} for chat in zoo.chats(30)])
    backbone = zoo.backbone()
    slowly(answers, "decode_group", monkeypatch)

    def make(out: Path) -> None:
        settings = RegenerateSettings([str(tmp_path / "prompts.jsonl")], out, max_new_tokens=3, group=3)
        regenerating.regenerate(backbone, replace(settings, keep_cut=True, temperature=0.7))

    killed(tmp_path, make, kills=20)


# --- from the command line ------------------------------------------------------------------------------------------


def test_the_verb_makes_what_training_finds(
    tmp_path: Path, prepared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo.model().save_pretrained(tmp_path / "backbone")
    zoo.tokenizer().save_pretrained(tmp_path / "backbone")
    command = ["data", "cache", "--backbone", str(tmp_path / "backbone"), "--input", str(prepared)]
    for extra in ([], ["--out", str(tmp_path / "features"), "--method", "medusa", "--store", "int8"]):
        assert cli.main([*command, "--dtype", "float32", *extra]) == 0
        told = capsys.readouterr().out
        assert "12 rows" in told
        assert "all whole" in told
    backbone = zoo.backbone()
    not_asked(monkeypatch)
    set_up(runs.recipe(tmp_path / "one", prepared, "eagle3", data__cache="auto"), backbone)
    folder = str(tmp_path / "features")
    set_up(runs.recipe(tmp_path / "two", prepared, data__cache=folder, data__cache_store="int8"), backbone)
    assert cli.main([*command, "--out", folder, "--dtype", "float32"]) == 2
    assert "taps was [], is now [1, 2, 3]" in capsys.readouterr().err


@pytest.mark.slow
def test_two_real_processes_make_the_folder_of_one_and_train_on_it(tmp_path: Path, prepared: Path) -> None:
    zoo.model().save_pretrained(tmp_path / "backbone")
    zoo.tokenizer().save_pretrained(tmp_path / "backbone")
    (tmp_path / "small.py").write_text(
        "import sys\nfrom headstart import cli\nfrom headstart.training import cached\n"
        "cached.GROUP_TOKENS = 300\nsys.exit(cli.main())\n"
    )
    chosen = ["--backbone", str(tmp_path / "backbone"), "--input", str(prepared), "--dtype", "float32"]
    command = ["data", "cache", *chosen, "--out", str(tmp_path / "features")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    for arguments in (command, command):  # made, and found
        ran = [*launch, str(tmp_path / "small.py"), *arguments]
        out = subprocess.run(ran, check=True, timeout=300, env=environment, capture_output=True, text=True).stdout
        assert out.count("all whole") == 1
    recipe = runs.recipe(tmp_path / "run", prepared, "eagle3", data__cache=str(tmp_path / "one"))
    cache_features(recipe, zoo.backbone())
    assert bytes_of(tmp_path / "features") == {**bytes_of(tmp_path / "one"), HEADER: renamed(tmp_path / "one")}
    keys = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in runs.SMALL.items()]
    (tmp_path / "recipe.yaml").write_text(
        f"backbone: {tmp_path / 'backbone'}\nrun: {tmp_path / 'run'}\ndata: {{train: [{prepared}], cache: auto}}\n"
    )
    ran = [*launch, str(tmp_path / "small.py"), "train", str(tmp_path / "recipe.yaml"), *keys]
    subprocess.run(ran, check=True, timeout=300, env=environment)
    alone = runs.recipe(tmp_path / "alone", prepared, "eagle3")
    train(alone, backbone=zoo.backbone())
    for name, weight in runs.weights(tmp_path / "alone").items():
        torch.testing.assert_close(runs.weights(tmp_path / "run")[name], weight, rtol=1e-3, atol=2e-4)


def renamed(folder: Path) -> bytes:
    """The header of the same features, of a backbone that is called by its folder."""
    return (folder / HEADER).read_bytes().replace(b'"tiny-llama"', b'"backbone"')
