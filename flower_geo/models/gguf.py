"""Models in GGUF files: what a spec names, and the tokenizer a file holds."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_geo.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["as_plain", "gguf_arguments", "gguf_file", "gguf_tokenizer", "is_gguf", "no_bars"]


def is_gguf(spec: str) -> bool:
    """Whether a model spec is the path of a GGUF file (there or not)."""
    return spec.lower().endswith(".gguf")


def gguf_file(spec: str) -> Path:
    """The GGUF file a spec names, once it can be read.

    Raises:
        ModelError: there is no such file, it is none, or the gguf package is missing.
    """
    path = Path(spec).expanduser()
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(
            f"GGUF file {spec} cannot be read: {error.strerror or error}; give the path of one"
        ) from error
    if magic != b"GGUF":
        raise ModelError(f"{spec} is no GGUF file; download it again, or give a model folder")
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(
            f"reading {spec} needs the gguf package; run pip install 'flower-geo[gguf]'"
        )
    return path


def gguf_arguments(spec: str) -> dict[str, Any]:
    """What ``from_pretrained`` needs beside the file's folder to load it as plain fp32 tensors."""
    from transformers import GgufConfig

    untyped: Any = GgufConfig
    return {"gguf_file": gguf_file(spec).name, "quantization_config": untyped(dequantize=True)}


def as_plain(model: PreTrainedModel) -> PreTrainedModel:
    """Take transformers' marks of a quantised model off one whose tensors were unpacked.

    With them it can neither be saved nor trained.
    """
    untyped: Any = model
    for owner, name in (
        (untyped, "hf_quantizer"),
        (untyped, "quantization_method"),
        (untyped.config, "quantization_config"),
    ):
        if hasattr(owner, name):
            delattr(owner, name)
    untyped.is_quantized = False
    return model


@contextmanager
def no_bars() -> Iterator[None]:
    """Keep the bar of transformers' GGUF reader off the terminal; it has no switch."""
    with redirect_stderr(io.StringIO()):
        yield


def gguf_tokenizer(spec: str) -> PreTrainedTokenizerFast:
    """The tokenizer a GGUF file holds, with its chat template.

    Raises:
        ModelError: the file cannot be read or holds no tokenizer that is known.
    """
    from transformers import AutoTokenizer

    path = gguf_file(spec)
    try:
        loaded: Any = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )
    # transformers raises OSError, ValueError, KeyError, ... for what a file lacks.
    except Exception as error:
        raise ModelError(
            f"no tokenizer can be loaded from {spec}: {type(error).__name__}; "
            "give the tokenizer's own folder"
        ) from error
    if loaded.eos_token_id is None:
        raise ModelError(f"the tokenizer in {spec} has no end-of-text token; give one in a folder")
    tokenizer: PreTrainedTokenizerFast = loaded
    return tokenizer
