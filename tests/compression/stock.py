"""A Flower app in one process: stock strategies, ClientApps with a state that stays, no sockets."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import context_from_proto, context_to_proto
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, Krum, Result, Strategy

from flower_geo.compression.mod import compression_mod
from tests.federation import MemoryGrid, Node, copied
from tests.integration.anyapp import client_app

Fault = Callable[[int, Message, Message], list[Message]]
TOPK = "topk(density=0.1,chunk=256)|int8(block=64)"
NODES = range(10, 14)
#: Flower's own, with what makes them fit the small app.
STRATEGIES: dict[str, tuple[type[FedAvg], dict[str, Any]]] = {
    "FedAvg": (FedAvg, {}),
    "FedAdam": (FedAdam, {"eta": 0.01}),
    "FedMedian": (FedMedian, {}),
    "Krum": (Krum, {"num_malicious_nodes": 0}),
}


class StockGrid(MemoryGrid):
    """Nodes keep their ``Context.state``, which goes through Flower's wire format as well.

    Args:
        apps: a ClientApp by node id.
        fault: may replace a reply: (node id, request, reply) -> what arrives.

    Attributes:
        states: what each node holds; take one out and the node has forgotten it.
        sent: (node id, message type) of all requests and their payload bytes.
    """

    def __init__(self, apps: Mapping[int, Any], fault: Fault | None = None) -> None:
        super().__init__(
            Node(node_id, {"partition-id": index}, app)
            for index, (node_id, app) in enumerate(apps.items())
        )
        self.fault = fault
        self.states: dict[int, Context] = {}
        self.sent: list[tuple[int, str, int]] = []
        self.errors: list[str] = []

    def _serve(self, message: Message) -> list[Message]:
        node = self.nodes[message.metadata.dst_node_id]
        nbytes = sum(
            len(array.data)
            for record in message.content.array_records.values()
            for array in record.values()
        )
        self.sent.append((node.node_id, message.metadata.message_type, nbytes))
        fresh = Context(1, node.node_id, dict(node.config), RecordDict(), {})
        context = self.states.get(node.node_id, fresh)
        try:
            reply = node.app(copied(message), context)
        except Exception as error:
            self.errors.append(str(error))
            reply = Message(Error(2, f"{type(error)}:<{error}>"), reply_to=message)
        self.states[node.node_id] = context_from_proto(context_to_proto(context))
        replies = [reply] if self.fault is None else self.fault(node.node_id, message, reply)
        return [copied(each) if each.has_content() else each for each in replies]


def make_app(*mods: Any) -> Any:
    """The small app of ``tests/integration/anyapp`` with these mods."""
    app = ClientApp(mods=list(mods))
    app.train()(client_app.train)
    app.evaluate()(client_app.evaluate)
    return app


def run(strategy: Strategy, grid: StockGrid, rounds: int = 4) -> Result:
    """The whole run, nodes always in the same order."""
    random.seed(0)
    return strategy.start(grid=grid, initial_arrays=client_app.initial(), num_rounds=rounds)


def weights(result: Result) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in result.arrays.items()}


def apart(result: Result, reference: Result) -> float:
    """Distance of two runs' weights over how far the reference moved."""
    start = {name: array.numpy() for name, array in client_app.initial().items()}
    found, wanted = weights(result), weights(reference)
    floats = [name for name in wanted if wanted[name].dtype.kind == "f"]
    off = sum(float(((found[n] - wanted[n]) ** 2).sum()) for n in floats)
    way = sum(float(((wanted[n] - start[n]) ** 2).sum()) for n in floats)
    return float(np.sqrt(off / way))


def make(name: str = "FedAvg", nodes: int = 4, **changes: Any) -> FedAvg:
    """One of :data:`STRATEGIES` that waits for so many nodes."""
    kind, own = STRATEGIES[name]
    counts = dict.fromkeys(("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), nodes)
    return kind(**{**counts, **own, **changes})


def grid(*, mod: Any = None, nodes: Any = NODES, fault: Fault | None = None) -> StockGrid:
    """Nodes with the small app, by default with the mod; ``mod=()`` is without."""
    mods = (compression_mod(),) if mod is None else mod
    return StockGrid({node: make_app(*mods) for node in nodes}, fault)


def same_bits(one: Result, other: Result) -> bool:
    left, right = weights(one), weights(other)
    return list(left) == list(right) and all(
        left[n].dtype == right[n].dtype and left[n].tobytes() == right[n].tobytes() for n in left
    )


@contextmanager
def flower_lines(level: int) -> Iterator[list[str]]:
    """What is logged from that level on; Flower's logger hands nothing up."""
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= level:
                found.append(record.getMessage())

    handler, logger = Collect(), logging.getLogger("flwr")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
