"""Which SuperNode serves a site, so that one that comes after a dead one can say so.

    <state-dir>/<run-name>-<uid>/<site>/
      supernode.json     node id and process of the SuperNode that served last

A SuperNode that is started again has a new node id, and Flower holds the old one for
alive for up to a minute.  The coordinator would wait for so long, lest a site that was
started twice by mistake be asked twice.  Here the process itself can be looked at.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import psutil

from flower_geo.errors import StateError
from flower_geo.site.place import Place

__all__ = ["forerunner"]

_FILE = "supernode.json"
#: Two clocks' readings of a process's start may differ by so many seconds.
_SAME_START = 1.0


def forerunner(place: Place, node_id: int, supernode: int | None = None) -> str:
    """Node id of the SuperNode that served this site before, known to be dead; else "".

    Writes down that ``node_id`` serves it now, unless the one before still lives.

    Args:
        place: of the site in its run.
        node_id: that Flower gave the SuperNode.
        supernode: pid of the SuperNode; None = the parent of this process.
    """
    path, mine = place.folder / _FILE, str(node_id)
    with contextlib.suppress(OSError, StateError, psutil.Error):
        last = _read(path)
        if last and last["node"] == mine:
            return str(last["before"])
        now = _described(psutil.Process(os.getppid() if supernode is None else supernode))
        if last and (last["host"] != now["host"] or _lives(last)):
            return ""  # elsewhere, or there: the coordinator asks it
        before = last["node"] if last else ""
        place.make()
        _write(path, {"node": mine, "before": before, **now})
        return str(before)
    return ""


def _described(process: psutil.Process) -> dict[str, Any]:
    return {"pid": process.pid, "started": process.create_time(), "host": _host()}


def _host() -> str:
    """Where process numbers mean the same: machine, boot and container."""
    names = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text())
    return " ".join(" ".join(names).split())


def _lives(last: dict[str, Any]) -> bool:
    try:
        process = psutil.Process(last["pid"])
        same = abs(process.create_time() - last["started"]) < _SAME_START
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _write(path: Path, record: dict[str, Any]) -> None:
    """Replace the file; one lost with the machine would be known to nobody, and is no loss."""
    new = path.with_suffix(f".{os.getpid()}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(record, file)
    new.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    """What was written down; None for nothing, or nothing that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    kinds = {"node": str, "before": str, "host": str, "pid": int, "started": float}
    whole = isinstance(found, dict) and all(type(found.get(k)) is t for k, t in kinds.items())
    return found if whole else None
