"""The rounds of a run, as the coordinator commands them, on one half, engine and server."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flower_geo.cloud.group import Group
from flower_geo.cloud.half import Half, built_half
from flower_geo.cloud.service import Service
from flower_geo.cloud.store import HalfStore
from flower_geo.config import SplitConfig, parse
from flower_geo.durable import read_tensors, write_tensors
from flower_geo.errors import ConfigError, RoundError
from flower_geo.models import load_adapter_state
from flower_geo.training.settings import inner_config
from flower_geo.training.split import CloudEngine
from flower_geo.training.split.settings import wire_of
from flower_geo.training.split.state import under
from flower_geo.transport import Limits, SplitServer, server_credentials

__all__ = ["Rounds"]

logger = logging.getLogger(__name__)

#: Exit code of a process whose compute thread failed.
FAILED = 70
#: JSON among the tensors of an optimizer state, as bytes.
_META = "meta"


class Rounds:
    """See the module text.

    Args:
        config: the run's.
        folder: for what this process leaves on disk.
        half: that it trains.
        server: of the stream; not started.
        service: that the server serves.

    Attributes:
        port: where the server listens.
    """

    def __init__(
        self, config: SplitConfig, folder: Path, half: Half, service: Service, server: SplitServer
    ) -> None:
        self.config, self.folder, self.half = config, folder, half
        self._service, self._server = service, server
        self.port = server.start()
        self._round = 0
        self._group: Group | None = None
        self._engine = self._new_engine()

    @classmethod
    def serving(cls, settings: Mapping[str, Any]) -> Rounds:
        """Build the half and listen.

        Raises:
            ConfigError, ModelError: the configuration cannot be used.
            KeyError: a setting is missing.
        """
        config = parse(SplitConfig, settings["config"])
        torch.set_num_threads(config.threads or torch.get_num_threads())
        half = built_half(config)
        port = int(settings["port"])
        for wanted in (port, 0) if port and not config.stream_port else (port,):
            server: SplitServer
            # One that cannot answer ends, and is started again at the newest snapshot.
            service = Service(
                lambda *sites: server.drop(*sites),  # noqa: B023
                lambda error: os._exit(FAILED),
            )
            server = SplitServer(
                service, secret=bytes.fromhex(settings["secret"]), run=str(settings["run"]),
                terms=half.terms, limits=Limits(in_flight=max(8, 2 * config.in_flight)),
                address=f"{config.stream_bind}:{wanted}",
                credentials=server_credentials(
                    settings["certificate"].encode(), settings["key"].encode()
                ),
            )  # fmt: skip
            try:
                return cls(config, Path(settings["folder"]), half, service, server)
            except ConfigError as error:
                service.stop()
                if not wanted or config.stream_port:
                    raise
                logger.warning("port %d of an earlier life is taken (%s)", wanted, error)
        raise AssertionError("port 0 is always to be had")

    # -- commands -------------------------------------------------------------------

    def begin(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """A round begins; asked again for the same one, what is done of it stays."""
        round, sites = int(command["round"]), sorted(map(str, command["sites"]))
        told = read_tensors(Path(command["tensors"]), str(command["file"]))
        label = hashlib.sha256(
            json.dumps([round, command["file"], sites, self._deciding()]).encode()
        ).hexdigest()[:32]
        if not sites:
            self._rest(told)
            return {}
        going_on = self._group if round == self._round else None
        if going_on is not None and (going_on.done or going_on.left):
            # Some have ended the round already: the others train on what these left.
            sites = [site for site in sites if site not in going_on.done]
            label = f"{label}-{int(command['attempt'])}"
        else:
            self._engine = self._restored(told)
            going_on = None
        if not sites:
            return {}
        self._engine.begin(round, sites, *self._place(round), None)
        store = HalfStore(self.folder / "rounds", label)
        self._group = Group(
            sites, self._engine, store, self.config.snapshot_steps, self.config.stream_deadline
        )
        self._round = round
        self._service.begin(round, [self._group], self._engine)
        if going_on is None:
            store.drop_others()
        return {}

    def settle(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """The round is over: leave the half and its optimizer in ``settled.safetensors``."""
        if self._group is None:
            raise RoundError("no round is under way in the cloud's process")
        self._service.settled()
        engine = self._engine
        for site in sorted(set(self._group.sites) - self._group.done):
            engine.leave(site)
        half = engine.average()
        tensors = {f"half/{name}": tensor for name, tensor in half.items()}
        if self.config.keep_optimizer:
            state, meta = engine.state_dict()
            tensors |= {f"moments/{name}": tensor for name, tensor in state.items()}
            packed = bytearray(json.dumps(meta, sort_keys=True).encode())
            tensors[f"moments/{_META}"] = torch.frombuffer(packed, dtype=torch.uint8)
        file = write_tensors(self.folder / "settled.safetensors", tensors)
        self._group = None
        self._rest(tensors)
        return {"file": file}

    def close(self) -> None:
        """Stop serving."""
        self._service.stop()
        self._server.stop(1.0)

    # -- the engine -------------------------------------------------------------------

    def _rest(self, told: Mapping[str, Tensor]) -> None:
        """Between rounds: evaluations by the half as it was told."""
        self._engine = self._restored({n: t for n, t in told.items() if n.startswith("half/")})
        self._engine.begin(self._round, [], 0.0, 0.0, None)
        self._service.rest(self._engine)

    def _restored(self, told: Mapping[str, Tensor]) -> CloudEngine:
        """An engine with the optimizer, and then the weights, that the coordinator told."""
        engine = self._new_engine()
        moments = under(told, "moments/")
        meta = moments.pop(_META, None)
        if meta is not None:
            engine.load_state_dict(moments, json.loads(bytes(meta.numpy())))
        peft: Any = self.half.part.model
        load_adapter_state(peft, under(told, "half/"))
        return engine

    def _new_engine(self) -> CloudEngine:
        config = self.config
        inner = inner_config(config, config.total_steps)
        return CloudEngine(
            self.half.part, inner, wire_of(config), config.mode, seed=config.seed,
            in_flight=config.in_flight, max_tokens=config.batch_size * config.seq_len * 4,
            meet_every=config.snapshot_steps,
        )  # fmt: skip

    def _place(self, round: int) -> tuple[float, float]:
        steps = self.config.inner_steps
        return float((round - 1) * steps), float(steps)

    def _deciding(self) -> dict[str, Any]:
        """What of the configuration a round's steps depend on."""
        public = self.config.public()
        return {key: public[key] for key in sorted(self.config.training_keys - {"snapshot-steps"})}
