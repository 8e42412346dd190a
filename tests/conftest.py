"""One thread for tiny models: two of them waiting for each other on a busy machine cost ten times the work.

And Ctrl-C as a person has it: a run that was started in the background inherits that it is ignored, and so would all
processes that the tests start.
"""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the processes that tests start
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
