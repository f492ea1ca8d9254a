"""The ClientApp's side of a site's worker process: hand over, look on, start it again.

A worker that dies is noticed at once, by the end of its socket; one that is
stopped within two seconds; one that hangs when it has said nothing for
``worker-stall`` seconds, or ten times as long while it still uses the CPU.  It
is started again and goes on from the round's snapshot.  Imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from flower_geo import errors
from flower_geo.errors import ConfigError, FlowerGeoError, StateLocked, WorkerFailed
from flower_geo.messages import Reply, Request, one_line
from flower_geo.site import frames
from flower_geo.site.identity import node_number, node_value, site_name
from flower_geo.site.place import BUSY, MODULE, Place, life_stamp

__all__ = ["ask_worker", "deployed", "uses_worker"]

logger = logging.getLogger(__name__)

#: Module of the process in which Flower runs a deployed ClientApp, and nothing else.
_DEPLOYED = "flwr.supernode.runtime.run_clientapp"
#: Deaths in a row, without a step saved in between, that end a request.
_DEATHS = 3
#: Workers that may leave in an orderly way, in a row, before a request is given up.
_LEAVES = 5
#: Seconds until a worker listens; libraries on a slow disk take their time.
_START_SECONDS = 180.0
#: Seconds between two looks at a silent worker.
_LOOK_SECONDS = 0.5
#: Seconds after which a worker that is stopped (SIGSTOP) is given up.
_STOPPED_SECONDS = 2.0
#: A worker that uses the CPU may be silent that many times as long.
_BUSY_FACTOR = 10
#: Seconds given to whoever told the worker to end, to tell this process as well.
_LEAVE_SECONDS = 1.0
#: Seconds a worker may take to read or write a frame it has begun.
_FRAME_SECONDS = 120.0
#: Bytes of the log above which a new worker begins it anew.
_MAX_LOG = 4 * 2**20
_NEWS_SECONDS = 30.0

#: Workers this process started, kept to be reaped.
_children: list[subprocess.Popen[bytes]] = []


class _Gone(Exception):
    """The worker died, or is to be given up; the text says how."""


class _Left(Exception):
    """The worker ended in an orderly way, its work in a snapshot."""


@dataclass
class _Asking:
    """One request on its way through one or more workers.

    Attributes:
        stored: steps of the round that a snapshot holds, as far as is known.
    """

    site: str
    place: Place
    stall: float
    idle: float
    stored: int = 0


def uses_worker(node_config: Mapping[str, Any]) -> bool:
    """Whether the site trains in a worker process: node-config ``worker``.

    ``auto``, the default, is a worker in a deployment, and this very process
    where Flower simulates sites or an app is called directly.

    Raises:
        ConfigError: the value is none of ``process``, ``in-process`` and ``auto``.
    """
    chosen = node_value(node_config, "worker", "auto")
    if chosen not in ("process", "in-process", "auto"):
        raise ConfigError(
            f"node-config worker={chosen!r} is not known; use 'process', 'in-process' or 'auto'"
        )
    return chosen == "process" or (chosen == "auto" and deployed())


def deployed() -> bool:
    """Whether Flower runs this process for a SuperNode."""
    return _DEPLOYED in sys.modules


def ask_worker(name: str, request: Request, node_config: Mapping[str, Any]) -> Reply:
    """Have the site's worker serve a request; start one where none lives.

    Args:
        name: ``greet_request``, ``train_request`` or ``evaluate_request``.
        request: what the coordinator asked.
        node_config: of the site.

    Raises:
        WorkerFailed: workers die or hang again and again.
        FlowerGeoError: what the worker raised, of the same kind.
        RuntimeError: the worker failed in a way nobody foresaw; its log holds the traceback.
    """
    asking = _Asking(
        site_name(node_config), Place.of(request, node_config),
        stall=float(max(1, node_number(node_config, "worker-stall", 300))),
        idle=float(node_number(node_config, "worker-idle", 900)),
    )  # fmt: skip
    asking.place.make()
    table, file = frames.spooled(request.arrays, asking.place.folder)
    with file or contextlib.nullcontext():
        frame = {
            "name": name, "stamp": life_stamp(), "idle": asking.idle,
            "request": frames.values_of(request), "node": dict(node_config), "arrays": table,
        }  # fmt: skip
        return _until_answered(asking, frame, file.fileno() if file is not None else None)


def _until_answered(asking: _Asking, frame: dict[str, Any], descriptor: int | None) -> Reply:
    deaths, leaves, stored = 0, 0, 0
    while True:
        try:
            return _answer(asking, frame, descriptor)
        except _Gone as gone:
            deaths = 1 if asking.stored > stored else deaths + 1
            leaves, stored = 0, asking.stored
            logger.warning("site %s: the worker %s", asking.site, gone)
            if deaths >= _DEATHS:
                raise WorkerFailed(
                    f"the worker of site '{asking.site}' was lost {deaths} times in a row at one "
                    f"request, at last it {gone}; see {asking.place.log}"
                ) from None
        except _Left:
            leaves += 1
            if leaves > _LEAVES:
                raise WorkerFailed(
                    f"workers of site '{asking.site}' are told to end as soon as they start; "
                    f"see {asking.place.log}"
                ) from None
            # Where this process is to end as well, the signal comes now.
            time.sleep(_LEAVE_SECONDS)


def _answer(asking: _Asking, frame: dict[str, Any], descriptor: int | None) -> Reply:
    """Ask once.

    Raises:
        _Gone: the worker died or was given up.
        _Left: it ended in an orderly way.
    """
    with _connected(asking, str(frame["stamp"])) as sock:
        sock.settimeout(_FRAME_SECONDS)
        try:
            frames.send(sock, frame, descriptor)
        except OSError:
            raise _Left from None  # it had closed its line already
        told = time.monotonic()
        for answer, file in _words(asking, sock):
            kind = answer.get("kind")
            try:
                if kind == "reply":
                    arrays = frames.read_arrays(answer.get("arrays"), file)
                    return frames.reply_from(answer.get("reply"), arrays)
            finally:
                if file is not None:
                    os.close(file)
            if kind == "leaving":
                raise _Left
            if kind == "error":
                raise _as_raised(answer)
            if kind == "fault":
                detail = one_line(str(answer.get("detail")))
                raise RuntimeError(f"{detail} (in the worker; traceback in {asking.place.log})")
            if kind == "beat":
                asking.stored = max(asking.stored, int(answer["stored"]))
                if answer["step"] and time.monotonic() - told >= _NEWS_SECONDS:
                    told = time.monotonic()
                    logger.info(
                        "site %s: step %d of %s, loss %.4f",
                        asking.site, answer["step"], answer["of"] or "?", answer["loss"],
                    )  # fmt: skip
    raise AssertionError("words end with an answer or an exception")


def _as_raised(answer: Mapping[str, Any]) -> FlowerGeoError:
    """The worker's error as one of the same kind."""
    found = getattr(errors, str(answer.get("error")), None)
    if isinstance(found, type) and issubclass(found, FlowerGeoError):
        return found(str(answer.get("detail")))
    return FlowerGeoError(str(answer.get("detail")))


