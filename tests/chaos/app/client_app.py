"""DiLoCo's site that spoils its next reply when ``misbehave/<site>`` tells it how."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from flwr.app import Array, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_geo.site import client_app

STAGE = Path(os.environ["CHAOS_STAGE"])


class MisbehavingApp(ClientApp):
    """The site's own app, whose train replies pass through :func:`spoil`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = client_app()

    def __call__(self, message: Message, context: Context) -> Message:
        """Serve a message; once in a while not as it should be."""
        reply = self.inner(message, context)
        order = STAGE / "misbehave" / str(context.node_config["site"])
        if message.metadata.message_type == "train" and order.exists() and reply.has_content():
            spoil(reply.content, order.read_text())
            order.unlink()
        return reply


def spoil(content: RecordDict, how: str) -> None:
    """Change a reply in place."""
    if "arrays" not in content.array_records:
        return
    arrays, geo = content.array_records["arrays"], content.config_records["geo"]
    name = next(iter(arrays))
    array = arrays[name]
    if how == "nan":
        arrays[name] = Array(np.full(array.shape, np.nan, dtype=np.float32))
    elif how == "spoilt":
        data = bytearray(array.data)
        data[len(data) // 2] ^= 4
        arrays[name] = Array(array.dtype, tuple(array.shape), array.stype, bytes(data))
    elif how == "hostile":
        arrays[name] = Array(array.dtype, (2**40, 2**20), array.stype, b"\xff" * 64)
        arrays["../../escape"] = array
    elif how == "stale":
        geo["round"] = 0
        geo["base_hash"] = "0" * 64
    else:
        raise ValueError(how)


app = MisbehavingApp()
