"""What a site does with a request: greet, train, evaluate.

Plain functions of a request and the site's node-config; the state they leave
is on disk (:mod:`flower_geo.site.state`), so any process of the site may serve
any request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flower_geo.compression import (
    ErrorFeedback,
    codec,
    pack,
    record_blobs,
    record_from_blobs,
)
from flower_geo.data import Cursor
from flower_geo.errors import SessionLost
from flower_geo.messages import Reply, Request, UpdateKind
from flower_geo.models import load_state
from flower_geo.site.alone import compared, is_due, train_alone
from flower_geo.site.bench import Session, seed_of
from flower_geo.site.identity import link_speeds
from flower_geo.site.inround import RoundSnapshot, RoundSnapshots, label_of
from flower_geo.site.state import Generation
from flower_geo.site.steps import after_steps
from flower_geo.site.watch import Watch

__all__ = ["evaluate_request", "greet_request", "train_request"]

logger = logging.getLogger(__name__)

#: Times that other parties may be lost, in a row without a new step kept, in a round.
_LOSSES = 10


def greet_request(
    request: Request, node_config: Mapping[str, Any], watch: Watch | None = None
) -> Reply:
    """Prepare data and model, and say what this site is and holds."""
    session = Session(request, node_config, watch)
    metrics = session.task.sizes() | link_speeds(node_config)
    with session.state:
        if request.version == 0:
            session.base()
            version, held = session.state.base()
            if version < 0:
                version, held = 0, session.task.initial_hash
            return session.reply(held_version=version, held_hash=held, metrics=metrics)
        return session.reply(metrics=metrics)


def evaluate_request(
    request: Request, node_config: Mapping[str, Any], watch: Watch | None = None
) -> Reply:
    """Held-out figures of the version asked for, and of what it is compared with."""
    session = Session(request, node_config, watch)
    with session.state, closing(session.task):
        base = session.base()
        if base is None:
            return session.reply(status="need")
        session.task.meet(request, session.site, None)
        session.task.load(base, request.round, lambda: _generation_before(session).personal)
        metrics = session.held_out("before")
        metrics |= compared(session, lambda: _generation_before(session))
        return session.reply(metrics=metrics)


def train_request(
    request: Request, node_config: Mapping[str, Any], watch: Watch | None = None
) -> Reply:
    """Train one round, or answer again what was already trained.

    Asked again for the same round, base and configuration, the site answers
    from its cache, or goes on from the snapshot of a round that was broken
    off; it never trains the same round twice.

    Raises:
        Leaving (see ``site.watch``): ``watch`` asked to end; a snapshot holds what was done.
    """
    started = time.perf_counter()
    session = Session(request, node_config, watch)
    with session.state, closing(session.task):
        key = (request.base_hash, request.fingerprint)
        known = session.state.load(request.round)
        if known is not None and known.key == key:
            if is_due(session, known):  # it was broken off in that part
                _alone(session, _parent(session, known), known)
            return _cached(session, known)
        base = session.base()
        if base is None:
            return session.reply(status="need")
        before = _generation_before(session)
        snapshots = RoundSnapshots(
            session.state.folder, _label(session, before), 2 if session.task.together else 1
        )
        found = snapshots.load()
        earlier = found.so_far.seconds if found is not None else 0.0
        after, reply = _trained(session, base, before, snapshots, found)
        reply.metrics["seconds-total"] = time.perf_counter() - started + earlier
        after.fields = {"metrics": reply.metrics, "kind": reply.kind, "codec": reply.codec}
        session.watch.phase("storing")
        session.state.save(after)
        snapshots.drop()
        session.state.prune(request.accepted)
        if is_due(session, after):
            _alone(session, before, after)
        return reply


def _trained(
    session: Session,
    base: dict[str, Tensor],
    before: Generation,
    snapshots: RoundSnapshots,
    found: RoundSnapshot | None,
) -> tuple[Generation, Reply]:
    """The round, from where all parties to it can go on, as often as one of them is lost."""
    losses, best = 0, -1
    while True:
        try:
            session.watch.phase("meeting")
            step = session.task.meet(session.request, session.site, snapshots.steps())
            if step is not None:
                found = snapshots.back_to(step)
            return _train(session, base, before, snapshots, found)
        except SessionLost as lost:
            newest = max(snapshots.steps(), default=0)
            losses, best = (0 if newest > best else losses + 1), max(best, newest)
            if losses >= _LOSSES:
                raise
            logger.info("site %s: %s", session.site, lost)


def _alone(session: Session, before: Generation, after: Generation) -> None:
    """The round once more, by the site alone; what the federation gets is stored already."""
    snapshots = RoundSnapshots(session.state.folder, _label(session, before, "alone"))
    train_alone(session, before, after, snapshots)
    session.watch.phase("storing")
    session.state.save(after)
    snapshots.drop()


def _parent(session: Session, generation: Generation) -> Generation:
    """What a generation went on from, as far as it is still there."""
    if not generation.parent:
        return Generation()
    found = session.state.load(generation.parent)
    return found if found is not None else Generation(round=generation.parent)


def _label(session: Session, before: Generation, part: str = "") -> str:
    """Names the steps of this round, so that no other's are taken for them."""
    request = session.request
    config = session.config.model_copy(update={"snapshot_steps": 0}).public()
    return label_of(
        request.round, request.base_hash, request.fingerprint, before.round, before.consumed,
        bool(before.inner), request.position, request.span, request.evaluate, config,
        session.total_steps, session.task.data_fingerprint, torch.device(session.device).type,
        *([part] if part else []),
    )  # fmt: skip