# -- looking on -------------------------------------------------------------------


def _words(asking: _Asking, sock: socket.socket) -> Iterator[tuple[dict[str, Any], int | None]]:
    """The worker's frames as they come.

    Raises:
        _Gone: it died, is stopped, or hangs; the latter two were killed.
        _Left: it closed the line before it took the request.
    """
    taken = False
    process = asking.place.process()
    quiet = stopped = 0.0
    used = _cpu_seconds(process)
    line = select.poll()
    line.register(sock, select.POLLIN)
    while True:
        began = time.monotonic()
        if line.poll(1000 * _LOOK_SECONDS):
            try:
                word = frames.receive(sock)
            except TimeoutError:
                _give_up(asking, process)
                raise _Gone("stopped within a message") from None
            except OSError:
                word = None
            if word is None:
                if not taken:
                    raise _Left
                raise _Gone(_how_it_died(process.pid if process is not None else None))
            taken, quiet, stopped = True, 0.0, 0.0
            used = _cpu_seconds(process)
            yield word
            continue
        # Time this process did not run itself tells nothing of the worker.
        passed = min(time.monotonic() - began, 2 * _LOOK_SECONDS)
        quiet += passed
        process = process or asking.place.process()
        stopped = stopped + passed if _is_stopped(process) else 0.0
        if stopped >= _STOPPED_SECONDS:
            _give_up(asking, process)
            raise _Gone("was stopped")
        if quiet >= asking.stall:
            busy = _cpu_seconds(process) - used >= 0.02 * quiet
            if not busy or quiet >= _BUSY_FACTOR * asking.stall:
                _give_up(asking, process)
                raise _Gone(f"said nothing for {quiet:.0f} s (worker-stall={asking.stall:g})")


