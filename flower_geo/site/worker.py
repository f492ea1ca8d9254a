"""The process that trains at a site: ``python -m flower_geo.site.worker FOLDER STAMP IDLE``.

It outlives the ClientApps that ask it, so that model, tokenizer and data stay
in memory from one round to the next.  There is one a site and run, held by a
lock.  It serves one request at a time; the others wait, and are told how the
one at work goes on, so that each word they get was said by the thread that
trains.  It ends after ``IDLE`` seconds without a request, when its folder is
gone, and on SIGTERM or SIGUSR1: then after the step at work, with a snapshot.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_geo.durable import FileLock
from flower_geo.errors import FlowerGeoError, StateLocked, WorkerFailed
from flower_geo.messages import Reply, Request
from flower_geo.site import frames
from flower_geo.site.place import BUSY, Place
from flower_geo.site.watch import Leaving, Watch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Worker", "WorkerLock", "main"]

logger = logging.getLogger(__name__)

#: Seconds between two words on the steps.
_BEAT_SECONDS = 0.5
#: Seconds a ClientApp may take to read or to write a frame.
_PATIENCE = 60.0
#: Seconds of idleness after the last round of a run.
_AFTER_RUN = 60.0
#: Seconds to wait for the first request at least.
_FIRST_SECONDS = 30.0
#: Seconds between looks at whether the folder is still there.
_LOOK_SECONDS = 2.0
#: Parts of the work that can be left at once: nothing is lost that a snapshot does not hold.
_EARLY = ("model", "data", "base", "training")
_ENDING = (signal.SIGTERM, signal.SIGUSR1)


class WorkerLock(FileLock):
    """A lock whose file goes with its owner."""

    def acquire(self, what: str) -> None:
        """Take the lock, waiting a moment for one who only looks or is just leaving."""
        deadline = time.monotonic() + 1.0
        while True:
            try:
                super().acquire(what)
            except StateLocked:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
                continue
            if self.in_place():
                return
            super().release()  # the file was removed by its last owner in between

    def in_place(self) -> bool:
        """Whether the lock is held, and the file that others look at is the one it is on."""
        try:
            return self._handle is not None and os.path.samestat(
                os.fstat(self._handle), os.stat(self.path)
            )
        except OSError:
            return False

    def release(self) -> None:
        """Remove the file and let go."""
        if self.in_place():
            self.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()
        super().release()


@dataclass(eq=False)
class _Asker:
    """A ClientApp on the line, and what it asked for."""

    sock: socket.socket
    frame: dict[str, Any] = field(default_factory=dict)
    descriptor: int | None = None

    def tell(self, **frame: Any) -> None:
        """A word that may be lost: one who does not read must not hold up the training."""
        with contextlib.suppress(OSError):
            self.sock.setblocking(False)
            frames.send(self.sock, frame)

    def close(self) -> None:
        self.sock.close()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class _ServedWatch(Watch):
    """Passes on to all who wait how far the request at work is."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._said = 0.0
        self._news: dict[str, Any] = {"phase": "", "step": 0, "of": 0, "loss": 0.0, "stored": 0}

    def phase(self, name: str) -> None:
        if self.leaving() and name in _EARLY:
            raise Leaving
        logger.info("%s", name)
        self._news["phase"] = name
        self._say()

    def step(self, done: int, of: int | None, loss: Tensor) -> None:
        if time.monotonic() - self._said >= _BEAT_SECONDS:
            self._news |= {"step": done, "of": of or 0, "loss": float(loss)}
            self._say()

    def stored(self, steps: int) -> None:
        self._news["stored"] = steps
        self._say()

    def leaving(self) -> bool:
        return self._worker.told

    def _say(self) -> None:
        self._said = time.monotonic()
        self._worker.poll(0.0)
        self._worker.tell_all(kind="beat", **self._news)


