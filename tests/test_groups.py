"""Work in fixed groups: whatever happens to the process, the final bytes are those of an undisturbed run."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headstart.data.groups import earlier, finished, parts_of, run_groups, settings_hash, tidied
from headstart.errors import UserError
from headstart.files import read_jsonl, write_jsonl

SETTINGS = {"temperature": 0.7, "seed": 3}

# a run that keeps rows of an endless number of groups until it has 60; each group takes a while
RUN = """
import itertools, random, sys, time
from pathlib import Path
from headstart.data.groups import run_groups
from headstart.files import write_jsonl

def work(number, inputs):
    with open(sys.argv[2], "a") as log:
        log.write(f"{number}\\n")
    rows = []
    for row in range(random.Random(number).randrange(6)):
        time.sleep(0.005)
        rows.append({"group": number, "row": row})
    return rows

out, kept = Path(sys.argv[1]), []
with run_groups(out, {"count": 60}, itertools.count(), work) as results:
    for rows in results:
        kept += rows
        if len(kept) >= 60:
            break
    write_jsonl(out, kept[:60])
"""


def double(number: int, inputs: list[int]) -> list[dict[str, Any]]:
    return [{"group": number, "value": 2 * value} for value in inputs]


def run(out: Path, settings: dict[str, Any] = SETTINGS, work: Any = double, **options: Any) -> None:
    with run_groups(out, settings, [[1, 2], [3]], work, **options) as results:
        write_jsonl(out, [row for rows in results for row in rows])


def test_rows_come_in_order_and_parts_go(tmp_path: Path) -> None:
    out = tmp_path / "new" / "rows.jsonl"
    run(out)
    assert list(read_jsonl(out)) == [{"group": 0, "value": 2}, {"group": 0, "value": 4}, {"group": 1, "value": 6}]
    assert sorted(path.name for path in out.parent.iterdir()) == ["rows.jsonl", "rows.jsonl.settings.json"]


def test_finished_groups_are_not_computed_again(tmp_path: Path) -> None:
    out, seen, counts = tmp_path / "rows.jsonl", [], []

    def fails_once(number: int, inputs: list[int]) -> list[dict[str, Any]]:
        seen.append(number)
        if len(seen) in (1, 3):
            counts.append(earlier(out))
        if seen == [0, 1]:
            raise KeyboardInterrupt
        return double(number, inputs)

    with pytest.raises(KeyboardInterrupt):
        run(out, work=fails_once)
    assert not out.exists()
    run(out, work=fails_once)
    assert seen == [0, 1, 1]
    assert counts == [0, 1]
    run(tmp_path / "undisturbed.jsonl")
    assert out.read_bytes() == (tmp_path / "undisturbed.jsonl").read_bytes()


def test_other_settings_are_refused_with_both_values(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    unfinished(out)
    with pytest.raises(UserError, match=r"temperature was 0\.7, is now 1\.0.*--restart"):
        run(out, SETTINGS | {"temperature": 1.0})
    with pytest.raises(UserError, match="top_k was 'unset', is now 5"):
        run(out, SETTINGS | {"top_k": 5})
    run(out, SETTINGS | {"temperature": 1.0}, restart=True)
    assert finished(out, SETTINGS | {"temperature": 1.0})


def test_a_run_that_came_to_nothing_is_no_hindrance(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    with pytest.raises(ZeroDivisionError):
        run(out, SETTINGS, work=lambda number, inputs: [{"never": 1 // 0}])
    run(out, SETTINGS | {"seed": 4})
    assert finished(out, SETTINGS | {"seed": 4})


def unfinished(out: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(out, work=lambda number, inputs: [{"never": 1 // 0}] if number else double(number, inputs))


def test_finished_knows_settings_and_content(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert not finished(out, SETTINGS)
    run(out)
    assert finished(out, dict(reversed(SETTINGS.items())))
    assert not finished(out, SETTINGS | {"seed": 4})
    out.write_text("{}\n")
    assert not finished(out, SETTINGS)


def test_a_file_of_another_hand_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text("precious\n")
    with pytest.raises(UserError, match="was not made by this command"):
        run(out)
    assert out.read_text() == "precious\n"
    run(out, restart=True)
    with pytest.raises(UserError, match=r"made with other settings .seed was 3, is now 4"):
        run(out, SETTINGS | {"seed": 4})
    out.write_text("edited\n")
    with pytest.raises(UserError, match="was changed since"):
        run(out)


def test_a_folder_of_another_hand_is_not_removed(tmp_path: Path) -> None:
    precious = tmp_path / "rows.jsonl.parts" / "notes.txt"
    precious.parent.mkdir()
    precious.write_text("precious\n")
    for restart in (False, True):
        with pytest.raises(UserError, match="did not write"):
            run(tmp_path / "rows.jsonl", work=lambda *_: pytest.fail("began to work"), restart=restart)
    assert precious.read_text() == "precious\n"


def test_a_killed_finish_is_finished(tmp_path: Path) -> None:
    """Killed after the final file, before its record: the parts are all there and give the same bytes."""
    out = tmp_path / "rows.jsonl"
    with suppress(ZeroDivisionError), run_groups(out, SETTINGS, [[1, 2], [3]], double) as results:
        write_jsonl(out, [row for rows in results for row in rows])
        raise ZeroDivisionError
    assert not finished(out, SETTINGS)
    before = out.read_bytes()
    run(out, work=lambda number, inputs: pytest.fail("computed again"))
    assert out.read_bytes() == before
    assert finished(out, SETTINGS)


def test_parts_of_a_finished_file_are_put_away(tmp_path: Path) -> None:
    """Killed after its record, before its parts were gone."""
    out = tmp_path / "rows.jsonl"
    run(out)
    write_jsonl(parts_of(out) / "000000.jsonl", [{"a": 1}])
    write_jsonl(parts_of(out) / "settings.json", [SETTINGS])
    tidied(out)
    tidied(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "rows.jsonl.settings.json"]


def test_two_runs_at_once(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    with run_groups(out, SETTINGS, [[1]], double) as results:
        with pytest.raises(UserError, match=r"rows\.jsonl: another process \(number \d+\) is at work"):
            run(out)
        write_jsonl(out, next(results))
    assert not list(tmp_path.glob(".*"))


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        run(tmp_path / "file" / "rows.jsonl")


def test_settings_hash_ignores_order_only() -> None:
    assert settings_hash({"a": 1, "b": 2}) == settings_hash({"b": 2, "a": 1}) != settings_hash({"a": 2, "b": 1})


def test_kill_at_random_moments(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN)

    def start(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, str(script), str(tmp_path / name), str(tmp_path / f"{name}.log")])

    assert start("whole").wait() == 0
    source, kills = random.Random(5), 0
    while kills < 6:
        process = start("killed")
        while process.poll() is None and not (tmp_path / "killed.parts").exists():
            time.sleep(0.001)
        time.sleep(source.random() * 0.03)
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:  # it was done before the kill
            break
        kills += 1
    assert kills
    assert start("killed").wait() == 0
    assert (tmp_path / "killed").read_bytes() == (tmp_path / "whole").read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "killed").read_text().splitlines()]
    assert len(rows) == len({(row["group"], row["row"]) for row in rows}) == 60
    log = [int(line) for line in (tmp_path / "killed.log").read_text().split()]
    assert len(log) - len(set(log)) <= kills  # at most the running group is lost
    assert not (tmp_path / "killed.parts").exists()
