"""A folder in the Hub's shape, so that `model.generate(custom_generate="folder", trust_remote_code=True)` drafts.

`write_door` writes its `custom_generate/generate.py`, whose few lines end up in `through`. What transformers hands over
there is what `generate` was called with, streamer and stop strings included.

Letters: B rows, T positions.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteriaList

from ..errors import UserError
from ..files import write_whole
from ..heads.backbone import Backbone
from ..heads.format import load_head
from .drafters import is_name
from .generator import Generator
from .options import stopping_at

SCRIPT = '''"""Generation with a draft head: the model's own tokens, sooner. Needs `pip install headstart`."""


def generate(model, head={head!r}, tree={tree!r}, **arguments):
    from headstart.inference.folder import through

    return through(model, head, tree, **arguments)
'''


def write_door(folder: str | Path, head: str | Path | None = None, tree: str | None = None) -> Path:
    """Write `custom_generate/generate.py` into a folder, so that `model.generate(custom_generate="folder",
    trust_remote_code=True)` drafts with a head.

    Args:
        head: the folder or Hub id of the head, or the name of another drafter; None: `folder` itself, as an absolute
            path. Callers may give another one as `head=...`.
        tree: form of the drafts; callers may give another one as `tree=...`.

    Returns:
        The folder.
    """
    folder = Path(folder)
    named = str(folder.resolve() if head is None else head)
    write_whole(folder / "custom_generate" / "generate.py", SCRIPT.format(head=named, tree=tree))
    write_whole(folder / "custom_generate" / "requirements.txt", "headstart\n")
    return folder


_MADE: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, str | None], Generator]] = weakref.WeakKeyDictionary()


def through(
    model: Any,
    head: str,
    tree: str | None = None,
    *,
    inputs: Any = None,
    streamer: Any = None,
    tokenizer: Any = None,
    **arguments: Any,
) -> Any:
    """`model.generate(inputs, **arguments)` with a head, streamers and stop strings included.

    Args:
        head: the folder or Hub id of a head, or the name of another drafter.
    """
    generator = _generator(model, head, tree, tokenizer)
    arguments = _with_stop_strings(model, arguments, tokenizer)

    # transformers hands over what stands here by name, besides what it has prepared
    def decode(model: Any, input_ids: Tensor, seed: int | None = None, rule: str | None = None, **prepared: Any) -> Any:
        return generator(model, input_ids, seed=seed, rule=rule, streamer=streamer, **prepared)

    # of the class: the model's own `generate` may be this very function
    return type(model).generate(model, inputs, custom_generate=decode, **arguments)


def _generator(model: nn.Module, head: str, tree: str | None, tokenizer: Any) -> Generator:
    made = _MADE.setdefault(model, {})
    if (head, tree) not in made:
        backbone = Backbone(model, tokenizer)
        made[head, tree] = Generator(backbone, head if is_name(head) else load_head(head, backbone), tree=tree)
    return made[head, tree]


def _with_stop_strings(model: Any, arguments: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The arguments with stop strings as a criterion: a callable is not handed the tokenizer that they need."""
    arguments = dict(arguments)
    config = arguments.get("generation_config") or model.generation_config
    strings = arguments.pop("stop_strings", None) or config.stop_strings
    if strings is None:
        return arguments
    if tokenizer is None:
        raise UserError("stop_strings need a tokenizer: generate(..., stop_strings=..., tokenizer=tokenizer)")
    if config.stop_strings is not None:
        arguments["generation_config"] = GenerationConfig.from_dict({**config.to_dict(), "stop_strings": None})
    own = list(arguments.get("stopping_criteria") or [])
    return {**arguments, "stopping_criteria": StoppingCriteriaList([*own, stopping_at(strings, tokenizer)])}