class Worker:
    """See the module text.

    Args:
        place: where it works.
        lock: of that place, held.
        stamp: what its askers must have, see ``place.life_stamp``.
        idle: seconds without a request after which it ends.

    Attributes:
        told: whether it was told to end.
    """

    def __init__(self, place: Place, lock: WorkerLock, stamp: str, idle: float) -> None:
        self.told = False
        self._place = place
        self._lock = lock
        self._stamp = stamp
        self._idle = idle
        self._selector = selectors.DefaultSelector()
        self._askers: list[_Asker] = []
        self._jobs: deque[_Asker] = deque()

    def run(self) -> None:
        """Serve until it is time to end."""
        with self._listening(), self._signals():
            # Whoever started it has not had time to ask yet.
            quiet_since = time.monotonic() + max(0.0, _FIRST_SECONDS - self._idle)
            while not self.told:
                if self._jobs:
                    self._serve(self._jobs.popleft())
                    quiet_since = time.monotonic()
                    continue
                left = quiet_since + self._idle - time.monotonic()
                if left <= 0:
                    logger.info("no request for %g s: it ends", self._idle)
                    break
                if not self._lock.in_place():
                    logger.warning("%s is gone: it ends", self._place.home)
                    break
                self.poll(min(left, _LOOK_SECONDS))
            # Who waits asks the next worker.
            self.tell_all(kind="leaving")
            for asker in list(self._askers):
                self._drop(asker)

    # -- the line --------------------------------------------------------------

    @contextmanager
    def _listening(self) -> Iterator[None]:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = self._place.home / "socket"
        path.unlink(missing_ok=True)  # of one that was killed
        before = os.umask(0o177)
        try:
            with self._place.address() as address:
                listener.bind(address)
        finally:
            os.umask(before)
        try:
            listener.listen(16)
            listener.setblocking(False)
            accept = partial(self._accept, listener)
            self._selector.register(listener, selectors.EVENT_READ, accept)
            yield
        finally:
            if self._lock.in_place():
                path.unlink(missing_ok=True)
            listener.close()
            self._selector.close()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        mine, others = socket.socketpair()
        for end in (mine, others):
            end.setblocking(False)
        self._selector.register(mine, selectors.EVENT_READ, lambda: mine.recv(64))
        signal.set_wakeup_fd(others.fileno(), warn_on_full_buffer=False)
        for number in _ENDING:
            signal.signal(number, self._tell_to_end)
        try:
            yield
        finally:
            # A second notice while it clears up changes nothing.
            for number in _ENDING:
                signal.signal(number, signal.SIG_IGN)
            signal.set_wakeup_fd(-1)
            mine.close()
            others.close()

    def _tell_to_end(self, number: int, _: object) -> None:
        self.told = True

    def poll(self, timeout: float) -> None:
        """Take up what came in; wait for it up to ``timeout`` seconds."""
        for key, _ in self._selector.select(timeout):
            act: Callable[[], object] = key.data
            act()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            asker = _Asker(listener.accept()[0])
            self._askers.append(asker)
            self._selector.register(asker.sock, selectors.EVENT_READ, lambda: self._hear(asker))

    def _hear(self, asker: _Asker) -> None:
        """Read the request; a second word can only be the end of the line."""
        found = None
        try:
            asker.sock.settimeout(_PATIENCE)
            if not asker.frame:
                found = frames.receive(asker.sock)
        except (OSError, WorkerFailed) as error:
            logger.warning("a request could not be read: %s", error)
        if found is None:
            self._drop(asker)
            return
        asker.frame, asker.descriptor = found
        self._jobs.append(asker)
        asker.tell(kind="accepted")

    def _drop(self, asker: _Asker) -> None:
        if asker in self._askers:
            self._askers.remove(asker)
            self._selector.unregister(asker.sock)
        with contextlib.suppress(ValueError):
            self._jobs.remove(asker)
        asker.close()

    def tell_all(self, **frame: Any) -> None:
        """A word to everyone whose request was taken."""
        for asker in self._askers:
            if asker.frame:
                asker.tell(**frame)

    # -- work ------------------------------------------------------------------

    def _serve(self, asker: _Asker) -> None:
        if asker.frame.get("stamp") != self._stamp:
            logger.info("the code or the environment at this site changed: it ends")
            asker.tell(kind="leaving")
            self.told = True
            return
        answer: dict[str, Any] = {}
        file = None
        try:
            reply = self._reply(asker)
            table, file = frames.spooled(reply.arrays, self._place.folder)
            answer = {"kind": "reply", "reply": frames.values_of(reply), "arrays": table}
        except Leaving:
            answer = {"kind": "leaving"}
        except FlowerGeoError as error:
            logger.error("%s: %s", type(error).__name__, error)
            answer = {"kind": "error", "error": type(error).__name__, "detail": str(error)}
        except Exception as error:
            # Whatever it was may have left the model or the device in any state.
            logger.error("%s", traceback.format_exc())
            answer = {"kind": "fault", "detail": f"{type(error).__name__}: {error}"}
            self.told = True
        try:
            asker.sock.settimeout(_PATIENCE)
            frames.send(asker.sock, answer, file.fileno() if file is not None else None)
        except OSError:
            # The reply lies in the state folder: it is given to whoever asks again.
            logger.info("the ClientApp that asked is gone")
        finally:
            if file is not None:
                file.close()
            self._drop(asker)

    def _reply(self, asker: _Asker) -> Reply:
        frame = asker.frame
        arrays = frames.read_arrays(frame.get("arrays"), asker.descriptor)
        request = frames.request_from(frame.get("request"), arrays)
        self._idle = _idle_after(request, float(frame["idle"]))
        # Imported with the line open, so that who asks sees it live.
        from flower_geo.site import work

        handlers: dict[str, Callable[[Request, dict[str, Any], Watch], Reply]] = {
            "greet_request": work.greet_request,
            "train_request": work.train_request,
            "evaluate_request": work.evaluate_request,
        }
        began = time.monotonic()
        reply = handlers[str(frame["name"])](request, dict(frame["node"]), _ServedWatch(self))
        logger.info(
            "%s of round %d: %s in %.1f s",
            frame["name"], request.round, reply.status, time.monotonic() - began,
        )  # fmt: skip
        return reply


def _idle_after(request: Request, idle: float) -> float:
    """Seconds to wait for another request: few when the run's last round is done."""
    rounds = request.config.get("rounds")
    over = isinstance(rounds, int) and request.round >= rounds
    return min(idle, _AFTER_RUN) if over else idle


def main(arguments: list[str]) -> int:
    """Work at a place until it is time to end; return the exit code."""
    folder, stamp, idle = arguments
    place = Place(Path(folder))
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(process)d %(message)s"
    )
    lock = WorkerLock(place.lock)
    try:
        place.make()
        lock.acquire("the worker's place")
    except StateLocked:
        return BUSY
    except FlowerGeoError as error:
        logger.error("%s", error)
        return 1
    try:
        logger.info("worker at %s", place.folder)
        Worker(place, lock, stamp, float(idle)).run()
    finally:
        lock.release()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
