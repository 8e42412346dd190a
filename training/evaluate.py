"""How good a head is on held-out conversations: loss, accuracy by depth, estimated and measured acceptance length.

A hit is a drafter's first choice that is also the backbone's, among all tokens: where the backbone prefers one outside
the draft vocabulary, that is a miss. The text is that of the data, for the drafter as for the backbone.

Letters: B rows, T positions, D depths, M_d anchors of depth d, J positions of the teacher, H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..heads.backbone import Backbone
from ..inference.drafters import DEFAULT_SHAPE
from ..inference.generator import Generator
from ..inference.stats import Stats, expected_tokens, merge
from ..inference.tree import Shape, limited, parse_shape
from .batches import Batch, Rows, anchors, forwards
from .estimate import Estimate
from .objective import Objective
from .processes import gathered, in_step
from .setup import Setup

LOGITS = 1 << 24  # full-vocabulary logits held at a time


@dataclass
class Counts:
    """Sums over held-out anchors, (D,) each."""

    anchors: Tensor
    counted: Tensor
    """Anchors that the loss counts."""
    losses: Tensor
    hits: Tensor
    reached: Tensor
    """Anchors at which every depth above hit."""
    kept: Tensor
    """Of these, those that hit, too."""

    def figures(self, shares: Tensor) -> dict[str, Any]:
        """What is reported. The estimate is for a chain as deep as the head was trained."""
        losses = self.losses / self.counted.clamp(min=1)
        conditional = (self.kept / self.reached.clamp(min=1)).tolist()
        return {
            "loss": float((losses * shares.to(losses)).sum()),
            "loss_by_depth": losses.tolist(),
            "accuracy": (self.hits / self.anchors.clamp(min=1)).tolist(),
            "conditional_accuracy": conditional,
            "estimated_acceptance_length": expected_tokens(conditional),
        }


def evaluate(setup: Setup) -> dict[str, Any]:
    """All figures on the held-out rows; empty if none are held out.

    Each process takes its share of rows and prompts, in step where the backbone is sharded, and all know the sums.
    """
    rows, wanted, accelerator = setup.held_out, setup.recipe.evaluate, setup.accelerator
    if not len(rows):
        return {}
    rank, world = accelerator.process_index, accelerator.num_processes
    head, figures, shape = setup.head, {}, tree(setup)
    head.eval()
    try:
        with setup.layout.whole():
            if wanted.rows:
                mine = range(len(rows))[: wanted.rows][rank::world]
                batches = forwards(rows, mine, setup.recipe.batch)
                estimate = Estimate(shape, shape.depth)
                with in_step(setup.layout, setup.backbone):
                    batches = [one.to(accelerator.device) for one in batches]
                    sums, apart = count(setup.objective, batches, estimate), setup.objective.distance(batches)
                _add_up(accelerator, sums, *vars(sums))
                _add_up(accelerator, estimate, "walked")
                figures = sums.figures(setup.objective.shares.cpu())
                figures |= {"tree": str(shape), "estimated_acceptance_length": estimate.length}
                if apart is not None:
                    total, positions = accelerator.reduce(apart, "sum").tolist()
                    figures["divergence"] = total / max(positions, 1)
            if wanted.prompts:
                with in_step(setup.layout, setup.backbone):
                    stats = _measured(setup, prompts(rows, wanted.prompts)[rank::world])
                stats = merge(gathered(accelerator, stats))
                figures |= {
                    "tree": str(shape),
                    "acceptance_length": stats.acceptance_length,
                    "acceptance": stats.acceptance,
                }
    finally:
        head.train()
    return figures


@torch.no_grad()
def count(objective: Objective, batches: Iterable[Batch], estimate: Estimate | None = None) -> Counts:
    """Sums over batches, of an estimate for a tree, too."""
    depths = objective.depths
    sums = Counts(*(torch.zeros(depths) for _ in range(6)))
    for batch in batches:
        features = objective.features(batch)
        found = anchors(batch.mask, depths)
        result = objective(batch, features, torch.ones(depths, device=batch.ids.device))
        taught = found[0] + 1  # (J,)
        truth = objective.head.vocab.to_draft(first_choices(objective.backbone, features.last.flatten(0, 1)[taught]))
        sums.losses += result.losses.cpu()
        sums.counted += objective.counts(batch)[:depths]
        alive = torch.ones(len(taught), dtype=torch.bool, device=taught.device)  # (M_d,) hits at every depth so far
        for depth, at in enumerate(found):
            hits = result.tops[depth] == truth[torch.searchsorted(taught, at + 1 + depth)]
            if depth:
                alive = alive[torch.searchsorted(found[depth - 1], at)]
            sums.anchors[depth] += len(at)
            sums.hits[depth] += hits.sum().cpu()
            sums.reached[depth] += alive.sum().cpu()
            alive = alive & hits
            sums.kept[depth] += alive.sum().cpu()
        if estimate is not None:
            estimate.add(objective, batch, features, truth)
    return sums


def first_choices(backbone: Backbone, last: Tensor) -> Tensor:
    """(J,) the backbone's own argmax over its whole vocabulary, from (J, H) states behind the final norm."""
    size = max(1, LOGITS // backbone.vocab_size)
    return torch.cat([backbone.logits(part).max(-1).indices for part in torch.split(last, size)])


def prompts(rows: Rows, number: int) -> list[list[int]]:
    """Up to `number` prompts: each row up to where its first reply begins."""
    found: list[list[int]] = []
    for row in range(len(rows)):
        ids, mask = rows[row]
        start = int(mask.argmax())
        if start and len(found) < number:
            found.append(ids[:start].tolist())
    return found


def tree(setup: Setup) -> Shape:
    """The form of the drafts: what the recipe says, or what generation takes for such a head."""
    wanted, deepest = setup.recipe.evaluate.tree, setup.head.max_depth
    shape = DEFAULT_SHAPE if wanted is None else parse_shape(wanted)
    return limited(shape, deepest or shape.depth)


def _add_up(accelerator: Any, sums: Any, *names: str) -> None:
    """These sums, over all processes."""
    for name in names:
        setattr(sums, name, accelerator.reduce(getattr(sums, name).to(accelerator.device), "sum").cpu())


def _measured(setup: Setup, mine: Sequence[list[int]]) -> Stats:
    """The head at work, greedily."""
    wanted = setup.recipe.evaluate
    generator = Generator(setup.backbone, setup.head, tree=tree(setup))
    room = setup.backbone.max_positions - wanted.max_new_tokens
    return merge(
        generator.generate(prompt, max_new_tokens=wanted.max_new_tokens, do_sample=False).stats
        for prompt in mine
        if len(prompt) <= room
    )
