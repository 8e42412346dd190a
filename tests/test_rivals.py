"""The functions of scripts/rivals/, as far as they go without other decoders installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import zoo
from headstart.heads.backbone import Backbone
from headstart.inference.generator import Generator
from headstart.inference.rivals import peer
from headstart.inference.traffic import Ask

SCRIPTS = Path(__file__).parent.parent / "scripts"
PROMPTS = ([1, 5, 6, 7], [1, 9, 9, 12, 30, 31, 32])


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PYTHONPATH=scripts, as docs/peers.md has it."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    for name in [one for one in sys.modules if one.split(".")[0] in ("rivals", "economize")]:
        del sys.modules[name]


def greedy(backbone: Backbone, ids: list[int], count: int = 12) -> list[int]:
    return Generator(backbone).generate(ids, max_new_tokens=count, temperature=0).tokens


def asked(name: str, backbone: Backbone, temperature: float = 0.0) -> list[dict[str, Any]]:
    options = {"max_new_tokens": 12, "temperature": temperature}
    return peer(backbone, name)([Ask(list(ids), options) for ids in PROMPTS], lambda: None)


def test_compiled_answers_are_the_greedy_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler that does nothing: what is compiled, and what it is fed, is what transformers makes of it."""
    graphs: list[int] = []

    def compiled(self: Any, config: Any) -> Any:
        graphs.append(1)
        return self.__call__

    backbone = zoo.backbone()
    monkeypatch.setattr(type(backbone.model), "get_compiled_call", compiled)
    rows = asked("rivals.compiled:generate", backbone)
    assert len(graphs) == 3 + len(PROMPTS)  # it warms up once, and every answer is a compiled one
    assert [row["tokens"] for row in rows] == [greedy(backbone, list(ids)) for ids in PROMPTS]
    assert [row["rounds"] for row in rows] == [len(row["tokens"]) for row in rows]


class Fake(ModuleType):
    """What is called of economize: its rounds bring two tokens each, by the model's own greedy answer."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__("economize")
        self.backbone, self.calls = backbone, list[dict[str, Any]]()
        self.decoding = SimpleNamespace(CostKind=SimpleNamespace(EXACT="exact"))
        self.techniques = ModuleType("economize.techniques")
        self.lookup = ModuleType("economize.techniques.lookup")
        self.lookup.LookupConfig = SimpleNamespace  # type: ignore[attr-defined]

    def apply(self, model: Any, config: Any) -> Any:
        return SimpleNamespace(eval=lambda: SimpleNamespace(decode=self.decode))

    def DecodeConfig(self, **given: Any) -> dict[str, Any]:
        return given

    def TopPSampler(self, **given: Any) -> dict[str, Any]:
        return given

    def decode(self, ids: torch.Tensor, limit: int, **given: Any) -> Any:
        self.calls.append(given)
        tokens = greedy(self.backbone, ids.tolist(), limit)
        events = [SimpleNamespace(kind="exact")] * (len(tokens) // 2) + [SimpleNamespace(kind="draft")]
        return SimpleNamespace(tokens=torch.tensor(tokens), cost=SimpleNamespace(events=events))


def install(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in (("economize", fake), ("economize.techniques", fake.techniques)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "economize.techniques.lookup", fake.lookup)


def test_a_head_that_is_not_named_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = zoo.backbone()
    install(Fake(backbone), monkeypatch)
    monkeypatch.delenv("PEER_ECONOMIZE_EAGLE3", raising=False)
    with pytest.raises(RuntimeError, match="PEER_ECONOMIZE_EAGLE3 has to name the folder of a head"):
        asked("rivals.economized:eagle3", backbone)


def test_economize_is_asked_as_everyone_is(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = zoo.backbone()
    fake = Fake(backbone)
    install(fake, monkeypatch)
    monkeypatch.setenv("PEER_LOOKUP_CYCLE", "5")
    rows = asked("rivals.economized:lookup", backbone)
    assert [row["tokens"] for row in rows] == [greedy(backbone, list(ids)) for ids in PROMPTS]
    assert [row["rounds"] for row in rows] == [len(row["tokens"]) // 2 for row in rows]
    assert all(call["decoding"] == {"cycle_length": 5} and call["selector"] is None for call in fake.calls)
    assert all(call["stop"] == backbone.model.generation_config.eos_token_id for call in fake.calls)
    asked("rivals.economized:lookup", backbone, 0.7)
    assert fake.calls[-1]["selector"]["temperature"] == 0.7
    assert fake.calls[-1]["decoding"]["verifier"] == "rejection"


def test_more_tokens_are_a_superset_of_fewer() -> None:
    import compare_peers

    chats = [(f"key {number}", [{"role": "user", "content": str(number)}]) for number in range(40)]
    few, many = (compare_peers.within(iter(chats), tokens, lambda _: 10) for tokens in (95, 200))
    assert (len(few), len(many)) == (10, 20)
    assert many[:10] == few
    assert few != [messages for _, messages in chats[:10]]
    assert compare_peers.within([*chats, *chats], 1000, lambda _: 10) == compare_peers.within(chats, 1000, lambda _: 10)


def test_a_step_that_is_none_is_refused() -> None:
    command = ["bash", SCRIPTS / "compare_peers.sh", "nowhere", "rows", "herds"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert "there is no step herds" in done.stderr
    assert not Path("nowhere").exists()
