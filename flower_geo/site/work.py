"""What a site does with a request: greet, train, evaluate.

Plain functions of a request and the site's node-config; the state they leave
is on disk (:mod:`flower_geo.site.state`), so any process of the site may serve
any request.  What is kept in memory between requests (`_Workbench`) only saves
time and is keyed by everything it depends on, because one process may serve
several sites.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from flower_geo.compression import (
    ErrorFeedback,
    Replica,
    codec,
    content_hash,
    pack,
    record_blobs,
    record_from_blobs,
)
from flower_geo.config import TRAINING_KEYS, CommonConfig, parse
from flower_geo.data import BatchSource, Cursor, data_spec, load_tokenizer, prepare, tokenizer_hash
from flower_geo.data.corpus import PackedCorpus
from flower_geo.errors import ConfigError, CorruptPayload
from flower_geo.messages import Reply, Request, UpdateKind
from flower_geo.models import build_model, check_vocab, load_state, snapshot
from flower_geo.site.identity import (
    cache_folder,
    link_speeds,
    node_number,
    node_value,
    site_name,
    state_folder,
)
from flower_geo.site.state import Generation, SiteState
from flower_geo.training import InnerConfig, InnerLoop, evaluate

__all__ = ["evaluate_request", "greet_request", "train_request"]

logger = logging.getLogger(__name__)

#: Keys a site may set for itself in its node-config.
SITE_KEYS = ("inner-steps", "inner-seconds", "batch-size", "grad-accum", "threads", "tokenizer")


@dataclass(frozen=True)
class _Workbench:
    """A model to load weights into, with the hash of its initial weights."""

    model: nn.Module
    initial_hash: str
    tokenizer: Any
    tokenizer_hash: str


@lru_cache(maxsize=1)
def _workbench(model: str, seed: int, tokenizer: str, seq_len: int, device: str) -> _Workbench:
    words = load_tokenizer(tokenizer)
    built = build_model(model, seed=seed, vocab_size=len(words), max_seq_len=seq_len)
    check_vocab(built, words)
    initial = content_hash(snapshot(built))
    module: nn.Module = built
    return _Workbench(module.to(torch.device(device)), initial, words, tokenizer_hash(words))


class _Session:
    """One request being served: configuration, bench and data of this site."""

    def __init__(self, request: Request, node_config: Mapping[str, Any]) -> None:
        self.request = request
        self.node = node_config
        self.site = site_name(node_config)
        self.config, self.total_steps = _site_config(request.config, node_config)
        self.device = _device(node_value(node_config, "device", "auto"))
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        self.bench = _workbench(
            self.config.model, self.config.seed, self.config.tokenizer, self.config.seq_len,
            self.device,
        )  # fmt: skip
        self.corpus = _corpus(self.config, node_config, self.bench.tokenizer)
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
            if version != request.first - 1:
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

    def held_out_loss(self) -> tuple[float, int]:
        """Loss per token on the held-out part, and the tokens it was taken on."""
        result = evaluate(
            self.bench.model, self.corpus.held_out, self.config.batch_size,
            max_tokens=self.config.eval_tokens or None,
        )  # fmt: skip
        return result.loss, result.tokens


def greet_request(request: Request, node_config: Mapping[str, Any]) -> Reply:
    """Prepare data and model, and say what this site is and holds."""
    session = _Session(request, node_config)
    metrics = _data_sizes(session.corpus) | link_speeds(node_config)
    with session.state:
        if request.version == 0:
            session.base()
            version, held = session.state.base()
            if version < 0:
                version, held = 0, session.bench.initial_hash
            return session.reply(held_version=version, held_hash=held, metrics=metrics)
        return session.reply(metrics=metrics)


def evaluate_request(request: Request, node_config: Mapping[str, Any]) -> Reply:
    """Held-out loss of the version asked for."""
    session = _Session(request, node_config)
    with session.state:
        base = session.base()
        if base is None:
            return session.reply(status="need")
        load_state(session.bench.model, base)
        loss, tokens = session.held_out_loss()
        return session.reply(metrics={"loss-before": loss, "eval-tokens": float(tokens)})


def train_request(request: Request, node_config: Mapping[str, Any]) -> Reply:
    """Train one round, or answer again what was already trained.

    Asked again for the same round, base and configuration, the site answers
    from its cache; it never trains the same round twice.
    """
    started = time.perf_counter()
    session = _Session(request, node_config)
    with session.state:
        key = (request.base_hash, request.fingerprint)
        known = session.state.load(request.round)
        if known is not None and known.key == key:
            return _cached(session, known)
        base = session.base()
        if base is None:
            return session.reply(status="need")
        before = _generation_before(session)
        after, reply = _train(session, base, before, key)
        reply.metrics["seconds-total"] = time.perf_counter() - started
        after.fields = {"metrics": reply.metrics, "kind": reply.kind, "codec": reply.codec}
        session.state.save(after)
        session.state.prune(request.accepted)
        return reply


def _train(
    session: _Session, base: dict[str, Tensor], before: Generation, key: tuple[str, str]
) -> tuple[Generation, Reply]:
    request, config, model = session.request, session.config, session.bench.model
    load_state(model, base)
    metrics: dict[str, float] = {}
    if request.evaluate:
        metrics["loss-before"], tokens = session.held_out_loss()
        metrics["eval-tokens"] = float(tokens)

    torch.manual_seed(_seed(config.seed, session.site, request.round))
    loop = InnerLoop(model, _inner_config(config, session.total_steps))
    if before.inner and config.keep_optimizer:
        loop.load_state_dict(before.inner)
    cursor = Cursor(len(session.corpus.train), config.seed, consumed=before.consumed)
    source = BatchSource(session.corpus.train, config.batch_size, cursor)
    result = loop.run(
        lambda: source.next().to(session.device),
        steps=None if config.inner_seconds else config.inner_steps,
        seconds=config.inner_seconds or None, position=request.position, span=request.span,
    )  # fmt: skip
    if request.evaluate:
        metrics["loss-after"], _ = session.held_out_loss()

    local = snapshot(model)
    chosen = codec(config.codec_up)
    arrays, kind, residual = _encoded(session, base, local, before.residual)

    metrics |= {
        "tokens": float(result.tokens), "steps": float(result.steps),
        "examples": float(cursor.consumed - before.consumed), "consumed": float(cursor.consumed),
        "seconds": result.seconds, "train-loss": result.loss_mean, "loss-first": result.loss_first,
        "loss-last": result.loss_last, "grad-norm": result.grad_norm,
    }  # fmt: skip
    after = Generation(
        round=request.round, parent=before.round, key=key, consumed=cursor.consumed,
        inner=loop.state_dict() if config.keep_optimizer else {}, residual=residual,
        reply={
            name: torch.frombuffer(bytearray(blob), dtype=torch.uint8)
            for name, blob in record_blobs(arrays).items()
        },
    )  # fmt: skip
    return after, session.reply(kind=kind, codec=chosen.spec, metrics=metrics, arrays=arrays)


def _encoded(
    session: _Session,
    base: Mapping[str, Tensor],
    local: Mapping[str, Tensor],
    residual: Mapping[str, Tensor],
) -> tuple[ArrayRecord, UpdateKind, dict[str, Tensor]]:
    """The update as it is sent, what it holds, and the residual it leaves.

    A lossless codec carries weights, since base - (base - local) is not local in
    fp32; but where an earlier round's codec left a residual, weights would lose it.
    """
    config = session.config
    chosen = codec(config.codec_up)
    owed = config.error_feedback and any(bool(tensor.any()) for tensor in residual.values())
    if chosen.lossless and not owed:
        return pack(local, chosen), "weights", {}
    update = {name: base[name] - local[name] for name in base}
    if not config.error_feedback:
        return pack(update, chosen), "delta", {}
    feedback = ErrorFeedback(
        config.feedback_decay, dtype=config.feedback_dtype,
        seed=_seed(config.seed, session.site, session.request.round),
    )  # fmt: skip
    feedback.load_state_dict(residual, own=True)
    return pack(update, chosen, feedback=feedback), "delta", feedback.staged_state_dict()


def _cached(session: _Session, known: Generation) -> Reply:
    blobs = {name: tensor.numpy().tobytes() for name, tensor in known.reply.items()}
    metrics = {key: float(value) for key, value in dict(known.fields["metrics"]).items()}
    return session.reply(
        kind=known.fields["kind"], codec=known.fields["codec"], metrics=metrics,
        arrays=record_from_blobs(blobs),
    )  # fmt: skip


def _generation_before(session: _Session) -> Generation:
    """The state the coordinator says to go on from."""
    accepted = session.request.accepted
    if accepted == 0:
        return Generation()
    found = session.state.load(accepted)
    if found is not None:
        return found
    # The optimizer and the residual are gone with the folder; the coordinator
    # still knows how far the data was used, so none of it is used twice.
    logger.warning(
        "site %s has no state of round %d: its optimizer starts anew", session.site, accepted
    )
    return Generation(round=accepted, consumed=session.request.consumed)


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


def _inner_config(config: CommonConfig, total_steps: int) -> InnerConfig:
    return InnerConfig(
        lr=config.inner_lr, weight_decay=config.weight_decay, clip_norm=config.clip_norm,
        warmup_steps=config.warmup_steps, total_steps=total_steps,
        schedule=config.schedule, min_lr_ratio=config.min_lr_ratio, grad_accum=config.grad_accum,
        precision=config.precision, optimizer=config.inner_optimizer,
    )  # fmt: skip


def _corpus(config: CommonConfig, node_config: Mapping[str, Any], tokenizer: Any) -> PackedCorpus:
    partition = node_number(node_config, "partition-id", 0)
    total = node_number(node_config, "num-partitions", partition + 1)
    spec = data_spec(config.data, node_config, partition, total)
    return prepare(spec, tokenizer, seq_len=config.seq_len, cache_dir=cache_folder(node_config))


def _data_sizes(corpus: PackedCorpus) -> dict[str, float]:
    return {
        "train-tokens": float(corpus.train.n_tokens),
        "held-out-tokens": float(corpus.held_out.n_tokens),
    }


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


def _seed(seed: int, site: str, round: int) -> int:
    """Seed of dropout in a round without carried RNG state; differs by site."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{site}/{round}".encode()).digest()[:7], "big")
