"""Every method by its name; a new one is its file, an entry here and nothing else."""

from __future__ import annotations

from .base import DraftHead
from .eagle1 import Eagle1
from .eagle3 import Eagle3
from .medusa import Medusa

METHODS: dict[str, type[DraftHead]] = {head.method: head for head in (Medusa, Eagle3, Eagle1)}
