"""The process in which the cloud's half of a split model trains, as the strategy commands it.

    <run folder>/cloud/
      stream.json                  port, certificate and secret, for the next life too (0600)
      begin.safetensors            the half a round begins with
      settled.safetensors          the half a round ended with
      rounds/                      the process's own snapshots within a round
      cloud.log

Commands and answers are lines of JSON on its standard input and output.  It ends with
its input, so that it never outlives the ServerApp.  One that dies is started again, is
told the round again, and goes on from its own snapshots; the sites come back by themselves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from flower_geo.config import SplitConfig
from flower_geo.durable import read_tensors, write_bytes, write_tensors
from flower_geo.errors import FlowerGeoError, RoundError, StateError
from flower_geo.messages import one_line
from flower_geo.transport import issue_token, self_signed

__all__ = ["CloudProcess"]

logger = logging.getLogger("flwr")

MODULE = "flower_geo.cloud"
#: Deaths in one round, or over one command, after which it is not started again.
DEATHS = 5
#: Seconds a command may take; to load a large model is one.
ANSWER_SECONDS = 1800.0
#: Seconds a token is good for beyond a round's deadline.
TOKEN_SLACK = 3600.0


class CloudProcess:
    """See the module text.

    Args:
        config: the run's.
        folder: the run folder.
        run: names the run to sites, the same in each of the server's lives.

    Attributes:
        restarts: how often it was started again by itself.
        failure: why it is not any more; None while it is.
    """

    def __init__(self, config: SplitConfig, folder: Path, run: str) -> None:
        self.config = config
        self.folder = folder / "cloud"
        self.run = run
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.RLock()
        self._begun: dict[str, Any] | None = None
        self._stream: dict[str, Any] = {}
        self._closing = threading.Event()
        self._deaths = 0
        self._watcher: threading.Thread | None = None
        self.restarts = 0
        self.failure: FlowerGeoError | None = None

    # -- what the strategy says -------------------------------------------------

    def begin(
        self,
        round: int,
        attempt: int,
        sites: Sequence[str],
        half: Mapping[str, Tensor],
        moments: Mapping[str, Tensor],
    ) -> None:
        """A round of these sites begins from this adapter and optimizer state; () = none.

        Raises:
            RoundError: the process cannot be started, or cannot take it.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # In one order, so that the round has the same name in another life of the server.
        tensors = {f"half/{name}": half[name] for name in sorted(half)}
        tensors |= {f"moments/{name}": moments[name] for name in sorted(moments)}
        path = self.folder / "begin.safetensors"
        with self._lock:
            self._deaths = 0
            self._begun = {
                "do": "begin", "round": round, "attempt": attempt, "sites": sorted(sites),
                "tensors": str(path), "file": write_tensors(path, tensors),
            }  # fmt: skip
            self._ask(self._begun)

    def settle(self, weights: Mapping[str, float]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """End the round: adapter and optimizer state as they are now.

        Args:
            weights: of the sites whose replies are folded, for a half each.

        Raises:
            RoundError: the process cannot say.
        """
        answer = self._ask({"do": "settle", "weights": dict(weights)})
        tensors = read_tensors(self.folder / "settled.safetensors", str(answer["file"]))
        parts: dict[str, dict[str, Tensor]] = {"half": {}, "moments": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition("/")
            parts[part][rest] = tensor
        return parts["half"], parts["moments"]

    def ticket(self, round: int, site: str) -> str:
        """What a site's request carries: where it dials, and with what."""
        with self._lock:
            stream = self._stream
        token = issue_token(
            bytes.fromhex(stream["secret"]), self.run, site, round,
            self.config.deadline + TOKEN_SLACK,
        )  # fmt: skip
        return json.dumps(
            {
                "address": f"{self.config.stream_host}:{stream['port']}", "run": self.run,
                "token": token, "certificate": stream["certificate"],
            }
        )  # fmt: skip

    @property
    def begun(self) -> bool:
        """Whether a process was told of a round."""
        return self._begun is not None

    def close(self) -> None:
        """End the process; a second call does nothing."""
        self._closing.set()
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            _end(process)
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    # -- the process --------------------------------------------------------------

    def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """One command, and its answer; a process that dies over it is started again."""
        with self._lock:
            while True:
                try:
                    process = self._living()
                    found = _said(process, command)
                    break
                except (OSError, ValueError) as error:
                    self._died(error)
        if "error" in found:
            raise RoundError(f"the cloud's half: {one_line(str(found['error']))}")
        return found

    def _living(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._process is not None:
            _end(self._process)
        self._stream = self._stream or self._known()
        with open(self.folder / "cloud.log", "ab", opener=_private) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, bufsize=1,
                env={**os.environ, "OMP_NUM_THREADS": str(self.config.threads or 1)},
            )  # fmt: skip
        ready = _said(
            self._process,
            {
                "do": "serve", "config": self.config.public(), "folder": str(self.folder),
                "run": self.run, **self._stream,
            },
        )  # fmt: skip
        if "error" in ready:
            self.close()
            raise RoundError(f"the cloud's half cannot start: {one_line(str(ready['error']))}")
        if ready["port"] != self._stream["port"]:
            self._stream = {**self._stream, "port": int(ready["port"])}
            write_bytes(self.folder / "stream.json", json.dumps(self._stream).encode())
        if self._watcher is None:
            self._watcher = threading.Thread(
                target=self._watch, name="flower-geo-cloud", daemon=True
            )
            self._watcher.start()
        return self._process

    def _died(self, error: Exception) -> None:
        """Count a death; ``RoundError`` where it was one too many."""
        self._deaths += 1
        if self._process is not None:
            _end(self._process)
        if self._deaths >= DEATHS:
            raise RoundError(
                f"the process of the cloud's half died {self._deaths} times in a round "
                f"({one_line(str(error)) or type(error).__name__}); see {self.folder / 'cloud.log'}"
            ) from error

    def _watch(self) -> None:
        """Start a process that died again, while nobody asks it anything."""
        while not self._closing.wait(0.5):
            with self._lock:
                dead = self._process is not None and self._process.poll() is not None
                if not dead or self._closing.is_set() or self._begun is None:
                    continue
                self.restarts += 1
                logger.warning("flower-geo: the cloud's half died; it is started again")
                try:
                    self._died(OSError("it fails at its work"))
                    self._ask(self._begun)
                except FlowerGeoError as failure:
                    logger.error("flower-geo: %s", failure)
                    self.failure = failure
                    return

    # -- the stream -----------------------------------------------------------------

    def _known(self) -> dict[str, Any]:
        """Port, certificate and secret: those of an earlier life, or new ones."""
        path, config = self.folder / "stream.json", self.config
        try:
            found = json.loads(path.read_bytes())
            if found["host"] == config.stream_host and not config.stream_certificate:
                return dict(found)
        except (OSError, ValueError, KeyError, TypeError):
            pass
        if config.stream_certificate:
            try:
                certificate = Path(config.stream_certificate).expanduser().read_bytes()
                key = Path(config.stream_key).expanduser().read_bytes()
            except OSError as error:
                raise StateError(
                    f"cannot read {error.filename}: {error.strerror}; name the PEM files in "
                    "stream-certificate and stream-key"
                ) from error
        else:
            certificate, key = self_signed([config.stream_host])
        made = {
            "host": config.stream_host, "port": config.stream_port,
            "certificate": certificate.decode(), "key": key.decode(),
            "secret": secrets.token_bytes(32).hex(),
        }  # fmt: skip
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_bytes(path, json.dumps(made).encode())
        return made


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _said(process: subprocess.Popen[str], command: Mapping[str, Any]) -> dict[str, Any]:
    """Write a command, read its answer.

    Raises:
        OSError, ValueError: the process is gone, or says no JSON.
    """
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(command) + "\n")
    process.stdin.flush()
    # Each command has one line for an answer, so that nothing is in a buffer yet.
    ready, _, _ = select.select([process.stdout], [], [], ANSWER_SECONDS)
    if not ready:
        raise OSError(f"it has not answered for {ANSWER_SECONDS:g} s")
    line = process.stdout.readline()
    if not line:
        raise OSError(f"it ended with exit code {process.wait()}")
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("it answered with no object")
    return found


def _end(process: subprocess.Popen[str]) -> None:
    """Close its input, and kill it where it does not end by that."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
