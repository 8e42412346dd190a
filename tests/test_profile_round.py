"""scripts/profile_round.py on a tiny model: parts add up, and nothing of a prefill is among them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zoo
from headstart.heads.format import save_head
from headstart.heads.methods import METHODS

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "profile_round.py"


@pytest.mark.slow
def test_parts_add_up(tmp_path: Path) -> None:
    zoo.model().save_pretrained(tmp_path / "backbone")
    zoo.tokenizer().save_pretrained(tmp_path / "backbone")
    head = save_head(METHODS["eagle3"].build(zoo.backbone()), tmp_path / "head")
    suite = tmp_path / "suite.jsonl"
    suite.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("red sun", "blue moon")))
    given = ["--backbone", tmp_path / "backbone", "--head", head, "--tree", "dynamic:3x3x8", "--suite", suite]
    command = [sys.executable, "-P", SCRIPT, *given, "--max-new-tokens", "8"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| (.+?) \| ([\d.-]+) \| ([\d.-]+) \|$", done.stdout, re.MULTILINE)
    shares = {name: float(share) for name, _, share in rows}
    outside = shares.pop("**outside**")
    assert abs(sum(shares.values()) - 100) < 1
    assert abs(outside + shares["backbone"] + shares["drafter"] - 100) < 0.3
    assert min(shares.values()) > -1
    assert "nodes, " in done.stdout
    assert "% of a plain step" in done.stdout
