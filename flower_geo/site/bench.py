"""A request being served at a site: its configuration, model, data and base weights.

What is kept in memory between requests (the workbench, the corpus) only saves
time and is keyed by everything it depends on, because one process may serve
several sites.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flower_geo.compression import Replica, content_hash
from flower_geo.config import TRAINING_KEYS, CommonConfig, parse
from flower_geo.data import data_spec, load_tokenizer, prepare, tokenizer_hash
from flower_geo.data.corpus import PackedCorpus
from flower_geo.data.sources import Files, open_source
from flower_geo.data.spec import parse_spec
from flower_geo.errors import ConfigError, CorruptPayload
from flower_geo.messages import Reply, Request
from flower_geo.models import build_model, check_vocab, snapshot
from flower_geo.site.identity import (
    cache_folder,
    node_number,
    node_value,
    site_name,
    state_folder,
)
from flower_geo.site.state import SiteState
from flower_geo.site.watch import Watch
from flower_geo.training import InnerConfig, evaluate

__all__ = ["SITE_KEYS", "Session", "seed_of", "workbench"]

logger = logging.getLogger(__name__)

#: Keys a site may set for itself in its node-config.
SITE_KEYS = (
    "inner-steps",
    "inner-seconds",
    "batch-size",
    "grad-accum",
    "threads",
    "tokenizer",
    "snapshot-steps",
)


#: CPU threads torch takes by itself.
_THREADS = torch.get_num_threads()


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


class Session:
    """One request being served: configuration, bench and data of this site."""

    def __init__(
        self, request: Request, node_config: Mapping[str, Any], watch: Watch | None = None
    ) -> None:
        self.request = request
        self.node = node_config
        self.watch = watch or Watch()
        self.site = site_name(node_config)
        self.config, self.total_steps = _site_config(request.config, node_config)
        self.device = _device(node_value(node_config, "device", "auto"))
        torch.set_num_threads(self.config.threads or _THREADS)
        self.watch.phase("model")
        self.bench = workbench(
            self.config.model, self.config.seed, self.config.tokenizer, self.config.seq_len,
            self.device,
        )  # fmt: skip
        self.watch.phase("data")
        self.corpus = _corpus(
            self.config, node_config, self.bench.tokenizer, self.bench.tokenizer_hash
        )
        self.state = SiteState(
            state_folder(node_config), request.run_name, request.run_uid, self.site
        )

    def reply(self, **values: Any) -> Reply:
        """A reply with this session's constants filled in."""
        version, held = self.state.base()
        defaults: dict[str, Any] = {
            "status": "done", "site": self.site, "round": self.request.round,
            "version": self.request.version, "base_hash": self.request.base_hash,
            "fingerprint": self.request.fingerprint, "held_version": version, "held_hash": held,
            "tokenizer_hash": self.bench.tokenizer_hash, "data": self.corpus.name,
        }  # fmt: skip
        return Reply(**(defaults | values))

    def base(self) -> dict[str, Tensor] | None:
        """Weights of the version asked for, or None when they must be sent."""
        self.watch.phase("base")
        request, (version, held) = self.request, self.state.base()
        if (version, held) == (request.version, request.base_hash):
            weights = self.state.load_base()
            if weights is not None:
                return weights
            # A site that went on claiming it would be offered nothing.
            self.state.drop_base()
        if request.version == 0 and request.payload == "none":
            # The bench knows the hash already; a model is built only where it fits.
            if self.bench.initial_hash != request.base_hash:
                return None
            initial = self._initial()
            if content_hash(initial) == request.base_hash:
                self.state.save_base(0, request.base_hash, initial)
                return initial
            return None
        if request.payload == "none" or request.arrays is None:
            return None
        if request.payload == "deltas":
            if not request.first - 1 <= version < request.last:
                return None
            loaded = self.state.load_base()
            if loaded is None:
                self.state.drop_base()
                return None
            start = loaded
        else:
            start = self._shapes()
        replica = Replica(start, version)
        try:
            replica.apply(
                request.payload, request.arrays, request.first, request.last, request.base_hash
            )
        except CorruptPayload as error:
            # A base that went bad here heals by a snapshot; one that was bad
            # on the way is asked for again.
            logger.warning("broadcast of version %d does not fit: %s", request.version, error)
            if request.payload == "deltas" and content_hash(start) != held:
                self.state.drop_base()
            return None
        self.state.save_base(request.version, request.base_hash, replica.state)
        return dict(replica.state)

    def _initial(self) -> dict[str, Tensor]:
        fresh = build_model(
            self.config.model, seed=self.config.seed, vocab_size=len(self.bench.tokenizer),
            max_seq_len=self.config.seq_len,
        )  # fmt: skip
        return snapshot(fresh)

    def _shapes(self) -> dict[str, Tensor]:
        return snapshot(self.bench.model)

    def data_sizes(self) -> dict[str, float]:
        """Tokens of both parts of the site's text."""
        return {
            "train-tokens": float(self.corpus.train.n_tokens),
            "held-out-tokens": float(self.corpus.held_out.n_tokens),
        }

    def inner_config(self) -> InnerConfig:
        """Settings of the inner loop."""
        config = self.config
        return InnerConfig(
            lr=config.inner_lr, weight_decay=config.weight_decay, clip_norm=config.clip_norm,
            warmup_steps=config.warmup_steps, total_steps=self.total_steps,
            schedule=config.schedule, min_lr_ratio=config.min_lr_ratio,
            grad_accum=config.grad_accum, precision=config.precision,
            optimizer=config.inner_optimizer,
        )  # fmt: skip

    def held_out_loss(self) -> tuple[float, int]:
        """Loss per token on the held-out part, and the tokens it was taken on."""
        self.watch.phase("evaluation")
        result = evaluate(
            self.bench.model, self.corpus.held_out, self.config.batch_size,
            max_tokens=self.config.eval_tokens or None,
        )  # fmt: skip
        return result.loss, result.tokens


