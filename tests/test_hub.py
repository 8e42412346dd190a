"""Heads on the Hub, through the real client against a small Hub on loopback (hub.py)."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from hub import Hub
from safetensors.torch import load_file, save_file
from test_exchange import IDS, backbone, built, proposed

from headstart.cli import main
from headstart.errors import UserError
from headstart.heads.exchange import export_head
from headstart.heads.format import load_head, save_head
from headstart.heads.load import load_backbone
from headstart.heads.methods import METHODS
from headstart.inference.bench import BenchSettings, bench
from headstart.inference.suite import question

NAME = "ada/eagle3"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub, an empty cache, and nobody's login; the token of its user is in the environment."""
    with Hub() as made:
        constants = huggingface_hub.constants
        for name, value in (
            ("ENDPOINT", made.url),
            ("HF_HUB_CACHE", str(tmp_path / "cache")),
            ("HF_TOKEN_PATH", str(tmp_path / "none")),
            ("HF_HUB_DISABLE_XET", True),
            ("HF_HUB_OFFLINE", False),
            ("HUGGINGFACE_CO_URL_TEMPLATE", made.url + "/{repo_id}/resolve/{revision}/{filename}"),
        ):
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
        monkeypatch.setenv("HF_TOKEN", made.token)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        huggingface_hub.close_session()
        yield made


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """The head of a run, with what a run knows of itself."""
    said = {"data": ["chats.jsonl"], "steps": 3, "loss": "soft"}
    folder = save_head(built("eagle3", {}), tmp_path / "run" / "head", provenance=said)
    (tmp_path / "run" / "recipe.yaml").write_text(f"backbone: {tmp_path}/tiny-llama\nmethod: eagle3\n")
    return folder


pytestmark = pytest.mark.filterwarnings("ignore")


