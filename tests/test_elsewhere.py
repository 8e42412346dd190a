"""Devices, without a GPU: an emulated one, on which tensors of the CPU must not turn up (elsewhere.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch knows no devices written in Python",
)


@pytest.fixture(scope="module")
def told() -> str:
    """What all cases say, from a process of their own."""
    script = Path(__file__).parent / "elsewhere.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("case", ["mixtures", "generation", "sampling", "training", "spread"])
def test_nothing_of_the_cpu_is_met_elsewhere(told: str, case: str) -> None:
    assert f"ok {case}" in told.splitlines(), told
