"""A second device, emulated: its tensors compute on the CPU, but must not meet tensors that lie there.

Where there is no GPU, this finds what would go wrong on one: a mask that was made on the CPU, an index that was not
moved, a figure of the device among those of the host. `Elsewhere` is a tensor on the device; inside `On()` the device
can be named in `torch.zeros(..., device="elsewhere")`, `.to("elsewhere")` and the like.

    python tests/elsewhere.py        runs all cases below, a line each

It is a process of its own (tests/test_elsewhere.py starts it), because torch knows the device from then on.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

NAME = "elsewhere"
INDEXING = ("aten.index.", "aten._unsafe_index.", "aten.index_put", "aten._index_put_impl_")
MOVING = ("aten.to.", "aten._to_copy.", "aten.copy_.")


class Elsewhere(Tensor):
    """A tensor of the device around one of the CPU, `raw`."""

    raw: Tensor

    @staticmethod
    @torch.inference_mode(False)  # else a view of it could not be made in inference mode
    def __new__(cls, raw: Tensor) -> Elsewhere:
        facts = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, raw.size(), device=torch.device(NAME, 0), **facts)  # type: ignore
        made.raw = raw
        return made  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({self.raw!r})"

    def tolist(self) -> Any:
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class On(TorchDispatchMode):
    """While it is open, the device can be named."""

    def __enter__(self) -> Any:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor([...], device=...) then asks here for the move
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(False)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on the CPU, whose result lies where a device says, else where the operands lie.

    Raises:
        RuntimeError: the operands lie in two places.
    """
    there = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Elsewhere)]
    if there and not str(func).startswith(MOVING):
        _refuse_mixture(func, args, kwargs)
    asked = next((one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.device)), None)
    plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
    with _disable_current_modes():
        result = func(*plain_args, **plain_kwargs)
    if str(func).startswith("aten.copy_."):
        return args[0]
    if (asked.type if asked else NAME if there else "cpu") != NAME:
        return result
    wrapped = tree_map(lambda one: Elsewhere(one) if isinstance(one, Tensor) else one, result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if there else wrapped


def _refuse_mixture(func: Any, args: Any, kwargs: Any) -> None:
    """As a GPU does: numbers (tensors without dimensions) and indices may come from the CPU."""
    if str(func).startswith(INDEXING):
        args = (args[0], *args[2:])
    operands = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    here = [tuple(one.shape) for one in operands if not isinstance(one, Elsewhere) and one.ndim]
    if here and any(isinstance(one, Elsewhere) for one in operands):
        raise RuntimeError(f"{func}: tensors of two devices meet; on the CPU lie those of shapes {here}")


def _plain(value: Any) -> Any:
    if isinstance(value, Elsewhere):
        return value.raw
    return torch.device("cpu") if isinstance(value, torch.device) else value


def register() -> None:
    """Tell torch of the device, once in a process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    module = getattr(torch, NAME)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None


# -- cases -----------------------------------------------------------------------------------------------------------


def mixtures() -> None:
    """The emulation itself: what it computes, what it refuses, what it lets pass."""
    here, there = torch.ones(2, 3), torch.arange(6.0, device=NAME).view(2, 3)
    there[1] = 7
    assert there.cpu().tolist() == [[0, 1, 2], [7, 7, 7]]
    assert (there * torch.tensor(2.0))[torch.tensor([1, 0]), :1].device.type == NAME
    wrong: list[Callable[[], Any]] = [lambda: there + here, lambda: here.where(there > 0, 0.0), lambda: here @ there.T]
    for case in wrong:
        with pytest.raises(RuntimeError, match="two devices meet"):
            case()


def generation() -> None:
    """Every head in every form of tree, lookup and plain decoding: greedy tokens are those of the CPU."""
    import zoo
    from headstart.heads.methods import METHODS
    from headstart.inference.generator import Generator
    from headstart.inference.plain import decode_group

    backbone, prompts = zoo.backbone(), [[1, 5, 6, 7], [1, 9, 8]]
    options = {"max_new_tokens": 10, "temperature": 0}
    expected = [Generator(backbone).generate(prompt, **options).tokens for prompt in prompts]
    heads = {method: METHODS[method].build(backbone) for method in METHODS}
    moved = zoo.backbone()
    moved.model.to(NAME)
    assert moved.device.type == NAME
    trees = ("chain:3", "static:0,1,0.0,1.0", "dynamic:3x2x5")
    sides = [Generator(moved), Generator(moved, "ngram"), Generator(moved, "suffix")]
    sides += [Generator(moved, "exit:1", tree=tree) for tree in ("chain:3", "dynamic:3x3x6", "gain:3x3")]
    sides += [Generator(moved, "hybrid:exit:1")]
    sides += [Generator(moved, head, tree=tree) for head in heads.values() for tree in trees]
    for side in sides:
        assert [side.generate(torch.tensor(prompt), **options).tokens for prompt in prompts] == expected
    assert decode_group(moved, prompts, max_new_tokens=10, eos=frozenset()) == decode_group(
        backbone, prompts, max_new_tokens=10, eos=frozenset()
    )


def sampling() -> None:
    """Processors run there, the noise comes from here."""
    import zoo
    from headstart.heads.methods import METHODS
    from headstart.inference.generator import Generator
    from headstart.inference.plain import decode_group

    options = {"max_new_tokens": 8, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 3}
    expected = Generator(zoo.backbone()).generate([1, 5, 6], **options).tokens
    moved = zoo.backbone()
    moved.model.to(NAME)
    for method in METHODS:
        head = METHODS[method].build(moved)
        assert Generator(moved, head).generate([1, 5, 6], **options).tokens == expected
    options["max_new_tokens"] = 4
    assert decode_group(moved, [[1, 5, 6]], **options) == decode_group(zoo.backbone(), [[1, 5, 6]], **options)


def training() -> None:
    """For every method the run sheet, two steps, evaluation and a checkpoint."""
    from accelerate.state import AcceleratorState, PartialState

    import zoo
    from headstart.data.prepare import PrepareSettings, prepare
    from headstart.files import write_jsonl
    from headstart.heads.methods import TRAINABLE
    from headstart.training import setup
    from headstart.training.loop import train
    from headstart.training.recipe import Recipe
    from headstart.training.sheet import check

    made = setup._accelerator

    def accelerator(recipe: Recipe) -> Any:
        """The usual one, but on this device."""
        AcceleratorState._reset_state(True)
        os.environ["ACCELERATE_USE_CPU"] = "true"
        found = made(recipe)
        os.environ.pop("ACCELERATE_USE_CPU")
        for state in (PartialState, AcceleratorState):
            state._shared_state["device"] = torch.device(NAME, 0)
        assert found.device.type == NAME
        return found

    setup._accelerator = accelerator
    moved = zoo.backbone()
    moved.model.to(NAME)
    with tempfile.TemporaryDirectory() as folder:
        chats, data = Path(folder) / "chats.jsonl", Path(folder) / "data"
        write_jsonl(chats, ({"messages": messages} for messages in zoo.chats(12)))
        prepare(moved, PrepareSettings(input=[str(chats)], out=data))
        for method in TRAINABLE:
            overrides = {
                "data.train": [str(data)], "data.held_out": 0.3, "batch.rows": 4, "optim.max_steps": 2, "log.every": 1,
                "evaluate.prompts": 1, "evaluate.max_new_tokens": 4, "precision.autocast": "no",
            }  # fmt: skip
            recipe = Recipe(backbone="tiny", run=Path(folder) / method, method=method)
            check(recipe, overrides, backbone=moved)
            train(recipe, overrides, backbone=moved)


def spread() -> None:
    """A backbone over two devices, in one way and the other round: every head, lookup, rows of a batch, compiled."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    import zoo
    from headstart.heads import compiled
    from headstart.heads.methods import METHODS
    from headstart.inference.generator import Generator

    compiled.BACKEND = None  # the shapes alone: no compiler knows the device
    prompts: list[list[int]] = [[1, 5, 6, 7], [1, 9, 8]]
    options = {"max_new_tokens": 10, "temperature": 0}
    for family, first in (("llama", "cpu"), ("mistral", NAME)):
        expected = [output.tokens for output in Generator(zoo.backbone(family)).generate(prompts, **options)]
        backbone = zoo.backbone(family)
        second = NAME if first == "cpu" else "cpu"
        decoder = backbone.decoder
        places = {decoder.embed_tokens: first, decoder.norm: second, backbone.model.lm_head: second}
        places |= {layer: first if number < 2 else second for number, layer in enumerate(backbone.layers)}
        for module, place in places.items():  # as accelerate does for a device_map
            add_hook_to_module(module.to(place), AlignDevicesHook(execution_device=torch.device(place)))  # type: ignore
        assert backbone.device.type == first
        assert {weight.device.type for weight in backbone.model.parameters()} == {"cpu", NAME}
        heads = {method: METHODS[method].build(backbone) for method in METHODS}
        for drafter in (None, "ngram", heads["eagle3"]):
            together = Generator(backbone, drafter).generate(prompts, **options)
            assert [output.tokens for output in together] == expected
            assert Generator(backbone, drafter, compile=True).generate(prompts[0], **options).tokens == expected[0]
        for head in heads.values():
            assert Generator(backbone, head, tree="dynamic:3x2x5").generate(prompts[0], **options).tokens == expected[0]


CASES = (mixtures, generation, sampling, training, spread)


def main() -> None:
    register()
    with On():
        for case in CASES:
            try:
                case()
                print(f"ok {case.__name__}")
            except Exception:
                print(f"FAILED {case.__name__}\n{traceback.format_exc()}")


if __name__ == "__main__":
    sys.exit(main())
