"""Curves of runs: read back as they were written, compared in a table, and drawn."""

from __future__ import annotations

import builtins
import json
import struct

import pytest
import runs

import zoo
from headstart import cli
from headstart.errors import UserError
from headstart.training.curves import Curves, best, read_curves, table
from headstart.training.loop import train
from headstart.training.plot import PANELS, draw


def written(folder, lengths=(1.5, 1.7, 1.6), offset=0.0):
    folder.mkdir(parents=True)
    lines = []
    for step in range(10, 40, 10):
        rates = [0.5 + step / 100, 0.3 + step / 100]
        lines.append({"step": step, "loss": 4.0 - step / 10 + offset, "accuracy": rates, "tokens_per_second": 100.0})
        lines[-1] |= {"tokens": 100 * step, "seconds": 0.5 * step}
        figures = {"loss": 3.0, "accuracy": rates, "acceptance": [0.4], "estimated_acceptance_length": 1.9}
        lines.append({"step": step, "held_out": {**figures, "acceptance_length": lengths[step // 10 - 1]}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_curves_are_what_was_written(tmp_path):
    (one,) = read_curves([written(tmp_path / "one")])
    assert one.points("loss") == [(10, 3.0), (20, 2.0), (30, 1.0)]
    assert one.points("acceptance_length", held_out=True) == [(10, 1.5), (20, 1.7), (30, 1.6)]
    assert one.by_depth("accuracy") == [
        [(10, pytest.approx(0.6)), (20, 0.7), (30, 0.8)],
        [(10, 0.4), (20, 0.5), (30, pytest.approx(0.6))],
    ]
    assert one.points("no such figure") == one.by_depth("no such figure") == []
    assert best(one) == (20, 1.7)


def test_the_table_compares_runs_by_what_they_came_to(tmp_path):
    text = table(read_curves([written(tmp_path / "a" / "run"), written(tmp_path / "b" / "run", offset=1.0)]))
    head, first, second = text.splitlines()
    assert first.startswith("a/run  30")
    assert second.startswith("b/run  30")
    for word in ("1.000", "3.000", "0.80/0.60", "1.90", "1.60", "1.70 at 20", "200", "0:15"):
        assert word in first
    assert "2.000" in second
    columns = [head.index(name) for name in ("loss", "measured", "tokens/s")]
    assert all(line[place - 1] == " " != line[place] for line in (first, second) for place in columns)


def test_a_line_that_is_just_being_written_is_left_out(tmp_path):
    run = written(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 40, "lo')
    assert read_curves([run])[0].points("loss")[-1][0] == 30


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("", "is empty; the run has written no line yet"),
        ('{"step": 1}\nnonsense\n{"step": 2}\n', "line 2: is no line of metrics"),
        ('{"loss": 1}\n{"step": 2}\n', "line 1: is no line of metrics"),
    ],
)
def test_what_is_no_run_is_said(content, said, tmp_path):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=said):
        read_curves([tmp_path])


def test_one_run_named_twice_is_said(tmp_path):
    run = written(tmp_path / "run")
    with pytest.raises(UserError, match="one twice"):
        read_curves([run, run])


def test_a_picture_of_real_runs(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    rows = runs.prepared(tmp_path)
    for name, changes in (("a", {"evaluate__every": 2}), ("b", {"evaluate__prompts": 0})):
        train(runs.recipe(tmp_path / name, rows, **changes), backbone=zoo.backbone())
    capsys.readouterr()
    out = tmp_path / "made" / "curves.png"
    assert cli.main(["plot", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)]) == 0
    content = out.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1690, 910)
    said = capsys.readouterr().out
    assert said.splitlines()[0].startswith("run  steps  loss")
    assert said.splitlines()[-1] == str(out)


def test_every_panel_draws_what_it_is_called(tmp_path):
    """Against the lines that matplotlib was given."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    (run,) = read_curves([written(tmp_path / "run")])
    drawn = {}
    for fill in PANELS:
        panel = Figure().subplots()
        fill(panel, run, "black")
        drawn[panel.get_title()] = [line.get_ydata() for line in panel.get_lines()]
    assert [list(one) for one in drawn["Loss"]] == [[3.0, 2.0, 1.0], [3.0] * 3]
    assert [list(one) for one in drawn["Tokens a round"]] == [[1.9] * 3, [1.5, 1.7, 1.6]]
    assert [list(one) for one in drawn["Acceptance by depth, measured"]] == [[0.4] * 3]
    assert len(drawn["Accuracy by depth"]) == 4  # two depths while training, and held out
    assert [list(one) for one in drawn["Tokens a second, in training"]] == [[100.0] * 3]


def test_no_curve_is_cut_off_and_all_panels_have_the_same_steps(tmp_path, monkeypatch):
    """The second run is the faster one, and the longer one."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    made: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: made.append(self))
    slow = Curves("a", [{"step": 5, "loss": 1.0, "tokens_per_second": 10.0}])
    fast = Curves("b", [{"step": step, "loss": 1.0, "tokens_per_second": 2.0 * step} for step in (10, 40)])
    draw([slow, fast], tmp_path / "curves.png")
    *panels, _ = made[0].axes
    assert [panel.get_xlim() for panel in panels] == [(0, 40.8)] * 5
    low, high = panels[-1].get_ylim()
    assert (low, high >= 80.0) == (0, True)


def test_without_matplotlib_the_table_is_there_and_the_way_out(tmp_path, monkeypatch, capsys):
    plain = builtins.__import__

    def without(name, *rest, **more):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return plain(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert cli.main(["plot", str(written(tmp_path / "run")), "--out", str(tmp_path / "curves.png")]) == 2
    told = capsys.readouterr()
    assert "1.70 at 20" in told.out
    assert "pip install 'headstart[plot]'" in told.err
    with pytest.raises(UserError):
        draw(read_curves([tmp_path / "run"]), tmp_path / "curves.png")
