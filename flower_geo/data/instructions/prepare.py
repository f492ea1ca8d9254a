"""From a spec of instruction data to tokenised, cached conversations."""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flower_geo.data.instructions.chat import Chat, Encoded
from flower_geo.data.instructions.corpus import InstructionCorpus, Packed, Report
from flower_geo.data.instructions.forms import Conversation, Dropped, conversation
from flower_geo.data.instructions.rows import Rows, open_rows
from flower_geo.data.instructions.spec import parse_instructions
from flower_geo.data.instructions.split import Ranks
from flower_geo.data.instructions.store import VERSION, Columns, Stored, open_or_build
from flower_geo.data.spec import DataSpec
from flower_geo.data.tokenizer import tokenizer_hash
from flower_geo.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["SHORT", "prepare_instructions"]

_LOG = logging.getLogger(__name__)

#: Tokens an answer may have to be asked for word by word.
SHORT = 16

_BATCH = 256


def prepare_instructions(
    spec: str,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seq_len: int,
    cache_dir: str | Path,
    completion_only: bool = True,
    packing: bool = False,
    held_out: float = 0.1,
    seed: int = 0,
) -> InstructionCorpus:
    """Tokenise questions and answers once, and open them.

    A held-out share is chosen from the whole source before it is cut into
    shards, so no shard trains on what another one holds out.  Shards are
    consecutive pieces of both parts.  What is longer than `seq_len` loses its
    end; where no token of an answer is left, the row is dropped and counted.

    Args:
        spec: see `flower_geo.data.instructions.spec`.
        tokenizer: gives the ids and, where it has one, the chat template.
        seq_len: most tokens of an example, at least 2.
        cache_dir: where tokens are kept; keys hash the rows themselves, the
            tokenizer, the template and the settings, so a changed file is
            prepared anew and a moved one is not.
        completion_only: train on what the assistant says; else on all tokens.
        packing: join training examples to rows of at most `seq_len` tokens.
        held_out: share of the conversations, 0 < share <= 1, that is never
            trained on; at least one a shard.  1 = all of them: nothing to train on.
        seed: decides which are held out.

    Returns:
        Both splits, memory-mapped, with a report of what was dropped and cut.

    Raises:
        DataError: the spec, a row, the chat template or the cache folder is not
            usable, or too little is left to train on and to hold out.
    """
    if seq_len < 2:
        raise DataError(f"seq-len {seq_len} is too short: set it to 2 or more")
    if not 0.0 < held_out <= 1.0:
        raise DataError(f"held-out share {held_out} is outside 0..1: set it to 0.1, for instance")
    parsed = parse_instructions(spec)
    source = open_rows(parsed)
    chat = Chat(tokenizer)
    token_hash = tokenizer_hash(tokenizer)
    template = hashlib.sha256(chat.template.encode("utf-8")).hexdigest()
    specials = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    content = source.digest()
    # Shipped categories hold out the same questions however they are sharded.
    least = 1 if parsed.kind == "builtin" else parsed.n_shards
    wanted = parsed.config if parsed.kind == "builtin" else None
    identity = [VERSION, SHORT, content, wanted, token_hash, template, specials]
    identity += [int(seq_len), bool(completion_only), float(held_out), int(seed), least]
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode("ascii")).hexdigest()[:40]

    def build() -> tuple[Columns, Report]:
        builder = _Builder(parsed, source, chat, int(seq_len), bool(completion_only))
        made = builder.build(float(held_out), int(seed), least)
        if source.digest() != content:
            raise DataError(f"{source.name} changed while it was read: start again")
        return made

    stored = open_or_build(Path(cache_dir).expanduser(), key, build)
    hashes = [token_hash, template]
    return _opened(parsed, stored, int(seq_len), bool(packing), hashes, held_out == 1)


def _opened(
    spec: DataSpec, stored: Stored, seq_len: int, packing: bool, hashes: list[str], all_held: bool
) -> InstructionCorpus:
    """This site's shard of a stored source."""
    shard = (spec.shard, spec.n_shards)
    train, held = stored.train.piece(*shard), stored.held_out.piece(*shard)
    if not len(held) or not (len(train) or all_held):
        what = "hold out" if len(train) or all_held else "train on"
        raise DataError(
            f"{spec.name} leaves nothing to {what} ({stored.report.line()}): add rows, raise "
            "seq-len, or cut it into fewer shards"
        )
    described = [stored.sha256, shard, seq_len, packing, *hashes]
    return InstructionCorpus(
        name=spec.name,
        train=Packed(train, seq_len) if packing else train,
        held_out=held,
        held_out_answers=stored.answers(*shard),
        fingerprint=hashlib.sha256(json.dumps(described).encode("ascii")).hexdigest(),
        report=stored.report,
    )