def push(*words: object, code: int = 0) -> None:
    assert main(["push", *map(str, words)]) == code


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    push(*words, code=2)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_there_and_back(hub: Hub, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    push(head.parent, NAME, "--license", "apache-2.0")
    assert f"{hub.url}/{NAME}/commit/" in capsys.readouterr().out
    assert set(hub.files(NAME)) == {
        ".gitattributes", "README.md", "config.json", "model.safetensors", "recipe.yaml",
        "custom_generate/generate.py", "custom_generate/requirements.txt",
    }  # fmt: skip
    assert hub.files(NAME)["model.safetensors"] == (head / "model.safetensors").read_bytes()
    found = load_head(NAME, backbone())
    assert torch.equal(proposed(found), proposed(load_head(head, backbone())))


def test_one_line_for_users_of_transformers(hub: Hub, head: Path) -> None:
    push(head, NAME)
    model = backbone().model
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    plain = model.generate(IDS, **options)
    assert model.generate(IDS, custom_generate=NAME, trust_remote_code=True, **options).equal(plain)


def test_the_card(hub: Hub, head: Path) -> None:
    push(head, NAME, "--license", "mit", "--base-model", "user/tiny")
    card = huggingface_hub.ModelCard(hub.files(NAME)["README.md"].decode())
    data = card.data.to_dict()
    assert (data["base_model"], data["license"], data["library_name"]) == ("user/tiny", "mit", "headstart")
    assert data["tags"] == ["speculative-decoding", "eagle3", "custom_generate"]
    assert "model-index" not in data  # nothing was measured
    for words in (
        f'hs.load_head("{NAME}", backbone)', f'custom_generate="{NAME}"', "vllm serve user/tiny",
        "--speculative-algorithm EAGLE3", "`chats.jsonl`", "arXiv 2503.01840", "method: eagle3", "backbone: tiny-llama",
        f"headstart export --head {NAME} --to sglang",
    ):  # fmt: skip
        assert words in card.text
    assert "## Results" not in card.text
    push(head, NAME)
    text = hub.files(NAME)["README.md"].decode()
    assert "model, tokenizer = backbone.model, backbone.tokenizer" in text
    assert "base_model" not in text  # tiny-llama is on no Hub


@pytest.fixture
def report(head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bench of that head."""
    monkeypatch.setattr("headstart.inference.report.draw", lambda made, path: False)
    settings = BenchSettings("suite.jsonl", tmp_path / "report", max_new_tokens=6, warm_up=0)
    asked = [question({"question_id": 1, "category": "qa", "turns": ["red blue"]}, 1, "s")]
    bench(backbone(), load_head(head, backbone()), asked, settings, command="headstart bench --suite /home/a/qa.jsonl")
    return settings.out / "report.json"


def test_results_are_those_of_a_bench(hub: Hub, head: Path, report: Path) -> None:
    push(head, NAME, "--report", report.parent)
    card = huggingface_hub.ModelCard(hub.files(NAME)["README.md"].decode())
    found = {one.metric_type: one for one in card.data.eval_results or []}
    whole = json.loads(report.read_text())["all"]["overall"]
    assert found["acceptance_length"].metric_value == round(whole["acceptance_length"], 4)
    assert found["speedup"].metric_value == round(whole["speedup"], 4)
    assert found["identical"].metric_value == 1.0
    assert {(one.dataset_name, one.task_type) for one in found.values()} == {("qa.jsonl", "text-generation")}
    assert f"| tokens a round | {whole['acceptance_length']:.2f} | {whole['acceptance_length']:.2f} |" in card.text


def test_a_report_of_another_head_is_refused(
    hub: Hub, report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_head(built("eagle3", {"head_layers": 2}), tmp_path / "other")
    assert "measured a drafter with weights" in refused(capsys, other, NAME, "--report", report)
    report.write_text('{"setup": {}}')
    assert "is no report.json of headstart bench" in refused(capsys, other, NAME, "--report", report)
    assert "no such file" in refused(capsys, other, NAME, "--report", tmp_path / "none")
    assert hub.repositories == {}


def test_engines_that_cannot_serve_it_are_not_recommended(hub: Hub, tmp_path: Path) -> None:
    push(save_head(built("eagle3", {"norm_before_residual": True}), tmp_path / "a"), "ada/a")
    text = hub.files("ada/a")["README.md"].decode()
    assert "vllm serve" in text
    assert "SGLang cannot serve this head" in text
    assert "sglang.launch_server" not in text
    push(save_head(built("hydra", {}, small=False), tmp_path / "b"), "ada/b")
    text = hub.files("ada/b")["README.md"].decode()
    assert "vLLM has no hydra heads" in text
    assert "SGLang has no hydra heads" in text


def test_a_folder_in_the_layout_of_an_engine(hub: Hub, tmp_path: Path) -> None:
    """It is served as it lies, and read here as it lies."""
    made = built("eagle3", {})
    folder = export_head(made, "vllm", tmp_path / "out")
    (folder / "train.log").write_text("a log of /home/somebody/x")
    with pytest.warns(UserWarning, match=r"travels|no part of the head: train\.log"):
        push(folder, "ada/vllm")
    assert "train.log" not in hub.files("ada/vllm")
    text = hub.files("ada/vllm")["README.md"].decode()
    assert '"model": "ada/vllm"' in text
    assert "--speculative-draft-model-path ada/vllm" in text  # the usual layers: SGLang reads the same file
    assert torch.equal(proposed(load_head("ada/vllm", backbone())), proposed(made))


def test_what_is_pushed_can_be_looked_at_first(hub: Hub, head: Path, tmp_path: Path) -> None:
    push(head, NAME, "--out", tmp_path / "look")
    assert torch.equal(proposed(load_head(tmp_path / "look", backbone())), proposed(load_head(head, backbone())))
    assert hub.asked == []


# -- revisions and rights ----------------------------------------------------------------------------------------------


def test_branches_and_commits(hub: Hub, head: Path, tmp_path: Path) -> None:
    push(head, NAME)
    other = save_head(built("eagle3", {"head_layers": 2}), tmp_path / "b")
    push(other, NAME, "--revision", "two-layers")
    assert f"'{NAME}@two-layers'" in hub.files(NAME, "two-layers")["custom_generate/generate.py"].decode()
    layers = [load_head(*where).config.head_layers for where in ((NAME,), (f"{NAME}@two-layers",))]  # type: ignore
    assert layers == [1, 2]
    commit = hub.repositories[NAME].branches["two-layers"]
    assert load_head(NAME, revision=commit).config.head_layers == 2  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"ada/eagle3: no such folder; on the Hub: has no branch, tag or commit none"):
        load_head(NAME, revision="none")


def test_a_head_records_the_commit_of_its_backbone(hub: Hub, tmp_path: Path) -> None:
    backbone().model.save_pretrained(tmp_path / "model")
    sent = hub.add("ada/model")
    first = sent.commit({path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()})
    sent.commit({"README.md": b"later"})
    made = METHODS["medusa"].build(load_backbone("ada/model", revision=first))
    assert (made.config.backbone, made.config.backbone_revision) == ("ada/model", first)
    card = (save_head(made, tmp_path / "head") / "README.md").read_text()
    assert f"| backbone_revision | {first} |" in card
    assert "base_model: ada/model" in card


def test_an_older_head_leaves_nothing_behind(hub: Hub, head: Path, tmp_path: Path) -> None:
    push(head.parent, NAME)
    push(export_head(built("eagle3", {}), "vllm", tmp_path / "b"), NAME)
    assert "recipe.yaml" not in hub.files(NAME)


def test_private_and_gated(hub: Hub, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push(head, NAME, "--private")
    assert hub.repositories[NAME].private
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="no such repository, or it is private and nobody is logged in"):
        load_head(NAME)
    assert load_head(NAME, token=hub.token).method == "eagle3"
    gated = hub.add("meta/head", gated=True)
    gated.commit({"config.json": b"{}", "model.safetensors": b"x"})
    with pytest.raises(UserError, match=r"meta/head: .* is gated: ask for access at http.*/meta/head"):
        load_head("meta/head")


def test_a_public_repository_is_not_taken_for_a_private_one(
    hub: Hub, head: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(NAME)
    assert "exists and is public" in refused(capsys, head, NAME, "--private")
    assert set(hub.files(NAME)) == {".gitattributes"}


def test_tokens(hub: Hub, head: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused(capsys, head, "eve/head")
    assert "your token may not write there (You don't have the rights" in said
    monkeypatch.setenv("HF_TOKEN", bad := "hf_" + "z" * 34)
    said = refused(capsys, head, NAME)
    assert "the Hub does not know your token" in said
    assert bad not in said
    with pytest.raises(UserError, match="the Hub does not know your token"):
        load_head("ada/none")
    monkeypatch.delenv("HF_TOKEN")
    assert "nobody is logged in: log in with `hf auth login`, or set HF_TOKEN" in refused(capsys, head, NAME)
    assert hub.repositories == {}


# -- lines that break --------------------------------------------------------------------------------------------------


def test_offline(hub: Hub, head: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    push(head, NAME)
    load_head(NAME)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert load_head(NAME).method == "eagle3"  # from the cache
    with pytest.raises(UserError, match="ada/other: .*HF_HUB_OFFLINE is set"):
        load_head("ada/other")
    assert "HF_HUB_OFFLINE is set" in refused(capsys, head, NAME)


def test_no_network(hub: Hub, head: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    with pytest.raises(UserError, match=r"ada/head: no such folder; on the Hub: the Hub at http\S+ cannot be reached"):
        load_head("ada/head")
    said = refused(capsys, head, NAME)
    assert "cannot be reached" in said
    assert "the same command goes on" in said


@pytest.mark.parametrize("trouble", [503, "cut"])
def test_a_push_that_broke_off_goes_on(
    hub: Hub, trouble: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of two large files one arrived, and none was committed; then only the other one is sent."""
    folder = export_head(built("eagle3", {}), "vllm", tmp_path / "out")
    held = folder / "model.safetensors"
    tensors = load_file(held)
    held.unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for shard, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / shard)
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sent: list[str] = []

    def fails(method: str, path: str) -> Any:
        """The two are sent side by side: whichever is second waits until the first is there, and never arrives."""
        if method != "PUT":
            return None
        sent.append(path)
        if path == sent[0]:
            return None
        until = time.monotonic() + 20
        while not hub.arrived and time.monotonic() < until:
            time.sleep(0.01)
        return trouble

    hub.trouble = fails
    said = refused(capsys, folder, NAME)
    assert "nothing is lost: the same command goes on with what has not arrived" in said
    assert len(hub.arrived) == 1
    assert set(hub.files(NAME)) == {".gitattributes"}
    hub.trouble = lambda method, path: None
    push(folder, NAME)
    assert len(hub.arrived) == len(set(hub.arrived)) == 2
    assert load_head(NAME, backbone()).method == "eagle3"


def test_a_server_at_fault(hub: Hub) -> None:
    hub.trouble = lambda method, path: 500
    with pytest.raises(UserError, match="the Hub answered 500"):
        load_head("ada/head")
