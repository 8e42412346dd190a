"""The record as Markdown and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu.record import Record, Table
from headstart.files import write_whole


def write(record: Record, out: Path) -> Path:
    """`report.md` and `report.json` in a folder; returns the path of the first.

    Raises:
        UserError: the folder cannot be written.
    """
    found = {"verdict": verdict(record), **asdict(record)}
    write_whole(out / "report.json", json.dumps(_plain(found), indent=1, ensure_ascii=False) + "\n")
    write_whole(out / "report.md", markdown(record))
    return out / "report.md"


def verdict(record: Record) -> str:
    """In one line."""
    passed, total = len(record.checks) - len(record.failed), len(record.checks)
    line = f"{passed} of {total} checks passed"
    return f"{line}, {len(record.failed)} FAILED" if record.failed else line if total else "nothing was checked"


def markdown(record: Record) -> str:
    lines = ["# check_gpu", "", f"**{verdict(record)}**", ""]
    lines += _table(Table("Machine", ("", ""), list(record.facts.items())))
    lines += ["## Checks", ""]
    for check in record.checks:
        detail = f" ({check.detail})" if check.detail else ""
        lines.append(f"- {'passed' if check.passed else '**FAILED**'}: {check.name}{detail}")
    lines.append("")
    for check in record.checks:
        if check.trace:
            lines += [f"### {check.name}", "", "```text", check.trace.rstrip(), "```", ""]
    for table in record.tables:
        lines += _table(table)
    lines += ["## Not checked", "", *(f"- {what}" for what in record.omitted), ""]
    return "\n".join(lines)


def _table(table: Table) -> Iterator[str]:
    yield from (f"## {table.title}", "")
    yield "| " + " | ".join(table.columns) + " |"
    yield "|" + "---|" * len(table.columns)
    yield from ("| " + " | ".join(map(_cell, row)) + " |" for row in table.rows)
    yield from ("", table.note, "") if table.note else ("",)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _plain(value: Any) -> Any:
    """Values that JSON knows; what is not finite becomes null."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)
