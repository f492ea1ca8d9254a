"""A relay in a process of its own, so that it takes no time from the interpreter it serves.

    python -m benchmarks.relayed HOST:PORT DELAY RATE

Prints the address to dial and ends with its input; a line ``reset`` breaks all connections.
"""

from __future__ import annotations

import sys

from tests.integration.relay import Relay

__all__ = ["main"]


def main(target: str, delay: float, rate: float) -> None:
    """Pass connections on until the input ends."""
    with Relay(target, delay, rate) as relay:
        print(relay.address, flush=True)
        for line in sys.stdin:
            if line.strip() == "reset":
                relay.reset()
                print("reset", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
