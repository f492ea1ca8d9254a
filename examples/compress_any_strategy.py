"""Compression around an app with one of Flower's own strategies.

The app is an ordinary one: a small model in torch, FedAdam on the server.  Two
things are added, ``compression_mod`` in the ClientApp and ``CompressedStrategy``
around the strategy, and the bytes are counted.  Run it from anywhere:

    python examples/compress_any_strategy.py

It needs Flower's simulation (``pip install "flower-geo[sim]"``).  Flower would
have ``flwr run`` start an app in a folder of its own; ``run_simulation`` keeps the
whole of it in one file.  What compression adds is the same in both, and in a
deployment.
"""

from __future__ import annotations

import logging
import os
import tempfile

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam
from flwr.simulation import run_simulation

from flower_geo.compression import CompressedStrategy, compression_mod

ROUNDS, CLIENTS = 5, 2
FEATURES, CLASSES = 64, 10


def make_model() -> torch.nn.Module:
    """A small classifier, the same weights every time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, CLASSES),
    )


def examples_of(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A client's own data; the rule behind it is the same for all."""
    rule = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(1))
    inputs = torch.randn(512, FEATURES, generator=torch.Generator().manual_seed(2 + client))
    return inputs, (inputs @ rule).argmax(1)


# --- the clients: one line is new -------------------------------------------------------

client = ClientApp(mods=[compression_mod("int8(block=256)")])


@client.train()
def train(message: Message, context: Context) -> Message:
    """Some steps from the weights received."""
    model = make_model()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    inputs, labels = examples_of(int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"loss": loss.item(), "num-examples": len(labels)}),
        }
    )
    return Message(content, reply_to=message)


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """The accuracy of the weights received."""
    model = make_model()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    inputs, labels = examples_of(int(context.node_config["partition-id"]))
    accuracy = float((model(inputs).argmax(1) == labels).float().mean())
    metrics = MetricRecord({"accuracy": accuracy, "num-examples": len(labels)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


# --- the server: the strategy is wrapped ------------------------------------------------

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds and say what was sent."""
    strategy = CompressedStrategy(
        FedAdam(eta=0.01), uplink="int8(block=256)", downlink="int8(block=256)"
    )
    result = strategy.start(
        grid=grid, initial_arrays=ArrayRecord(make_model().state_dict()), num_rounds=ROUNDS
    )
    for number, metrics in result.evaluate_metrics_clientapp.items():
        trained = result.train_metrics_clientapp[number]
        print(
            f"round {number}: accuracy {metrics['accuracy']:.3f}, for training "
            f"{trained['geo-bytes-down']:,} bytes down and {trained['geo-bytes-up']:,} up"
        )
    sent = strategy.traffic
    print(
        f"sent {sent.down + sent.up:,} bytes, without compression "
        f"{sent.plain_down + sent.plain_up:,} "
        f"({(sent.plain_down + sent.plain_up) / (sent.down + sent.up):.1f} times as many)"
    )


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # for what Flower and Ray write; Ray may still be writing when it ends
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        os.environ.update(FLWR_HOME=home, RAY_TMPDIR=home)
        run_simulation(
            server_app=server,
            client_app=client,
            num_supernodes=CLIENTS,
            backend_config={"client_resources": {"num_cpus": 2, "num_gpus": 0.0}},
        )
