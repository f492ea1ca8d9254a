"""A request being served at a site: its configuration, its task and its base weights."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flower_geo.compression import Replica, content_hash
from flower_geo.config import CommonConfig, config_for, parse
from flower_geo.errors import ConfigError, CorruptPayload
from flower_geo.messages import Reply, Request
from flower_geo.site.identity import node_value, site_name, state_folder
from flower_geo.site.state import SiteState
from flower_geo.site.tasks import task_for
from flower_geo.site.watch import Watch

__all__ = ["Session", "seed_of"]

logger = logging.getLogger(__name__)

#: CPU threads torch takes by itself.
_THREADS = torch.get_num_threads()


class Session:
    """One request being served: configuration, task and state of this site."""

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
        self.task = task_for(
            self.config, node_config, self.device, self.total_steps, self.watch.phase
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
            "tokenizer_hash": self.task.tokenizer_hash, "identity": self.task.identity,
            "data": self.task.data_name,
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
            # The task knows the hash already; a model is built only where it fits.
            if self.task.initial_hash != request.base_hash:
                return None
            initial = self.task.initial()
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
            start = self.task.schema()
        replica = Replica(start, version, self.task.growing)
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

    def held_out(self, when: str) -> dict[str, float]:
        """Figures of the held-out part, named ``loss-before`` where ``when`` is ``before``."""
        self.watch.phase("evaluation")
        found = self.task.held_out()
        tokens = found.pop("eval-tokens")
        return {"eval-tokens": tokens} | {f"{key}-{when}": found[key] for key in sorted(found)}


def _site_config(
    values: Mapping[str, Any], node_config: Mapping[str, Any]
) -> tuple[CommonConfig, int]:
    """The request's configuration under the site's own choices, and the run's total steps.

    A site may set how much it trains a round; the learning-rate schedule stays
    that of the run.
    """
    model = config_for(str(values.get("strategy", "diloco")))
    keys = model.training_keys | {"rounds"}
    run = parse(model, {key: value for key, value in values.items() if key in keys})
    mine = {key: node_config[key] for key in sorted(model.site_keys) if key in node_config}
    if not mine:
        return run, run.total_steps
    try:
        checked = parse(model, {**mine, "warmup-steps": 0})
    except ConfigError as error:
        raise ConfigError(str(error).replace("run-config", "node-config", 1)) from None
    fields = [key.replace("-", "_") for key in mine]
    return run.model_copy(update={f: getattr(checked, f) for f in fields}), run.total_steps


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
