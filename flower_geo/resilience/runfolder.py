"""The run folder: who owns it, what it was started with, and whether it may go on."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flower_geo.config import FIXED_KEYS, check_name
from flower_geo.durable import FileLock, remove_unfinished, write_bytes, write_json
from flower_geo.errors import CheckpointCorrupt, ConfigError, ResumeMismatch, StateError
from flower_geo.resilience.checkpoint import CheckpointStore
from flower_geo.resilience.journal import Journal
from flower_geo.resilience.spool import Spool

__all__ = ["RunFolder"]


class RunFolder:
    """``<run-dir>/<run-name>/`` on the coordinator.

    Opening it takes its lock, so that two ServerApps never write one run, and
    counts up the incarnation: a number that tells lives of the server apart.

    Attributes:
        path: the folder.
        uid: random name of the run, made once; keeps the sites' state of a new
            run apart from that of an older one with the same name.
        incarnation: 1 for the first life of the server, 2 after a restart, ...
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        """Open or create the folder.

        Raises:
            StateLocked: another live ServerApp runs in it.
            ResumeMismatch: it belongs to a run with another model, data or strategy.
            StateError: it cannot be written.
        """
        self.path = path
        self._lock = FileLock(path / "lock")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(
                f"run-dir {path.parent} cannot be used: {error.strerror or error}; "
                "set run-dir to a folder that can be written"
            ) from error
        self._lock.acquire(f"run '{path.name}'")
        try:
            self.uid, self.incarnation = self._begin(dict(config))
            write_bytes(path / "server.pid", f"{os.getpid()}\n".encode())
            for folder in (path / "checkpoints", *(path / "spool").glob("round-*")):
                remove_unfinished(folder)
            remove_unfinished(path, "model")
        except BaseException:
            self._lock.release()
            raise
        self.checkpoints = CheckpointStore(
            path / "checkpoints", keep=int(config.get("checkpoint-keep", 3))
        )
        self.spool = Spool(path / "spool")
        self.journal = Journal(path / "journal.jsonl")
        self.metrics_path = path / "metrics.jsonl"

    def _begin(self, config: dict[str, Any]) -> tuple[str, int]:
        file = self.path / "config.json"
        uid, incarnation = secrets.token_hex(8), 0
        if file.exists():
            try:
                stored = json.loads(file.read_bytes())
                uid, incarnation = str(stored["uid"]), int(stored["incarnation"])
                earlier = dict(stored["config"])
                check_name(uid, "uid")
            except (
                OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, ConfigError
            ) as error:  # fmt: skip
                raise CheckpointCorrupt(
                    f"{file} cannot be read ({error}); restore it or choose another run-name"
                ) from error
            for key in sorted(FIXED_KEYS & (earlier.keys() | config.keys())):
                if earlier.get(key) != config.get(key):
                    raise ResumeMismatch(
                        f"run '{self.path.name}' was started with {key}={earlier.get(key)!r}, "
                        f"not {config.get(key)!r}; resume it with the same value "
                        "or choose another run-name"
                    )
        incarnation += 1
        write_json(file, {"uid": uid, "incarnation": incarnation, "config": config})
        return uid, incarnation

    def close(self) -> None:
        """Remove the pid file and give the lock back."""
        with suppress(OSError):
            (self.path / "server.pid").unlink()
        self._lock.release()

    def __enter__(self) -> RunFolder:
        """Return the open folder."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the folder."""
        self.close()

    @staticmethod
    def resolve(run_dir: str, run_name: str) -> Path:
        """Absolute path of a run's folder."""
        if not run_dir:
            raise ConfigError("run-dir is empty; name a folder that can be written")
        return Path(run_dir).expanduser().resolve() / run_name