def _is_stopped(process: psutil.Process | None) -> bool:
    try:
        return process is not None and process.status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def _cpu_seconds(process: psutil.Process | None) -> float:
    try:
        times = process.cpu_times() if process is not None else None
    except psutil.Error:
        times = None
    return float(times.user + times.system) if times is not None else 0.0


def _give_up(asking: _Asking, process: psutil.Process | None) -> None:
    """Kill a worker that does nothing; another ClientApp may have done so."""
    if process is not None:
        with contextlib.suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + 5.0
    while asking.place.owner() is not None and time.monotonic() < deadline:
        time.sleep(0.02)


def _how_it_died(pid: int | None) -> str:
    """What is known of the end of a worker that this process started."""
    for child in [child for child in _children if child.pid == pid]:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(1.0)
            _children.remove(child)
            if code == -9:
                return "was killed (SIGKILL; out of memory?)"
            return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return "died"


# -- starting -----------------------------------------------------------------------


def _connected(asking: _Asking, stamp: str) -> socket.socket:
    """A connection to the site's worker, started where there is none.

    Raises:
        _Gone: it ended before it listened.
        StateLocked: one lives where it cannot be reached.
        WorkerFailed: it does not come to listen.
    """
    place, child = asking.place, None
    deadline = time.monotonic() + _START_SECONDS
    while True:
        sock = place.connect()
        if sock is not None:
            return sock
        if child is not None and child.poll() is not None:
            if child.returncode not in (0, BUSY):
                raise _Gone(_how_it_died(child.pid))
            child = None
        if child is None and place.owner() is None:
            child = _started(asking, stamp)
        if time.monotonic() > deadline:
            owner = place.owner()
            if owner is None:
                raise WorkerFailed(
                    f"the worker of site '{asking.site}' does not start; see {place.log}"
                )
            raise StateLocked(
                f"site '{asking.site}' has a worker, process {owner or 'unknown'}, that cannot be "
                f"reached from here ({place.home}); end it where it runs"
            )
        time.sleep(0.02)


def _started(asking: _Asking, stamp: str) -> subprocess.Popen[bytes]:
    """Start a worker that outlives this process.

    Raises:
        WorkerFailed: it cannot be started.
    """
    _children[:] = [child for child in _children if child.poll() is None]
    place = asking.place
    place.make()
    command = [sys.executable, "-P", "-m", MODULE, str(place.folder), stamp, str(asking.idle)]
    try:
        with open(os.open(place.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as log:
            if log.tell() > _MAX_LOG:
                log.truncate(0)
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        raise WorkerFailed(
            f"the worker of site '{asking.site}' cannot be started: {error.strerror or error}"
        ) from error
    _children.append(child)
    return child
