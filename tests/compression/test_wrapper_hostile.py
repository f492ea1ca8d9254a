from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from flwr.serverapp.strategy import FedAvg

from flower_geo.compression import codec
from flower_geo.compression.envelope import KEY
from flower_geo.compression.wrapper import CompressedStrategy
from tests.compression.stock import Fault, flower_lines, grid, make, run


@pytest.fixture
def lines() -> Iterator[list[str]]:
    with flower_lines(logging.WARNING) as found:
        yield found


def flip(array: Array, at: int) -> Array:
    data = bytearray(array.data)
    data[at] ^= 0x40
    return Array(array.dtype, array.shape, array.stype, bytes(data))


def edit(change: Callable[[dict[str, Array], ConfigRecord], None]) -> Fault:
    """A fault: node 12's training replies with something changed."""

    def fault(node: int, message: Message, reply: Message) -> list[Message]:
        if node == 12 and message.metadata.message_type == "train" and reply.has_content():
            content = reply.content
            arrays = dict(content.array_records["arrays"])
            change(arrays, content.config_records[KEY] if KEY in content else ConfigRecord())
            content["arrays"] = ArrayRecord(arrays)
        return [reply]

    return fault


W = "+/hidden.weight"


def _cut(arrays: dict[str, Array], _: ConfigRecord) -> None:
    a = arrays[W]
    arrays[W] = Array(a.dtype, a.shape, a.stype, a.data[:-3])


def _crc(arrays: dict[str, Array], _: ConfigRecord) -> None:
    arrays[W] = flip(arrays[W], -9)


def _shape(arrays: dict[str, Array], _: ConfigRecord) -> None:
    arrays[W] = arrays["+/out.weight"]


def _said_shape(arrays: dict[str, Array], _: ConfigRecord) -> None:
    arrays[W] = Array("float32", (2**30, 2**30), arrays[W].stype, arrays[W].data)


def _dtype(arrays: dict[str, Array], _: ConfigRecord) -> None:
    arrays[W] = Array("object", arrays[W].shape, arrays[W].stype, arrays[W].data)


def _missing(arrays: dict[str, Array], _: ConfigRecord) -> None:
    del arrays[W]


def _more(arrays: dict[str, Array], _: ConfigRecord) -> None:
    arrays["+/another"] = arrays[W]


def _more_plain(arrays: dict[str, Array], _: ConfigRecord) -> None:
    arrays["=/another"] = Array(np.ones(3))


def _nan(arrays: dict[str, Array], _: ConfigRecord) -> None:
    del arrays[W]
    arrays["=/hidden.weight"] = Array(np.full((48, 96), np.nan, np.float32))


def _prefix(arrays: dict[str, Array], _: ConfigRecord) -> None:
    arrays["hidden.weight"] = arrays.pop(W)


def _twice(arrays: dict[str, Array], _: ConfigRecord) -> None:
    arrays["=/hidden.weight"] = Array(np.ones((48, 96), np.float32))


def _pickled(arrays: dict[str, Array], _: ConfigRecord) -> None:
    arrays["=/steps"] = Array("int64", (), "numpy.ndarray", b"\x80\x04K\x01.")


def _header(arrays: dict[str, Array], _: ConfigRecord) -> None:
    data = Array(np.ones((2, 3))).data.replace(b"(2, 3)", b"(9, 3)")
    arrays["=/other"] = Array("float64", (9, 3), "numpy.ndarray", data)


def _stream(_: dict[str, Array], envelope: ConfigRecord) -> None:
    envelope["stream"] = ["0" * 32]


def _version(_: dict[str, Array], envelope: ConfigRecord) -> None:
    envelope["version"] = [77]


def _types(_: dict[str, Array], envelope: ConfigRecord) -> None:
    envelope["version"] = ["0"]


def _negative(_: dict[str, Array], envelope: ConfigRecord) -> None:
    envelope["version"] = [-1]


def _lengths(_: dict[str, Array], envelope: ConfigRecord) -> None:
    envelope["version"] = [0, 0]


def _record(_: dict[str, Array], envelope: ConfigRecord) -> None:
    envelope["record"] = ["other"]


def _empty(_: dict[str, Array], envelope: ConfigRecord) -> None:
    envelope["protocol"], envelope["nothing"] = "", []


def _protocol(_: dict[str, Array], envelope: ConfigRecord) -> None:
    envelope["protocol"] = 2


def _role(_: dict[str, Array], envelope: ConfigRecord) -> None:
    envelope["role"] = "boss"


HOSTILE = [
    _cut, _crc, _shape, _said_shape, _dtype, _missing, _more, _more_plain, _nan, _prefix, _twice,
    _pickled, _header, _stream, _version, _types, _negative, _lengths, _record, _empty, _protocol,
    _role,
]  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE, ids=lambda f: f.__name__[1:])
def test_a_hostile_reply_costs_that_reply_only(
    change: Callable[[dict[str, Array], ConfigRecord], None], lines: list[str]
) -> None:
    around = CompressedStrategy(make())
    nodes = grid(fault=edit(change))
    result = run(around, nodes, rounds=2)
    assert not nodes.errors
    assert around.traffic.refused == 2
    assert [result.train_metrics_clientapp[n]["geo-refused"] for n in (1, 2)] == [1, 1]
    assert len(lines) == 2 and all("node 12 is left out" in line for line in lines)
    assert all("\n" not in line and len(line) < 700 for line in lines)


@pytest.mark.parametrize(
    "data",
    [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False,", b"x"],
)
def test_a_stock_client_may_be_hostile_as_well(data: bytes, lines: list[str]) -> None:
    def change(arrays: dict[str, Array], _: ConfigRecord) -> None:
        arrays["out.weight"] = Array("float32", (96, 24), "numpy.ndarray", data)

    around = CompressedStrategy(make())
    result = run(around, grid(mod=(), fault=edit(change)), rounds=1)
    assert around.traffic.refused == 1 and result.arrays and len(lines) == 1


def test_a_claim_of_many_values_is_refused_before_they_are_made() -> None:
    bomb = codec("topk(density=0.0001,chunk=65536)|int2(block=64)").encode(torch.zeros(2**25))

    def change(arrays: dict[str, Array], envelope: ConfigRecord) -> None:
        arrays.clear()
        arrays["+/a"] = Array("float32", (2**25,), "geo/1", bomb)
        envelope["base"] = [""]

    around = CompressedStrategy(make())
    run(around, grid(fault=edit(change)), rounds=1)
    assert around.traffic.refused == 1


def test_other_tensors_pass_where_they_are_allowed() -> None:
    seen = []

    class Any_(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            seen.append([set(r.content.array_records["arrays"]) for r in replies])
            return None, None

    run(CompressedStrategy(Any_(min_train_nodes=4, min_evaluate_nodes=4), strict=False),
        grid(fault=edit(_missing)), rounds=1)  # fmt: skip
    assert sorted(len(names) for names in seen[0]) == [4, 5, 5, 5]


def test_of_two_the_one_with_the_tensors_sent_is_kept(lines: list[str]) -> None:
    nodes = grid(nodes=(11, 12), fault=edit(_missing))
    result = run(CompressedStrategy(make(nodes=2)), nodes, rounds=1)
    assert "hidden.weight" in result.arrays and len(lines) == 1 and "node 12" in lines[0]
