"""What names a base model: hashes of its weights, its config and all its tokenizer decides.

Two sites train the same base exactly where these are equal; a site with another
one is told by name what differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flower_geo.durable import file_sha256
from flower_geo.errors import ModelError
from flower_geo.models.build import (
    build_model,
    first_line,
    local_folder,
    meta_model,
    model_config,
    quiet,
)
from flower_geo.models.gguf import is_gguf
from flower_geo.models.table import MODELS

if TYPE_CHECKING:
    from torch import nn

__all__ = ["IDENTITY", "base_identity", "differing"]

#: What is compared, in the order it is named.
IDENTITY = ("weights", "config", "tokenizer", "chat-template", "special-tokens")

#: Config values that say who wrote a file, or what other entries of the identity cover.
_VOLATILE = {
    "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "initializer_range",
    "_model_name_or_path", "_attn_implementation", "pretraining_tp",
}  # fmt: skip

_TOKENS = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")

#: Weight hashes of this process, by the files' stamps or the named model's arguments.
_known: dict[tuple[object, ...], str] = {}


def base_identity(
    spec: str,
    tokenizer: Any,
    *,
    seed: int = 0,
    vocab_size: int | None = None,
    max_seq_len: int | None = None,
    chat_template: str | None = None,
    model: nn.Module | None = None,
) -> dict[str, str]:
    """Hex sha256 of each part of a base model, by the names in ``IDENTITY``.

    Weights are read tensor by tensor, whatever files they are spread over, or as
    the bytes of a GGUF file.  Hashes of unchanged files are kept for the
    process's life.

    Args:
        spec: as for ``build_model``.
        tokenizer: the transformers tokenizer that is used with it.
        seed: of a named model's weights; so are ``vocab_size`` and ``max_seq_len``.
        vocab_size: see ``build_model``.
        max_seq_len: see ``build_model``.
        chat_template: what is used where the tokenizer brings none, or another.
        model: a named model as built, untouched since, to spare building it.

    Raises:
        ModelError: the model is unknown or a file of it cannot be read.
    """
    if spec in MODELS:
        weights = _named(spec, seed, vocab_size, max_seq_len, model)
    elif is_gguf(spec):
        weights = _of_files([Path(spec).expanduser()], lambda files: file_sha256(files[0]))
    else:
        weights = _of_files(_weight_files(spec), lambda files: _hash(_stored(files)))
    return {
        "weights": weights,
        "config": _config(spec, vocab_size, max_seq_len),
        "tokenizer": _tokenizer(tokenizer),
        "chat-template": _digest(chat_template or getattr(tokenizer, "chat_template", None)),
        "special-tokens": _special(tokenizer),
    }


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Names of the parts that differ or are missing; [] for the same base.

    ``theirs`` may come from another party: nothing of it is in the result.
    """
    return [name for name in IDENTITY if name not in theirs or ours.get(name) != theirs[name]]


def _named(
    spec: str, seed: int, vocab: int | None, length: int | None, model: nn.Module | None
) -> str:
    key = (spec, seed, vocab, length)
    if key not in _known:
        if model is None:
            model = build_model(spec, seed=seed, vocab_size=vocab, max_seq_len=length)
        # An adapter on it goes by other names; only the base's own count.
        own = [name for name, _ in meta_model(spec, vocab).named_parameters()]
        live = _base_tensors(model)
        if not live.keys() >= set(own):
            raise ModelError(f"the model given is no {spec}; give the one built for it")
        _known[key] = _hash((name, live[name]) for name in sorted(own))
    return _known[key]


def _base_tensors(model: nn.Module) -> Mapping[str, Tensor]:
    from peft import PeftModel
    from peft.utils.save_and_load import get_base_model_state_dict

    if not isinstance(model, PeftModel):
        return model.state_dict()
    tensors: dict[str, Tensor] = get_base_model_state_dict(model)
    return tensors


def _of_files(files: list[Path], compute: Any) -> str:
    try:
        stamps = [(str(path.resolve()), s.st_size, s.st_mtime_ns) for path in files
                  for s in [path.stat()]]  # fmt: skip
        key = tuple(stamps)
        if key not in _known:
            _known[key] = compute(files)
        return _known[key]
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"the weights {files[0]} cannot be hashed: {first_line(error)}; give a whole model"
        ) from error


def _weight_files(spec: str) -> list[Path]:
    folder = local_folder(spec)
    single, index = (_file(folder, spec, name) for name in
                     ("model.safetensors", "model.safetensors.index.json"))  # fmt: skip
    if single is not None:
        return [single]
    if index is None:
        raise ModelError(f"model {spec} has no model.safetensors to hash; give a complete folder")
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        found = [_file(folder, spec, str(name)) for name in shards]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is no index of weights; give a complete folder") from error
    files = [path for path in found if path is not None]
    if not files or len(files) < len(found):
        raise ModelError(f"model {spec} lacks some of its weight files; give a complete folder")
    return files


def _file(folder: Path | None, spec: str, name: str) -> Path | None:
    """One file of a folder, or of a hub model that is on this machine already."""
    if folder is not None:
        path = folder / Path(name).name
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file

    try:
        with quiet():
            found = cached_file(
                spec, name, local_files_only=True, _raise_exceptions_for_missing_entries=False
            )
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found)


def _stored(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of safetensors files by name, in one order however they are spread."""
    home: dict[str, Path] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            home |= dict.fromkeys(file.keys(), path)
    with ExitStack() as stack:
        opened: dict[Path, Any] = {
            path: stack.enter_context(cast("Any", safe_open(path, framework="pt")))
            for path in files
        }
        for name in sorted(home):
            yield name, opened[home[name]].get_tensor(name)


def _hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _config(spec: str, vocab_size: int | None, max_seq_len: int | None) -> str:
    """What decides how the weights are used; a GGUF file's bytes hold it already."""
    if is_gguf(spec):
        return _digest("gguf")
    config = model_config(spec, vocab_size=vocab_size, max_seq_len=max_seq_len)
    values = config.to_diff_dict()
    return _digest({name: value for name, value in values.items() if name not in _VOLATILE})


def _tokenizer(tokenizer: Any) -> str:
    """Vocabulary, merges, normaliser, splitting and added tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _digest(tokenizer.get_vocab())
    shape = json.loads(backend.to_str())
    # Calls leave truncation and padding behind; they decide nothing here.
    for name in ("version", "truncation", "padding"):
        shape.pop(name, None)
    # By far the largest parts, and no settings: not searched for any.
    model = shape.get("model", {})
    parts = [model.pop(name, None) for name in ("vocab", "merges")]
    return _digest([_without_defaults(shape), parts])


def _special(tokenizer: Any) -> str:
    named = {
        name: [str(token), getattr(tokenizer, f"{name}_token_id", None)]
        for name in _TOKENS
        if (token := getattr(tokenizer, f"{name}_token", None)) is not None
    }
    every = sorted(str(token) for token in tokenizer.all_special_tokens)
    return _digest([named, every])


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _without_defaults(node: Any) -> Any:
    """Settings at their off value, which a newer library may add, do not count."""
    if isinstance(node, dict):
        kept = {key: _without_defaults(value) for key, value in node.items()}
        return {
            key: value for key, value in kept.items() if value is not None and value is not False
        }
    return [_without_defaults(value) for value in node] if isinstance(node, list) else node