class _Builder:
    """Reads a source twice: to choose what is held out, then to tokenise it."""

    def __init__(
        self, spec: DataSpec, source: Rows, chat: Chat, seq_len: int, completion_only: bool
    ) -> None:
        self.spec = spec
        self.source = source
        self.chat = chat
        self.seq_len = seq_len
        self.completion_only = completion_only
        names = spec.config if spec.kind == "builtin" else None
        self.categories = None if names is None else frozenset(names.split("+"))
        self.columns = Columns()
        self.dropped: Counter[str] = Counter()
        self.lengths = array("q")
        self.truncated = 0

    def build(self, share: float, seed: int, least: int) -> tuple[Columns, Report]:
        ranks = Ranks(seed)
        for read in self._read():
            if isinstance(read, Conversation):
                ranks.add(read)
            else:
                self.dropped[str(read)] += 1
        rows = self.dropped.total()
        held = ranks.held_out(share, least, self.source.name)
        for batch in self._wanted(held):
            rows += len(batch)
            self._tokenise(batch)
        report = self._report(rows)
        if not report.kept:
            raise DataError(f"{self.source.name} holds nothing to train on ({report.line()})")
        log = _LOG.warning if report.dropped or report.truncated else _LOG.info
        log("%s, seq-len %d: %s", self.spec.name, self.seq_len, report.line())
        return self.columns, report

    def _read(self) -> Iterator[Conversation | Dropped]:
        for where, row, category in self.source.rows():
            try:
                yield conversation(row, where, category)
            except Dropped as reason:
                yield reason

    def _wanted(self, held: npt.NDArray[np.bool_]) -> Iterator[list[tuple[Conversation, bool]]]:
        """Conversations of the wanted categories with their side, in batches."""
        read = (found for found in self._read() if isinstance(found, Conversation))
        try:
            sided = (
                (found, bool(side))
                for found, side in zip(read, held, strict=True)
                if self.categories is None or found.category in self.categories
            )
            while batch := list(islice(sided, _BATCH)):
                yield batch
        except ValueError as error:
            raise DataError(f"{self.source.name} changed while it was read: start again") from error

    def _tokenise(self, batch: list[tuple[Conversation, bool]]) -> None:
        short = []
        encoded = self.chat.encode([found for found, _ in batch])
        for (found, side), result in zip(batch, encoded, strict=True):
            if isinstance(result, Encoded):
                self.lengths.append(len(result.ids))
                try:
                    said = self._add(result, "held_out" if side else "train")
                    if side and _is_short(found, said) and len(result.ids) <= self.seq_len:
                        short.append(found)
                except Dropped as reason:
                    self.dropped[str(reason)] += 1
            else:
                self.dropped[str(result)] += 1
        for found, prompt in zip(short, self.chat.prompts(short), strict=True):
            self.columns.prompts.add(prompt)
            self.columns.answers.add(found.turns[-1][1].encode("utf-8"))

    def _add(self, encoded: Encoded, part: str) -> int:
        """Keep one, cut to length; return its answers' tokens."""
        ids, said = encoded.ids[: self.seq_len], encoded.said[: self.seq_len]
        if not any(encoded.said):
            raise Dropped("the chat template marks no answer")
        if not any(said):
            raise Dropped("no room for an answer")
        self.truncated += len(ids) < len(encoded.ids)
        trained = said if self.completion_only else [False] + [True] * (len(ids) - 1)
        self.columns.ids[part].add(ids)
        self.columns.trained[part].add(bytes(trained))
        return sum(said)

    def _report(self, rows: int) -> Report:
        columns = self.columns
        train, held = (len(columns.ids[part].offsets) - 1 for part in ("train", "held_out"))
        lengths = np.sort(np.array(self.lengths, dtype=np.int64))
        marks = {"p50": 0.5, "p90": 0.9, "max": 1.0}
        return Report(
            rows=rows,
            kept=train + held,
            train=train,
            held_out=held,
            truncated=self.truncated,
            dropped=dict(sorted(self.dropped.items())),
            lengths={
                name: int(lengths[int(mark * (lengths.size - 1))]) if lengths.size else 0
                for name, mark in marks.items()
            },
            tokens=sum(len(column.values) for column in columns.ids.values()),
            trained_tokens=sum(sum(column.values) for column in columns.trained.values()),
        )


def _is_short(conversation: Conversation, said: int) -> bool:
    """Whether an exact match may be asked for: one answer, of few tokens, on one line."""
    answers = [text for role, text in conversation.turns if role == "assistant"]
    return len(answers) == 1 and said <= SHORT and "\n" not in answers[0]
