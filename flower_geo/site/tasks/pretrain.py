"""Pretraining on plain text: every weight of the model is trained and sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from flower_geo.compression import Growing, content_hash, none_grows
from flower_geo.config import CommonConfig
from flower_geo.data import BatchSource, Cursor, data_spec, load_tokenizer, prepare, tokenizer_hash
from flower_geo.data.corpus import PackedCorpus
from flower_geo.data.sources import Files, open_source
from flower_geo.data.spec import parse_spec
from flower_geo.models import build_model, check_vocab, load_state, snapshot
from flower_geo.site.identity import cache_folder, node_number
from flower_geo.site.tasks.base import Alone
from flower_geo.site.tasks.kept import KeptByFiles, Stamps, file_stamps
from flower_geo.training import InnerLoop, evaluate
from flower_geo.training.settings import inner_config

__all__ = ["Pretraining", "workbench"]


@dataclass(frozen=True)
class _Workbench:
    """A model to load weights into, with the hash of its initial weights."""

    model: nn.Module
    initial_hash: str
    tokenizer: Any
    tokenizer_hash: str


@lru_cache(maxsize=1)
def workbench(model: str, seed: int, tokenizer: str, seq_len: int, device: str) -> _Workbench:
    """The model and tokenizer of that name, as the last request of this process left them."""
    words = load_tokenizer(tokenizer)
    built = build_model(model, seed=seed, vocab_size=len(words), max_seq_len=seq_len)
    check_vocab(built, words)
    initial = content_hash(snapshot(built))
    module: nn.Module = built
    return _Workbench(module.to(torch.device(device)), initial, words, tokenizer_hash(words))


class Pretraining(Alone):
    """See ``tasks.base.Task``.

    Args:
        config: the run's configuration under the site's own choices.
        node_config: the site's.
        device: torch device.
        total_steps: of the whole run.
        phase: is told what the site is about to do.
    """

    def __init__(
        self,
        config: CommonConfig,
        node_config: Mapping[str, Any],
        device: str,
        total_steps: int,
        phase: Callable[[str], None],
    ) -> None:
        self.growing: Growing = none_grows
        self.comparison = None
        self.identity = ""
        self.config = config
        self.device = device
        self.total_steps = total_steps
        phase("model")
        self.bench = workbench(config.model, config.seed, config.tokenizer, config.seq_len, device)
        phase("data")
        self.corpus = _corpus(config, node_config, self.bench.tokenizer, self.bench.tokenizer_hash)
        self.model = self.bench.model
        self.initial_hash = self.bench.initial_hash
        self.tokenizer_hash = self.bench.tokenizer_hash
        self.data_name, self.data_fingerprint = self.corpus.name, self.corpus.fingerprint
        self.sequences = len(self.corpus.train)

    def initial(self) -> dict[str, Tensor]:
        """The initial weights, built anew."""
        fresh = build_model(
            self.config.model, seed=self.config.seed, vocab_size=len(self.bench.tokenizer),
            max_seq_len=self.config.seq_len,
        )  # fmt: skip
        return snapshot(fresh)

    def schema(self) -> dict[str, Tensor]:
        """Tensors with the names and shapes of a version."""
        return snapshot(self.model)

    def sizes(self) -> dict[str, float]:
        """Tokens of both parts of the site's text."""
        return {
            "train-tokens": float(self.corpus.train.n_tokens),
            "held-out-tokens": float(self.corpus.held_out.n_tokens),
        }

    def load(
        self,
        base: Mapping[str, Tensor],
        round: int,
        personal: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        """Begin from the weights of a version."""
        load_state(self.model, base)

    def trained_from(self, base: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """All of the version."""
        return base

    def local(self) -> dict[str, Tensor]:
        """The weights as they are now."""
        return snapshot(self.model)

    def personal(self) -> dict[str, Tensor]:
        """Nothing stays."""
        return {}

    def loop(self) -> InnerLoop:
        """A loop over the model."""
        return InnerLoop(self.model, inner_config(self.config, self.total_steps))

    def batches(self, cursor: Cursor) -> Callable[[], Tensor]:
        """Batches from where the cursor stands."""
        source = BatchSource(self.corpus.train, self.config.batch_size, cursor)
        return lambda: source.next().to(self.device)

    def held_out(self) -> dict[str, float]:
        """``loss`` a token on the held-out part, and ``eval-tokens`` it was taken on."""
        result = evaluate(
            self.model, self.corpus.held_out, self.config.batch_size,
            max_tokens=self.config.eval_tokens or None,
        )  # fmt: skip
        return {"loss": result.loss, "eval-tokens": float(result.tokens)}


#: Corpora opened by this process.
_corpora: KeptByFiles[PackedCorpus] = KeptByFiles()


def _corpus(
    config: CommonConfig, node_config: Mapping[str, Any], tokenizer: Any, tokenizer_hash: str
) -> PackedCorpus:
    """The site's data, opened once a process as long as its files stay as they are."""
    partition = node_number(node_config, "partition-id", 0)
    total = node_number(node_config, "num-partitions", partition + 1)
    spec = data_spec(config.data, node_config, partition, total)
    cache = cache_folder(node_config)
    return _corpora.get(
        (spec, tokenizer_hash, config.seq_len, str(cache)), lambda: _stamps(spec),
        lambda: prepare(spec, tokenizer, seq_len=config.seq_len, cache_dir=cache),
    )  # fmt: skip


def _stamps(spec: str) -> Stamps | None:
    """Of a spec's files; None where there are none to look at."""
    parsed = parse_spec(spec)
    if parsed.kind == "hf":
        return None
    source = open_source(parsed)
    return file_stamps(source.files) if isinstance(source, Files) else None
