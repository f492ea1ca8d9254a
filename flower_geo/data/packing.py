"""From a data spec to packed, cached, memory-mapped training and held-out tokens."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flower_geo.data.cache import VERSION, open_or_build
from flower_geo.data.corpus import PackedCorpus, Split, Tokens
from flower_geo.data.parts import PART
from flower_geo.data.sources import open_source
from flower_geo.data.spec import parse_spec
from flower_geo.data.split import write_splits
from flower_geo.data.tokenizer import encoder, end_of_text, tokenizer_hash
from flower_geo.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["prepare"]


def prepare(
    spec: str,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seq_len: int,
    cache_dir: str | Path,
    held_out: float = 0.05,
    seed: int = 0,
) -> PackedCorpus:
    """Tokenise and pack a text once, and open it.

    A held-out share is chosen from the whole source before it is cut into
    shards, so no shard trains on what another one holds out.  Shards are
    consecutive pieces of both parts, equal to one token.

    Args:
        spec: see `flower_geo.data.spec`.
        tokenizer: gives the ids; its end-of-text id closes each document.
        seq_len: tokens a sequence, at least 2.
        cache_dir: where prepared tokens are kept; keys hash the text itself, so
            a changed file is prepared anew and a moved one is not.
        held_out: share of the text, 0 < share < 1, that is never trained on.
            At least one sequence a shard is held out whatever the share.
        seed: decides which parts are held out.

    Returns:
        Both splits, read-only and memory-mapped; uint16 ids when the
        vocabulary has at most 65535 tokens, else uint32.

    Raises:
        DataError: the spec, the text, or the cache folder is not usable.
    """
    if seq_len < 2:
        raise DataError(f"seq-len {seq_len} is too short: set it to 2 or more")
    if not 0.0 < held_out < 1.0:
        raise DataError(f"held-out share {held_out} is outside 0..1: set it to 0.05, for instance")
    seq_len, held_out, seed = int(seq_len), float(held_out), int(seed)
    parsed = parse_spec(spec)
    source = open_source(parsed)
    vocabulary = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))
    dtype = np.dtype("<u4" if vocabulary > 65535 else "<u2")
    token_hash = tokenizer_hash(tokenizer)
    content = source.digest()
    identity = [VERSION, PART, content, token_hash, seq_len, held_out, seed, parsed.n_shards]
    key = hashlib.sha256(json.dumps(identity).encode("ascii")).hexdigest()[:40]

    def build(folder: Path) -> str:
        method = write_splits(
            source.events(),
            encoder(tokenizer),
            end_of_text(tokenizer),
            dtype,
            folder,
            name=source.name,
            seq_len=seq_len,
            n_shards=parsed.n_shards,
            held_out=held_out,
            seed=seed,
        )
        if source.digest() != content:
            raise DataError(f"{source.name} changed while it was read: start again")
        return method

    prepared = open_or_build(Path(cache_dir).expanduser(), key, dtype, build)
    shard = (parsed.shard, parsed.n_shards)
    described = [prepared.sha256, shard, seq_len, token_hash]
    return PackedCorpus(
        name=parsed.name,
        train=Split(_piece(prepared.train, *shard), seq_len),
        held_out=Split(_piece(prepared.held_out, *shard), seq_len),
        fingerprint=hashlib.sha256(json.dumps(described).encode("ascii")).hexdigest(),
    )


def _piece(tokens: Tokens, shard: int, n_shards: int) -> Tokens:
    """The shard-th of n consecutive, disjoint pieces, a view."""
    return tokens[shard * tokens.size // n_shards : (shard + 1) * tokens.size // n_shards]
