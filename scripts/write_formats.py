"""Write the tables of docs/formats.md, from the cases that tests/test_exchange.py tries.

    python scripts/write_formats.py

A table stands below a comment that names it, `[matrix]: # "pairs"` or `[matrix]: # "eagle3"`, up to an empty line.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(r'^(\[matrix\]: # "(\w+)"\n\n)(?:\|.*\n)*\n?', re.MULTILINE)


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from formats_matrix import case_table, pair_table

    path = ROOT / "docs" / "formats.md"
    before = path.read_text(encoding="utf-8")
    tables = {"pairs": pair_table}
    after = PLACE.sub(lambda m: m[1] + tables.get(m[2], lambda: case_table(m[2]))() + "\n\n", before)
    if after != before:
        path.write_text(after, encoding="utf-8")
        print("formats.md: renewed")


if __name__ == "__main__":
    main()
