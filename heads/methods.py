"""Every method by its name; a new one is its file, an entry here and nothing else."""

from __future__ import annotations

from .base import DraftHead
from .eagle1 import Eagle1
from .eagle3 import Eagle3
from .hydra import Hydra
from .medusa import Medusa
from .mlp_speculator import MlpSpeculator

METHODS: dict[str, type[DraftHead]] = {head.method: head for head in (Medusa, Eagle3, Eagle1, Hydra, MlpSpeculator)}
TRAINABLE = {name: head for name, head in METHODS.items() if head.trainable}
