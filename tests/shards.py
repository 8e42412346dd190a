"""What each of two processes holds of a sharded backbone, and that none of them waits for ever.

    accelerate launch --config_file configs/accelerate-zero3.json --num_processes 2 tests/shards.py RECIPE

tests/test_distributed.py starts it. It ends with `all well`, or with what is wrong.
"""

from __future__ import annotations

import sys

import pytest
import torch

import zoo
from headstart.errors import UserError
from headstart.heads.medusa import Medusa
from headstart.heads.vocab import DraftVocab
from headstart.inference.generator import Generator
from headstart.training import checkpoints
from headstart.training.evaluate import evaluate
from headstart.training.processes import in_step
from headstart.training.recipe import load_recipe
from headstart.training.setup import set_up

plain = zoo.backbone()
ids = torch.arange(3, 23)[None]  # (1, T)
setup = set_up(load_recipe(sys.argv[1], sys.argv[2:]))
backbone, rank, world = setup.backbone, setup.accelerator.process_index, setup.accelerator.num_processes
assert world == 2

# B055, B058: a half of the layers each; what the head borrows is whole, and tied where it was tied
held = sum(
    getattr(one, "_local_tensor", getattr(one, "ds_tensor", one)).numel() for one in backbone.layers.parameters()
)
whole = sum(one.numel() for one in plain.layers.parameters())
assert held <= 0.5 * whole + 64 * len(list(plain.layers.parameters())), f"{held} of {whole} weights of the layers"
assert all(torch.equal(one, other) for one, other in zip(
    [*backbone.borrowed[0].parameters(), *backbone.borrowed[1].parameters(), *backbone.borrowed[2].parameters()],
    [*plain.borrowed[0].parameters(), *plain.borrowed[1].parameters(), *plain.borrowed[2].parameters()], strict=True,
))  # fmt: skip
some = DraftVocab(torch.tensor([3, 9, 40]), zoo.VOCAB)
for projection in Medusa.build(backbone, vocab=some, num_heads=2, projection="own").projections:
    assert torch.equal(projection.weight, plain.output_weight[[3, 9, 40]])

# B052: the backbone is the one on disk, and a forward of the shards is a forward of the whole
assert backbone.fingerprint() == plain.fingerprint() == setup.facts()["the backbone's weights"]
with torch.no_grad():
    found, expected = (one.forward(ids, taps=(0, 2, 4)) for one in (backbone, plain))
torch.testing.assert_close(found.last, expected.last, rtol=0, atol=1e-5)
torch.testing.assert_close(found.taps, expected.taps, rtol=0, atol=1e-5)

# the first process has four prompts, the second none; then one each, of which one is done at once
prompts = [ids[0, :n].tolist() for n in (4, 9, 15, 20)]
for mine in (prompts if rank == 0 else [], prompts[rank : rank + 1]):
    with in_step(setup.layout, backbone):
        for prompt in mine:
            tokens = [
                Generator(one).generate(prompt, max_new_tokens=24 if rank == 0 else 1, do_sample=False).tokens
                for one in (backbone, plain)
            ]
            assert tokens[0] == tokens[1]
evaluate(setup)
evaluate(setup)

# B053: what is saved is the head, whole
tensors = {name: one.clone() for name, one in setup.layout.weights(setup.objective).items()}
fresh = type(setup.head)(setup.head.config, setup.head.vocab).state_dict()
assert {name: one.shape for name, one in tensors.items()} == {name: one.shape for name, one in fresh.items()}
setup.layout.load_weights(setup.objective, {name: one + 1 for name, one in tensors.items() if one.is_floating_point()}
                          | {name: one for name, one in tensors.items() if not one.is_floating_point()})  # fmt: skip
again = setup.layout.weights(setup.objective)
assert all(torch.equal(again[name], one + 1) for name, one in tensors.items() if one.is_floating_point())
assert not setup.recipe.run.exists() or not checkpoints.checkpoints(setup.recipe.run)

with pytest.raises(UserError, match="optim.name is muon"):  # on pieces of matrices
    set_up(load_recipe(sys.argv[1], [*sys.argv[2:], "optim.name=muon"]))
print("all well")