def _train(
    session: Session,
    base: dict[str, Tensor],
    before: Generation,
    snapshots: RoundSnapshots,
    found: RoundSnapshot | None,
) -> tuple[Generation, Reply]:
    request, config, task = session.request, session.config, session.task
    task.load(base, request.round, lambda: before.personal)
    metrics: dict[str, float] = {}
    if found is not None:
        metrics |= found.metrics
    elif request.evaluate:
        metrics |= session.held_out("before")

    torch.manual_seed(seed_of(config.seed, session.site, request.round))
    loop = task.loop()
    if found is not None:
        logger.info(
            "site %s goes on in round %d after step %d",
            session.site, request.round, found.so_far.steps,
        )  # fmt: skip
        load_state(task.model, found.weights)
        loop.load_state_dict(found.inner)
    elif before.inner and config.keep_optimizer:
        loop.load_state_dict(before.inner)
    consumed = found.consumed if found is not None else before.consumed
    cursor = Cursor(task.sequences, config.seed, consumed=consumed)
    steps = None if config.inner_seconds else config.inner_steps
    session.watch.phase("training")
    result = loop.run(
        task.batches(cursor),
        steps=steps,
        seconds=config.inner_seconds or None, position=request.position, span=request.span,
        on_step=after_steps(session, loop, cursor, snapshots, dict(metrics), steps),
        carried=found.so_far if found is not None else None,
    )  # fmt: skip
    if request.evaluate:
        metrics |= session.held_out("after")

    session.watch.phase("encoding")
    chosen = codec(config.codec_up)
    arrays, kind, residual = _encoded(session, base, before.residual)

    metrics |= {
        "tokens": float(result.tokens), "steps": float(result.steps),
        "examples": float(cursor.consumed - before.consumed), "consumed": float(cursor.consumed),
        "seconds": result.seconds, "train-loss": result.loss_mean, "loss-first": result.loss_first,
        "loss-last": result.loss_last, "grad-norm": result.grad_norm,
    }  # fmt: skip
    after = Generation(
        round=request.round, parent=before.round, key=(request.base_hash, request.fingerprint),
        consumed=cursor.consumed,
        inner=loop.state_dict() if config.keep_optimizer else {}, residual=residual,
        personal=task.personal(),
        reply={
            name: torch.frombuffer(bytearray(blob), dtype=torch.uint8)
            for name, blob in record_blobs(arrays).items()
        },
    )  # fmt: skip
    return after, session.reply(kind=kind, codec=chosen.spec, metrics=metrics, arrays=arrays)


def _encoded(
    session: Session,
    base: Mapping[str, Tensor],
    residual: Mapping[str, Tensor],
) -> tuple[ArrayRecord, UpdateKind, dict[str, Tensor]]:
    """The update as it is sent, what it holds, and the residual it leaves.

    A lossless codec carries weights, since base - (base - local) is not local in
    fp32; but where an earlier round's codec left a residual, weights would lose it.
    """
    config, base, local = session.config, session.task.trained_from(base), session.task.local()
    chosen = codec(config.codec_up)
    owed = config.error_feedback and any(bool(tensor.any()) for tensor in residual.values())
    if chosen.lossless and not owed:
        return pack(local, chosen), "weights", {}
    update = {name: base[name] - local[name] for name in base}
    if not config.error_feedback:
        return pack(update, chosen), "delta", {}
    feedback = ErrorFeedback(
        config.feedback_decay, dtype=config.feedback_dtype,
        seed=seed_of(config.seed, session.site, session.request.round),
    )  # fmt: skip
    feedback.load_state_dict(residual, own=True)
    return pack(update, chosen, feedback=feedback), "delta", feedback.staged_state_dict()


def _cached(session: Session, known: Generation) -> Reply:
    blobs = {name: tensor.numpy().tobytes() for name, tensor in known.reply.items()}
    metrics = {key: float(value) for key, value in dict(known.fields["metrics"]).items()}
    return session.reply(
        kind=known.fields["kind"], codec=known.fields["codec"], metrics=metrics,
        arrays=record_from_blobs(blobs),
    )  # fmt: skip


def _generation_before(session: Session) -> Generation:
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
