"""From a name, a folder, a GGUF file or a hub name to a model."""

from __future__ import annotations

import difflib
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError

from flower_geo.errors import ModelError
from flower_geo.models.gguf import as_plain, gguf_arguments, gguf_file, is_gguf, no_bars
from flower_geo.models.table import MODELS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = [
    "apart_from_random",
    "build_model",
    "first_layers",
    "first_line",
    "local_folder",
    "meta_model",
    "model_config",
    "parameter_count",
    "quiet",
]

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

#: What transformers raises for a model it cannot make sense of (a cut GGUF file: struct.error).
_LOAD_ERRORS = (
    OSError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, ImportError,
    struct.error,
)  # fmt: skip


def build_model(
    spec: str, *, seed: int, vocab_size: int | None = None, max_seq_len: int | None = None
) -> PreTrainedModel:
    """Build or load a causal language model: fp32, on the CPU, in training mode.

    A named model (``MODELS``) gets random weights that are a function of
    (``spec``, ``seed``, ``vocab_size``, ``max_seq_len``) alone: the caller's
    random state, default dtype and default device neither matter nor change.
    Equal torch and transformers versions on equal processor families give equal
    bits; a content hash tells where they did not.

    Args:
        spec: a name in ``MODELS``, a local Hugging Face folder, a GGUF file, or
            a hub name.
        seed: of the random weights; unused where weights are loaded.
        vocab_size: rows of a named model's embedding; None = the table's.
            Loaded models keep their own (see ``check_vocab``).
        max_seq_len: longest sequence in tokens the model must take.  A named
            model is built for it, a loaded one is checked against it.

    Raises:
        ModelError: unknown name, folder without config, weights or tokenizer,
            weights that do not fit, hub out of reach, or too short a context.
    """
    _check_sizes(vocab_size, max_seq_len)
    if spec in MODELS:
        config = model_config(spec, vocab_size=vocab_size, max_seq_len=max_seq_len)
        model = _from_config(config, seed)
    else:
        model = _load(spec)
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if max_seq_len is not None and limit is not None and max_seq_len > limit:
            raise ModelError(
                f"model {spec} takes at most {limit} tokens and {max_seq_len} are asked for; "
                f"set seq-len to {limit} or less"
            )
    if getattr(model, "loss_type", None) is None:
        # transformers finds no loss for GPT-2's class name, warns, and takes this one.
        model.loss_type = "ForCausalLM"
    model.train()
    return model


def parameter_count(spec: str, vocab_size: int | None = None) -> int:
    """Number of trainable values of a model, tied tensors once; allocates no weights.

    Raises:
        ModelError: the model is unknown or its config cannot be read.
    """
    return sum(parameter.numel() for parameter in meta_model(spec, vocab_size).parameters())


def meta_model(spec: str, vocab_size: int | None = None) -> PreTrainedModel:
    """The model of ``spec`` with shapes and no storage."""
    config = model_config(spec, vocab_size=vocab_size)
    with torch.device("meta"):
        return _instantiate(config)


def model_config(
    spec: str, *, vocab_size: int | None = None, max_seq_len: int | None = None
) -> PreTrainedConfig:
    """The transformers config of a named model, a folder, a GGUF file or a hub name.

    Raises:
        ModelError: there is no such model, or its config cannot be read.
    """
    from transformers import AutoConfig

    named = MODELS.get(spec)
    if named is not None:
        values = named.config_values(vocab_size, max_seq_len)
        return AutoConfig.for_model(named.family, **values)
    folder = local_folder(spec)
    try:
        with quiet():
            config = AutoConfig.from_pretrained(
                folder or spec,
                trust_remote_code=False,
                local_files_only=folder is not None,
                **({"gguf_file": gguf_file(spec).name} if is_gguf(spec) else {}),
            )
    except _LOAD_ERRORS as error:
        raise _unusable(spec, folder, error) from error
    return cast("PreTrainedConfig", config)


def _instantiate(config: PreTrainedConfig) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    try:
        with quiet():
            model = build(config, dtype=torch.float32, trust_remote_code=False)
    except _LOAD_ERRORS as error:
        raise ModelError(
            f"a {config.model_type} model cannot be built as a causal language model: "
            f"{first_line(error)}; choose a decoder-only model"
        ) from error
    return cast("PreTrainedModel", model)


#: The generator that models are drawn from is the whole process's: one build at a time.
_drawing = threading.Lock()


