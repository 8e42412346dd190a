"""One thread for tiny models: two of them waiting for each other on a busy machine cost ten times the work."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the processes that tests start
