"""Load a tokenizer, name it by a hash, and encode text in bulk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_geo.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["encoder", "end_of_text", "load_tokenizer", "tokenizer_hash"]

#: Shown to tokenizers that have no file form of their own.
_PROBE = "The 2 quick foxes,\n\n  naïve & 日本語: isn't it?\t<|endoftext|>"


def load_tokenizer(spec: str = "builtin") -> PreTrainedTokenizerFast:
    """Load the shipped tokenizer, one in a folder, or one by hub name.

    "builtin" is a byte-level BPE of 4096 tokens trained on the training parts of
    the four shipped corpora; ``<|endoftext|>`` is its only special token.

    Raises:
        ModelError: nothing loadable lies there, or it has no end-of-text token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if spec == "builtin":
        with resources.as_file(resources.files("flower_geo.data") / "tokenizer") as folder:
            return _fast(PreTrainedTokenizerFast.from_pretrained(str(folder)))
    is_folder = Path(spec).is_dir()
    if not is_folder and (Path(spec).exists() or spec.startswith((".", "/", "~"))):
        raise ModelError(
            f"tokenizer {spec!r} is no folder: give a folder that holds tokenizer.json, "
            "or 'builtin'"
        )
    try:
        loaded = AutoTokenizer.from_pretrained(spec, local_files_only=is_folder)
    # transformers raises OSError, ValueError, KeyError, ... for what a folder lacks.
    except Exception as error:
        place = "folder" if is_folder else "hub name"
        mend = (
            "save the model's tokenizer into it, or set tokenizer=builtin"
            if is_folder
            else "download it to a folder and give that, or set tokenizer=builtin"
        )
        raise ModelError(f"no tokenizer can be loaded from {place} {spec!r}: {mend}") from error
    if loaded.eos_token_id is None:
        raise ModelError(
            f"tokenizer {spec!r} has no end-of-text token: set eos_token in its "
            "tokenizer_config.json"
        )
    return _fast(loaded)


def tokenizer_hash(tok: PreTrainedTokenizerFast) -> str:
    """Hex sha256 of everything that decides which ids a text becomes.

    Covers vocabulary, merges, normaliser, pre-tokeniser, added tokens and the
    end-of-text id.  Truncation and padding, which a call may leave behind, and
    settings at their off value, which a newer library may add, do not count.
    """
    backend = getattr(tok, "backend_tokenizer", None)
    if backend is None:
        shape: Any = {"vocab": tok.get_vocab(), "probe": list(tok.encode(_PROBE))}
    else:
        shape = json.loads(backend.to_str())
        for key in ("version", "truncation", "padding"):
            shape.pop(key, None)
        shape = _pruned(shape)
    text = json.dumps([shape, tok.eos_token_id], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def encoder(tok: PreTrainedTokenizerFast) -> Callable[[Sequence[str]], list[list[int]]]:
    """A function from a batch of texts to their ids, with no special tokens added.

    A special token spelled out in a text is encoded as the letters it is made
    of: a site's text must not be able to end a document from within.
    """
    backend = getattr(tok, "backend_tokenizer", None)
    if backend is None:

        def slow(texts: Sequence[str]) -> list[list[int]]:
            return [list(tok.encode(text, add_special_tokens=False)) for text in texts]

        return slow
    # A copy: the caller's tokenizer keeps its own settings.
    copy = type(backend).from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = True

    def fast(texts: Sequence[str]) -> list[list[int]]:
        encoded = copy.encode_batch_fast(list(texts), add_special_tokens=False)
        return [item.ids for item in encoded]

    return fast


def end_of_text(tok: PreTrainedTokenizerFast) -> int:
    """The id put after each document.

    Raises:
        DataError: the tokenizer has none.
    """
    token = tok.eos_token_id
    if not isinstance(token, int):
        raise DataError("the tokenizer has no end-of-text token: set tokenizer.eos_token")
    return token


def _fast(loaded: Any) -> PreTrainedTokenizerFast:
    """Types only: transformers declares a wider return type than it returns."""
    result: PreTrainedTokenizerFast = loaded
    return result


def _pruned(node: Any) -> Any:
    if isinstance(node, dict):
        pruned = {key: _pruned(value) for key, value in node.items()}
        return {k: v for k, v in pruned.items() if v is not None and v is not False}
    if isinstance(node, list):
        return [_pruned(value) for value in node]
    return node
