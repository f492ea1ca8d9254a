"""The run's journal: one JSON line a committed round, each holding the hash of the last.

A line's ``this`` is the sha256 of the line before's ``this`` followed by the
line's own canonical JSON without ``this``.  Removing, inserting or changing a
line breaks the chain at that place.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from flower_geo.errors import StateError

__all__ = ["Journal"]

GENESIS = "0" * 64


def _digest(previous: str, entry: dict[str, Any]) -> str:
    body = json.dumps(entry, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256((previous + body).encode()).hexdigest()


class Journal:
    """Append-only, hash-chained list of entries in ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._previous: str | None = None

    def entries(self) -> list[dict[str, Any]]:
        """Every whole line, verified; a torn last line is left out.

        Raises:
            StateError: the chain is broken, the first bad line is named; or the
                file cannot be read.
        """
        previous = GENESIS
        found: list[dict[str, Any]] = []
        raw = self._read()
        for number, line in enumerate(raw.split(b"\n")[:-1], start=1):
            try:
                entry = json.loads(line)
                claimed = entry.pop("this")
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
                raise self._broken(f"line {number} is not a journal line") from None
            if claimed != _digest(previous, entry):
                raise self._broken(f"line {number} breaks the hash chain")
            previous = claimed
            found.append({**entry, "this": claimed})
        return found

    def append(self, entry: dict[str, Any]) -> None:
        """Chain and write one entry, flushed to disk.

        A torn last line, left by a crash within a write, is cut off first.
        """
        if self._previous is None:
            known = self.entries()
            self._previous = known[-1]["this"] if known else GENESIS
        clean = {key: value for key, value in entry.items() if key != "this"}
        line = {**clean, "this": _digest(self._previous, clean)}
        try:
            self._cut_torn_line()
            with self.path.open("ab") as file:
                file.write(json.dumps(line, sort_keys=True).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._previous = None
            raise StateError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._previous = line["this"]

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise StateError(
                f"cannot read {self.path}: {error.strerror or error}; mend its permissions"
            ) from error

    def _broken(self, how: str) -> StateError:
        return StateError(
            f"{self.path} {how}: it was changed after it was written; restore it from a copy, or "
            "move it away to go on without the history"
        )

    def _cut_torn_line(self) -> None:
        raw = self._read()
        whole = raw.rfind(b"\n") + 1
        if whole != len(raw):
            os.truncate(self.path, whole)

    def last_round(self) -> int:
        """Round of the newest commit line, 0 when there is none."""
        rounds = [entry.get("round") for entry in self.entries() if entry.get("what") == "commit"]
        return int(rounds[-1] or 0) if rounds else 0
