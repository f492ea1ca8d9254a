"""A client that fits a small network to data of its own, in numpy.

Whether it has the mod is said by ``mod`` in its node-config (default: it has).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_geo.compression.mod import compression_mod

INPUTS, HIDDEN, OUTPUTS = 48, 96, 24
STEPS, RATE, EXAMPLES = 8, 0.05, 64

mod = compression_mod()


def sometimes(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """The mod, where the node-config does not say otherwise."""
    if not context.node_config.get("mod", True):
        return call_next(message, context)
    return mod(message, context, call_next)


app = ClientApp(mods=[sometimes])


def initial() -> ArrayRecord:
    """Weights to start from, with a counter such as batch norm keeps."""
    random = np.random.default_rng(0)
    weights = {
        "hidden.weight": random.normal(0, INPUTS**-0.5, (INPUTS, HIDDEN)),
        "hidden.bias": np.zeros(HIDDEN),
        "out.weight": random.normal(0, HIDDEN**-0.5, (HIDDEN, OUTPUTS)),
        "scale": np.ones(()),
    }
    record = ArrayRecord({n: Array(np.asarray(v, np.float32)) for n, v in weights.items()})
    record["steps"] = Array(np.asarray(0, np.int64))
    return record


def data(partition: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a partition; one teacher for all."""
    teacher = np.random.default_rng(1).normal(0, 0.3, (INPUTS, OUTPUTS))
    random = np.random.default_rng(100 + partition)
    inputs = random.normal(0, 1, (EXAMPLES, INPUTS))
    return inputs.astype(np.float32), np.tanh(inputs @ teacher).astype(np.float32)


def step(w: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray, rate: float) -> float:
    """One step of gradient descent in place; the loss before it."""
    hidden = np.tanh(x @ w["hidden.weight"] + w["hidden.bias"])
    error = hidden @ w["out.weight"] * w["scale"] - y
    if rate:
        back = (error * w["scale"] @ w["out.weight"].T) * (1 - hidden**2) / len(x)
        w["out.weight"] -= rate * (hidden.T @ error * w["scale"] / len(x))
        w["hidden.weight"] -= rate * (x.T @ back)
        w["hidden.bias"] -= rate * back.sum(0)
    return float((error**2).mean())


@app.train()
def train(message: Message, context: Context) -> Message:
    """Some steps from the weights received."""
    w = {name: a.numpy() for name, a in message.content.array_records["arrays"].items()}
    x, y = data(int(context.node_config["partition-id"]))
    losses = [step(w, x, y, RATE) for _ in range(STEPS)]
    w["steps"] += STEPS
    arrays = ArrayRecord({name: Array(np.asarray(value)) for name, value in w.items()})
    metrics = MetricRecord({"loss": losses[0], "num-examples": len(x)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """The loss of the weights received."""
    w = {name: a.numpy() for name, a in message.content.array_records["arrays"].items()}
    x, y = data(int(context.node_config["partition-id"]))
    metrics = MetricRecord({"eval-loss": step(w, x, y, 0.0), "num-examples": len(x)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