@contextmanager
def apart_from_random() -> Iterator[None]:
    """Build something on the CPU and leave the process's random state as it was.

    Only the CPU generator is looked at: other threads' builds wait.
    """
    with _drawing, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        yield


def _from_config(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    with apart_from_random():
        # torch.manual_seed would also reseed every CUDA device.
        torch.default_generator.manual_seed(seed)
        return _instantiate(config)


def first_layers(spec: str, layers: int) -> PreTrainedModel:
    """Load only the first ``layers`` blocks of a folder, a GGUF file or a hub model: fp32, CPU.

    Raises:
        ModelError: as ``build_model``, or the model has fewer blocks.
    """
    model = _load(spec, layers)
    model.train()
    return model


def _load(spec: str, layers: int | None = None) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    folder = local_folder(spec)
    packed = is_gguf(spec)
    arguments: dict[str, Any] = gguf_arguments(spec) if packed else {}
    if layers is not None:
        arguments["num_hidden_layers"] = layers
    if folder is not None and not packed:
        _check_folder(folder)
    try:
        with quiet(), no_bars() if packed else nullcontext(), apart_from_random():
            loaded = AutoModelForCausalLM.from_pretrained(
                folder or spec,
                dtype=torch.float32,
                use_safetensors=True,
                weights_only=True,
                trust_remote_code=False,
                local_files_only=folder is not None,
                output_loading_info=True,
                **arguments,
            )
    except (*_LOAD_ERRORS, SafetensorError) as error:
        raise _unusable(spec, folder, error) from error
    model, report = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers fills them with random values and goes on.
        raise ModelError(
            f"the weights of model {spec} lack {len(missing)} of its tensors ({missing[0]}, ...); "
            "use a complete checkpoint of a causal language model"
        )
    return as_plain(model) if packed else model


def local_folder(spec: str) -> Path | None:
    """The folder ``spec`` names or its GGUF file lies in, None for what may be a hub name.

    Raises:
        ModelError: it looks like a path and there is no such folder or GGUF file.
    """
    if is_gguf(spec):
        return gguf_file(spec).parent
    path = Path(spec).expanduser()
    if not spec.strip():
        raise ModelError(f"no model is named; use one of {_names()}, or a folder")
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelError(f"model {spec} is a file; give the folder that holds config.json")
    if spec.startswith((".", "~", os.sep)) or spec.count("/") > 1:
        raise ModelError(
            f"model folder {spec} does not exist; give a folder that does, or one of {_names()}"
        )
    return None


def _check_folder(folder: Path) -> None:
    def lacks(what: str, mend: str) -> ModelError:
        return ModelError(f"model folder {folder} has no {what}; {mend}")

    def any_of(names: tuple[str, ...]) -> bool:
        return any((folder / name).is_file() for name in names)

    if not (folder / "config.json").is_file():
        raise lacks("config.json", "give a folder written by save_pretrained")
    if not any_of(_WEIGHTS):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        raise lacks(
            "model.safetensors",
            "pickled weights are not loaded, convert them with save_pretrained"
            if pickled
            else "copy the model's weights into it",
        )
    if not any_of(_TOKENIZER):
        raise lacks("tokenizer", "copy tokenizer.json and tokenizer_config.json into it")


def _unusable(spec: str, folder: Path | None, error: Exception) -> ModelError:
    if is_gguf(spec):
        return ModelError(
            f"GGUF file {spec} cannot be loaded: {first_line(error)}; "
            "give a GGUF of a decoder-only model that transformers knows, or a folder"
        )
    if folder is not None:
        return ModelError(
            f"model folder {folder} cannot be loaded: {first_line(error)}; "
            "give a complete folder written by save_pretrained"
        )
    close = difflib.get_close_matches(spec, list(MODELS), n=1, cutoff=0.6)
    hint = f"did you mean '{close[0]}'? otherwise " if close else ""
    return ModelError(
        f"model '{spec}' is no named model and no folder, and the hub does not give it here "
        f"({type(error).__name__}); {hint}use one of {_names()}, or copy the model into a folder "
        "and give its path"
    )


def _check_sizes(vocab_size: int | None, max_seq_len: int | None) -> None:
    for name, value in (("vocab_size", vocab_size), ("max_seq_len", max_seq_len)):
        if value is not None and value < 1:
            raise ModelError(f"{name}={value} builds no model; use 1 or more")


def _names() -> str:
    return ", ".join(MODELS)


def first_line(error: BaseException) -> str:
    """The first line of an error's text without its full stop, or its type: at most 200 letters."""
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__).rstrip(".")[:200]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and warnings off the terminal."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