def _site_config(
    values: Mapping[str, Any], node_config: Mapping[str, Any]
) -> tuple[CommonConfig, int]:
    """The request's configuration under the site's own choices, and the run's total steps.

    A site may set how much it trains a round; the learning-rate schedule stays
    that of the run.
    """
    run = parse(CommonConfig, {k: v for k, v in values.items() if k in TRAINING_KEYS | {"rounds"}})
    mine = {key: node_config[key] for key in SITE_KEYS if key in node_config}
    if not mine:
        return run, run.total_steps
    try:
        checked = parse(CommonConfig, {**mine, "warmup-steps": 0})
    except ConfigError as error:
        raise ConfigError(str(error).replace("run-config", "node-config", 1)) from None
    fields = [key.replace("-", "_") for key in mine]
    return run.model_copy(update={f: getattr(checked, f) for f in fields}), run.total_steps


#: Corpora opened by this process, the newest last.
_corpora: dict[tuple[Any, ...], PackedCorpus] = {}
_CORPORA_KEPT = 8


def _corpus(
    config: CommonConfig, node_config: Mapping[str, Any], tokenizer: Any, tokenizer_hash: str
) -> PackedCorpus:
    """The site's data, opened once a process as long as its files stay as they are."""
    partition = node_number(node_config, "partition-id", 0)
    total = node_number(node_config, "num-partitions", partition + 1)
    spec = data_spec(config.data, node_config, partition, total)
    cache = cache_folder(node_config)
    files = _file_stamps(spec)
    if files is None:
        return prepare(spec, tokenizer, seq_len=config.seq_len, cache_dir=cache)
    key = (spec, os.getcwd(), tokenizer_hash, config.seq_len, str(cache), files)
    if key not in _corpora:
        found = prepare(spec, tokenizer, seq_len=config.seq_len, cache_dir=cache)
        if _file_stamps(spec) != files:  # written to meanwhile: look again next time
            return found
        _corpora[key] = found
        for old in list(_corpora)[:-_CORPORA_KEPT]:
            del _corpora[old]
    return _corpora[key]


def _file_stamps(spec: str) -> tuple[tuple[Any, ...], ...] | None:
    """What tells that a spec's files were changed; None where there are no files to look at."""
    parsed = parse_spec(spec)
    if parsed.kind == "hf":
        return None
    source = open_source(parsed)
    if not isinstance(source, Files):
        return None
    stamps = []
    for path in source.files:
        try:
            found = Path(path).stat()
        except (OSError, TypeError):  # a shipped corpus may lie in an archive
            return None
        stamps.append(
            (str(path), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        )
    return tuple(stamps)


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
        raise ConfigError(
            f"node-config device={wanted!r} cannot be used here "
            f"({' '.join(str(error).split())[:120]}); use 'cpu', 'cuda' or 'cuda:0'"
        ) from None
    return str(device)


def seed_of(seed: int, site: str, round: int) -> int:
    """Seed of dropout in a round without carried RNG state; differs by site."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{site}/{round}".encode()).digest()[:7], "big")
