"""DiLoCo's site that writes down what its worker says of each step, with the time."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flower_geo.messages import Reply
from flower_geo.site import client, client_app

BEATS = Path(os.environ["BENCH_BEATS"])
_answer, _words = client._answer, client._words
_asked: dict[str, Any] = {}


def answer(asking: Any, frame: dict[str, Any], descriptor: int | None) -> Reply:
    """Note what is asked, then ask it."""
    request: Mapping[str, Any] = frame["request"]
    _asked.update(name=frame["name"], round=request["round"])
    return _answer(asking, frame, descriptor)


def words(asking: Any, sock: socket.socket) -> Iterator[tuple[dict[str, Any], int | None]]:
    """The worker's words, written down on their way."""
    with (BEATS / f"{asking.site}.jsonl").open("a") as log:
        for word, file in _words(asking, sock):
            if word.get("kind") == "beat":
                log.write(json.dumps({"time": time.time(), **_asked, **word}) + "\n")
                log.flush()
            yield word, file


client._answer, client._words = answer, words
app = client_app()
