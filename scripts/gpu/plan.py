"""What is done, what matters most first; and what never is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch

from gpu import checks, models, timings
from gpu.models import Size, Subject
from gpu.record import Part, Run, reset_memory
from headstart.heads.format import load_head
from headstart.heads.methods import METHODS, TRAINABLE

NEVER = (
    "several GPUs, DDP and DeepSpeed",
    "batches of requests; only generation of one row at a time is checked",
    "contexts beyond a few hundred tokens",
    "float16, quantised backbones, flash attention, torch.compile and CUDA graphs",
    "other families than Llama, and vocabularies reduced for drafting",
    "real backbones of the sizes that are timed: their acceptance, and so their speed-up, is another one",
)
ROOM = 12 << 30  # bytes that the middle size takes: fp32, float64 for ties, bf16, and training beside it
Made = Callable[[], Subject]


def parts(run: Run) -> list[Part]:
    """All parts, in their order."""
    texts, free = 24 if run.quick else 128, free_memory(run.device)
    size = models.TINY if run.quick else models.MIDDLE if free > ROOM else models.SMALL
    made = cache(lambda: models.random_subject(size, run.device, texts))
    name = f"random Llama {size.name}"
    found, least = list[Part](), 1 if run.quick else 15
    if folder := models.stories_folder():
        real = cache(lambda: models.stories(folder, run.device, texts))
        found.append(Part("stories260K: its story", lambda run: checks.story(run, real()), least))
        found += [*_checks(real, "stories260K", least), _devices(real, least), *_checks(made, name, least)]
    else:
        found += [*_checks(made, name, least), _devices(made, least)]
        run.omit("stories260K, the real model: HEADSTART_TEST_DATA names no folder that holds stories260k/")
    found += _timings(made, name, least)
    if run.device.type != "cuda":
        run.omit("the GPU: this was a trial on the CPU")
    elif large := models.largest(free):
        work = partial(_large, large, made.cache_clear)
        found.append(Part(f"random Llama {large.name}: timings", work, 60, timing=True))
    else:
        run.omit(f"timings of larger models: {free / 2**30:.1f} GiB of GPU memory are free")
    return found


def free_memory(device: torch.device) -> int:
    """Bytes on a GPU; 0 for a CPU, where only small models are for."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _checks(made: Made, name: str, seconds: float) -> Iterator[Part]:
    """The same of every model."""
    for method in TRAINABLE:
        yield Part(f"{name}: {method}, training", partial(_training, made, method), seconds)
    yield Part(f"{name}: equality in fp32", lambda run: checks.equality(run, made(), half=False), seconds)
    yield Part(f"{name}: equality in bf16", lambda run: checks.equality(run, made(), half=True), seconds)
    yield Part(f"{name}: sampling", lambda run: checks.sampling(run, made()), seconds)


def _devices(made: Made, seconds: float) -> Part:
    return Part("devices", lambda run: checks.devices(run, made()), seconds)


def _training(made: Made, method: str, run: Run) -> None:
    checks.training(run, made(), method)


def _timings(made: Made, name: str, seconds: float) -> Iterator[Part]:
    """Of a model whose heads are trained."""

    def heads() -> timings.Heads:
        return {method: load_head(place, made().half) for method, place in made().heads.items()}

    def answers(run: Run) -> None:
        timings.answers(run, made().half, heads(), made().prompts[0])

    yield Part(f"{name}: forwards", lambda run: timings.forwards(run, made().half), seconds, timing=True)
    yield Part(f"{name}: drafts", lambda run: timings.drafts(run, made().half, heads()), seconds, timing=True)
    yield Part(f"{name}: answers", answers, seconds, timing=True)


def _large(size: Size, make_room: Callable[[], None], run: Run) -> None:
    """Timings of a large model, with heads that are not trained."""
    make_room()
    reset_memory(run.device)
    backbone = models.random_backbone(size, run.device, torch.bfloat16)
    timings.forwards(run, backbone)
    heads = {method: METHODS[method].build(backbone).to(backbone.dtype).eval() for method in METHODS}
    timings.drafts(run, backbone, heads)
    timings.answers(run, backbone, heads, [1, *range(3, 67)])
