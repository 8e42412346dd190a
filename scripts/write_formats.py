"""Run the tests of the formats, and write the tables of docs/formats.md from those that passed.

    python scripts/write_formats.py

A cell says exact, refused or impossible where the test of that very pair passed, and "not shown" elsewhere. A table
stands below a comment that names it, `[matrix]: # "pairs"` or `[matrix]: # "eagle3"`, up to an empty line.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(r'^(\[matrix\]: # "(\w+)"\n\n)(?:\|.*\n)*\n?', re.MULTILINE)
TESTS = ("test_exchange.py", "test_format.py::test_round_trip_is_exact", "test_layouts.py::test_mlp_speculator")


class Record:
    """A plugin of pytest: the names of the tests that passed."""

    def __init__(self) -> None:
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid.rpartition("::")[2])


def main() -> int:
    import pytest

    sys.path.insert(0, str(ROOT / "tests"))
    record = Record()
    files = [str(ROOT / "tests" / name) for name in TESTS]
    pytest.main(["-q", *files, "-k", "not the_page_says"], [record])  # that one compares what is written here
    from formats_matrix import case_table, pair_table

    def passed(test: str) -> bool:
        return test in record.passed

    def table(found: re.Match[str]) -> str:
        made = pair_table(passed) if found[2] == "pairs" else case_table(found[2], passed)
        return f"{found[1]}{made}\n\n"

    path = ROOT / "docs" / "formats.md"
    before = path.read_text(encoding="utf-8")
    after = PLACE.sub(table, before)
    if after != before:
        path.write_text(after, encoding="utf-8")
        print("formats.md: renewed")
    gaps = after.count("not shown")
    print(f"{len(record.passed)} tests passed; {gaps} cells are not shown by one")
    return 1 if gaps else 0


if __name__ == "__main__":
    sys.exit(main())
