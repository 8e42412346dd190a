"""The verbs of the command line, room by room.

Each room's table costs nothing to import: the rooms themselves are imported inside the functions, and help reads the
settings classes from source.
"""

from __future__ import annotations

from headstart.verb import Verb
from headstart.verbs_data import DATA
from headstart.verbs_heads import HEADS
from headstart.verbs_inference import INFERENCE
from headstart.verbs_training import TRAINING

VERBS: dict[str, Verb] = {**HEADS, **DATA, **TRAINING, **INFERENCE}
