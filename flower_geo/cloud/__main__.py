"""Commands on standard input, one JSON object a line; an answer on standard output to each.

``serve`` (the first): configuration, folder, run, secret, certificate, key and port ->
``port``.  ``begin``: a round, its sites and the half it begins with.  ``settle``: ends it and
leaves the half in ``settled.safetensors``.  The process ends with its input.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from flower_geo.errors import FlowerGeoError

__all__ = ["main"]

logger = logging.getLogger(__name__)


def main() -> int:
    """Serve until the input ends."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(process)d %(message)s"
    )
    # Whatever prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    first = sys.stdin.readline()
    if not first:
        return 0
    try:
        from flower_geo.cloud.rounds import Rounds

        rounds = Rounds.serving(json.loads(first))
    except (FlowerGeoError, OSError, ValueError, KeyError) as error:
        logger.exception("cannot serve")
        _say(answers, {"error": f"{error}"})
        return 1
    _say(answers, {"port": rounds.port})
    try:
        _obey(sys.stdin, answers, {"begin": rounds.begin, "settle": rounds.settle})
    finally:
        rounds.close()
    return 0


def _obey(
    commands: TextIO,
    answers: TextIO,
    known: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]],
) -> None:
    for line in commands:
        try:
            command = json.loads(line)
            answer = known[command["do"]](command)
        except FlowerGeoError as error:
            logger.error("%s", error)
            answer = {"error": str(error)}
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            logger.exception("a command fails")
            answer = {"error": f"{type(error).__name__}: {error}"}
        _say(answers, answer)


def _say(answers: TextIO, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    # A second copy under the name __main__ would know other classes than the package.
    from flower_geo.cloud.__main__ import main as entry

    sys.exit(entry())
