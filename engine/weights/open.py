"""From a model's files to its configuration and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.model_config import ModelConfig
from engine.weights.expected_tensors import check_tensors
from engine.weights.gguf_source import GgufSource
from engine.weights.hf_config import config_from_hf
from engine.weights.safetensors_source import SafetensorsSource
from engine.weights.source import WeightSource
from mesh.errors import ConfigError
from mesh.model_text.model_files import ModelFiles

_MAX_CONFIG_BYTES = 4 << 20


def open_model(files: ModelFiles) -> tuple[ModelConfig, WeightSource]:
    """Open a model: headers are read and checked, no tensor is loaded.

    The caller closes the source (``with source:``) once it has read the tensors. On return every
    tensor that ``expected_tensors(config)`` lists is present with its shape.

    Raises:
        ConfigError: The files are unreadable or malformed, or describe a model the engine cannot
            run exactly; the message names the field or tensor.
    """
    if files.kind == "gguf":
        gguf = GgufSource(files.path)
        return _checked(gguf.config, gguf)
    config = config_from_hf(_read_config(files.path / "config.json"))
    return _checked(config, SafetensorsSource(files.path))


def _checked(config: ModelConfig, source: WeightSource) -> tuple[ModelConfig, WeightSource]:
    try:
        check_tensors(config, source)
    except BaseException:
        source.close()
        raise
    return config, source


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_CONFIG_BYTES + 1)
        if len(content) > _MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_CONFIG_BYTES} bytes")
        return msgspec.json.decode(content, type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
