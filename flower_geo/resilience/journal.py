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
            StateError: the chain is broken; the first bad line is named.
        """
        if not self.path.exists():
            return []
        previous = GENESIS
        found: list[dict[str, Any]] = []
        raw = self.path.read_bytes()
        for number, line in enumerate(raw.split(b"\n")[:-1], start=1):
            try:
                entry = json.loads(line)
                claimed = entry.pop("this")
            except (ValueError, KeyError, AttributeError):
                raise StateError(f"{self.path} line {number} is not a journal line") from None
            if claimed != _digest(previous, entry):
                raise StateError(f"{self.path} line {number} breaks the hash chain")
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
            self._cut_torn_line()
        clean = {key: value for key, value in entry.items() if key != "this"}
        line = {**clean, "this": _digest(self._previous, clean)}
        try:
            with self.path.open("ab") as file:
                file.write(json.dumps(line, sort_keys=True).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._previous = None
            raise StateError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._previous = line["this"]

    def _cut_torn_line(self) -> None:
        if self.path.exists():
            raw = self.path.read_bytes()
            whole = raw.rfind(b"\n") + 1
            if whole != len(raw):
                os.truncate(self.path, whole)

    def last_round(self) -> int:
        """Round of the newest commit line, 0 when there is none."""
        rounds = [entry["round"] for entry in self.entries() if entry.get("what") == "commit"]
        return int(rounds[-1]) if rounds else 0
