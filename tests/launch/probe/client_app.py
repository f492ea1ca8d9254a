"""A site of the probe: adds its partition's number to the weights it gets."""

from __future__ import annotations

import os

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return weights + 1 and say where this site keeps its state."""
    arrays = message.content.array_records["arrays"].to_numpy_ndarrays()
    site = int(context.node_config["partition-id"])
    folder = str(context.node_config.get("state-dir", os.environ.get("FLOWER_GEO_STATE_DIR", "")))
    if folder:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f"probe-{site}"), "a") as file:
            file.write("trained\n")
    reply = RecordDict(
        {
            "arrays": ArrayRecord([array + 1 for array in arrays]),
            "metrics": MetricRecord({"site": float(site)}),
        }
    )
    return Message(reply, reply_to=message)
