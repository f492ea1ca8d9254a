from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import arrays_size_mod, message_size_mod
from flwr.serverapp.strategy import FedAvg

from flower_geo.compression import Codec
from flower_geo.compression.envelope import KEY
from flower_geo.compression.mod import compression_mod
from flower_geo.compression.wrapper import CompressedStrategy
from flower_geo.errors import CodecError, CodecSpecError
from tests.compression.stock import StockGrid, flower_lines, make_app
from tests.integration.anyapp import client_app

App = Callable[[Message, Context], Message]
NODES = (3, 8)
RANDOM = np.random.default_rng(0)
ODD: dict[str, np.ndarray] = {
    "z": RANDOM.normal(size=(40, 7)).astype(np.float32),
    "double": RANDOM.normal(size=(3, 50)),
    "half": RANDOM.normal(size=60).astype(np.float16),
    "scalar": np.asarray(2.5, np.float32),
    "nothing": np.zeros((0, 4), np.float32),
    "fortran": np.asfortranarray(RANDOM.normal(size=(9, 11)).astype(np.float32)),
    "counter": np.asarray(7, np.int64),
    "mask": np.array([True, False]),
    "bytes": np.arange(9, dtype=np.uint8),
    "name/with;odd=|signs\n": np.ones(3, np.float32),
    "a": np.zeros(5, np.float32),
}


def record(arrays: dict[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({name: Array(value) for name, value in arrays.items()})


def reply(message: Message, arrays: ArrayRecord | None = None, **more: Any) -> Message:
    content: dict[str, Any] = {"metrics": MetricRecord({"num-examples": 1}), **more}
    if arrays is not None:
        content["arrays"] = arrays
    return Message(RecordDict(content), reply_to=message)


def federate(
    train: App, start: ArrayRecord, mod: Any = None, rounds: int = 3, **wrapping: Any
) -> tuple[CompressedStrategy, StockGrid, ArrayRecord]:
    """FedAvg over two nodes that train so; evaluation replies with a metric."""
    app = ClientApp(mods=[mod or compression_mod()])
    app.train()(train)
    app.evaluate()(lambda message, context: reply(message))
    grid = StockGrid(dict.fromkeys(NODES, app))
    strategy = CompressedStrategy(FedAvg(), **wrapping)
    result = strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds)
    return strategy, grid, result.arrays


@pytest.mark.parametrize("codec", ["fp32", "int8(block=256)"])
def test_the_app_sees_plain_arrays_and_nothing_of_ours(codec: str) -> None:
    seen: list[ArrayRecord] = []

    def train(message: Message, context: Context) -> Message:
        assert list(message.content) == ["arrays", "config"]
        assert set(context.state) <= {"mine"}
        context.state["mine"] = ConfigRecord({"rounds": len(seen)})
        arrays = message.content.array_records["arrays"]
        seen.append(ArrayRecord(dict(arrays)))
        again = {name: array.numpy() for name, array in arrays.items()}
        arrays.clear()  # what an app does with its own message is its own affair
        return reply(message, record(again))

    _, grid, final = federate(train, record(ODD), uplink=codec, downlink=codec)
    assert not grid.errors and len(seen) == 6
    for arrays in seen:
        assert list(arrays) == list(ODD)
        assert {array.stype for array in arrays.values()} == {"numpy.ndarray"}
    for name, value in ODD.items():
        first, last = seen[0][name].numpy(), seen[-1][name].numpy()
        assert (first.dtype, first.shape) == (value.dtype, value.shape)
        atol = 0 if codec == "fp32" else 1e-6  # fp64 is held in fp32 for differences
        np.testing.assert_allclose(first, value, rtol=0, atol=atol)
        np.testing.assert_allclose(last.astype(float), value.astype(float), rtol=1e-3)
        assert name in final
    for context in grid.states.values():
        assert "mine" in context.state and KEY in context.state


def test_an_app_that_replies_with_updates_is_not_sent_as_a_difference() -> None:
    got: list[np.ndarray] = []
    update = (RANDOM.normal(size=(64, 64)) * 1e-4).astype(np.float32)

    class Sums(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            got.extend(r.content.array_records["arrays"]["w"].numpy() for r in replies)
            return None, None

    app = ClientApp(mods=[compression_mod()])
    app.train()(lambda message, context: reply(message, record({"w": update})))
    app.evaluate()(lambda message, context: reply(message))
    grid = StockGrid(dict.fromkeys(NODES, app))
    start = record({"w": RANDOM.normal(size=(64, 64)).astype(np.float32)})
    CompressedStrategy(Sums()).start(grid=grid, initial_arrays=start, num_rounds=2)
    assert not grid.errors and len(got) == 4
    for value in got:
        assert np.linalg.norm(value - update) < 0.02 * np.linalg.norm(update)


@pytest.mark.parametrize("spec", ["zstd(level=1)", "int8(block=256)|zstd(level=1)"])
def test_a_tensor_of_many_zeros_passes(spec: str) -> None:
    # a blob of it claims more values a byte than is believed of an unknown tensor
    def train(message: Message, context: Context) -> Message:
        arrays = {n: a.numpy() for n, a in message.content.array_records["arrays"].items()}
        return reply(message, record({**arrays, "w": arrays["w"] + np.float32(1)}))

    start = record({"w": np.ones(1, np.float32), "b": np.zeros(2**21, np.float32)})
    strategy, grid, final = federate(train, start, compression_mod(spec), downlink=spec)
    assert not grid.errors and strategy.traffic.refused == 0
    assert final["w"].numpy() == pytest.approx(4, abs=0.1) and not final["b"].numpy().any()


def test_residuals_of_another_shape_or_kind_are_dropped() -> None:
    calls = 0

    def train(message: Message, context: Context) -> Message:
        nonlocal calls
        calls += 1
        shape = (30, calls)
        arrays = {"w": np.full((6, 6), 2.0 + calls, np.float32)}
        if calls % 2:
            arrays["v"] = RANDOM.normal(size=shape).astype(np.float32)
        return reply(message, record(arrays))

    class Ignoring(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            assert len(list(replies)) == 2
            return None, None

    app = ClientApp(mods=[compression_mod("int4(block=64)")])
    app.train()(train)
    app.evaluate()(lambda message, context: reply(message))
    grid = StockGrid(dict.fromkeys(NODES, app))
    CompressedStrategy(Ignoring(), strict=False).start(
        grid=grid, initial_arrays=record({"w": np.zeros((6, 6), np.float32)}), num_rounds=4
    )
    assert not grid.errors


@pytest.mark.parametrize(
    ("own", "servers", "used"),
    [(None, "int4(block=32)", "int4(block=32)"), ("bf16", "int4(block=32)", "bf16")],
)
def test_a_codec_of_its_own_goes_before_the_servers(
    own: str | None, servers: str, used: str
) -> None:
    specs = set()

    def fault(node: int, message: Message, answer: Message) -> list[Message]:
        for array in answer.content.array_records.get("arrays", {}).values():
            specs.add(Codec.inspect(array.data).spec)
        return [answer]

    app = ClientApp(mods=[compression_mod(own)])
    app.train()(lambda m, c: reply(m, record({"w": RANDOM.normal(size=4096).astype("f4")})))
    app.evaluate()(lambda message, context: reply(message))
    strategy = CompressedStrategy(FedAvg(), uplink=servers)
    start = record({"w": np.ones(4096, np.float32)})
    grid = StockGrid(dict.fromkeys(NODES, app), fault)
    strategy.start(grid=grid, initial_arrays=start, num_rounds=1)
    assert specs == {used}


def test_values_that_are_not_finite_are_refused_by_name() -> None:
    def train(message: Message, context: Context) -> Message:
        bad = np.ones(9, np.float32)
        bad[3] = np.nan
        return reply(message, record({"layer.w": bad}))

    _, grid, final = federate(train, record({"layer.w": np.ones(9, np.float32)}), rounds=2)
    assert len(final) == 0
    assert [e for e in grid.errors if "layer.w holds NaN or infinity" in e] == grid.errors
    assert len(grid.errors) == 4


def test_without_error_feedback_nothing_is_kept_of_it() -> None:
    def train(message: Message, context: Context) -> Message:
        return reply(message, record({"w": RANDOM.normal(size=300).astype(np.float32)}))

    for on in (True, False):
        mod = compression_mod("int4(block=64)", error_feedback=on)
        _, grid, _ = federate(train, record({"w": np.ones(300, np.float32)}), mod)
        for context in grid.states.values():
            assert (f"{KEY}/residual" in context.state.array_records) == on


def test_flowers_own_mods_go_along() -> None:
    with flower_lines(logging.INFO) as lines:
        app = ClientApp(mods=[message_size_mod, compression_mod(), arrays_size_mod])
        app.train()(client_app.train)
        app.evaluate()(client_app.evaluate)
        grid = StockGrid(dict.fromkeys(NODES, app))
        CompressedStrategy(FedAvg()).start(
            grid=grid, initial_arrays=client_app.initial(), num_rounds=2
        )
    assert not grid.errors
    sizes = [
        int(s.split()[-2]) for s in lines if s.startswith("Outgoing message size") and "7" in s
    ]
    assert sizes and max(sizes) < 10_000  # the weights are 28 KB


def test_a_query_passes_and_training_without_the_wrapper_does_not() -> None:
    app = make_app(compression_mod())
    app.query()(lambda message, context: reply(message))
    grid = StockGrid({3: app})

    def ask(kind: str) -> list[Message]:
        return list(grid.send_and_receive([Message(RecordDict(), 3, kind)]))

    assert ask("query")[0].has_content() and not grid.errors
    for kind in ("train", "evaluate"):
        assert ask(kind)[0].has_error()
    assert len(grid.errors) == 2 and all("CompressedStrategy(FedAvg()" in e for e in grid.errors)


def test_a_mod_on_one_function_only_costs_one_message() -> None:
    app = ClientApp()
    app.train(mods=[compression_mod()])(client_app.train)
    app.evaluate()(client_app.evaluate)
    grid = StockGrid(dict.fromkeys(NODES, app))
    result = CompressedStrategy(FedAvg()).start(
        grid=grid, initial_arrays=client_app.initial(), num_rounds=4
    )
    assert len(grid.errors) == 2
    assert set(result.train_metrics_clientapp) == {1, 2, 3, 4}
    assert set(result.evaluate_metrics_clientapp) == {2, 3, 4}
    sizes = {kind: [n for _, k, n in grid.sent if k == kind] for kind in ("train", "evaluate")}
    assert max(sizes["train"][4:]) < min(sizes["evaluate"][2:]) / 3


@pytest.mark.parametrize("place", ["data", "hash", "first", "protocol", "record"])
def test_a_damaged_request_is_refused_and_the_next_mends_it(place: str) -> None:
    hit = 0

    def damaged(message: Message, context: Context, call_next: App) -> Message:
        nonlocal hit
        kinds = message.content.config_records[KEY]["kind"]
        if kinds == ["deltas"] and hit == 0:
            hit = 1
            arrays, envelope = (message.content[key] for key in ("arrays", KEY))
            assert isinstance(arrays, ArrayRecord) and isinstance(envelope, ConfigRecord)
            if place == "data":
                key = next(iter(arrays))
                old = arrays[key]
                arrays[key] = Array(old.dtype, old.shape, old.stype, old.data[:-1])
            else:
                wrong: dict[str, Any] = {
                    "hash": ["0" * 64], "first": [9], "protocol": 9, "record": ["other"],
                }  # fmt: skip
                envelope[place] = wrong[place]
        return call_next(message, context)

    app = ClientApp(mods=[damaged, compression_mod()])
    app.train()(client_app.train)
    app.evaluate()(client_app.evaluate)
    grid = StockGrid({3: app, 8: make_app(compression_mod())})
    CompressedStrategy(FedAvg()).start(grid=grid, initial_arrays=client_app.initial(), num_rounds=3)
    assert hit == 1 and len(grid.errors) == 1 and "\n" not in grid.errors[0]


def test_what_an_app_keeps_in_a_new_state_is_kept() -> None:
    def train(message: Message, context: Context) -> Message:
        context.state = RecordDict({"fresh": ConfigRecord({"a": 1})})
        return reply(message, record({"w": np.ones(9, np.float32)}))

    _, grid, _ = federate(train, record({"w": np.zeros(9, np.float32)}))
    assert not grid.errors
    assert all({"fresh", KEY} <= set(context.state) for context in grid.states.values())


def test_an_app_that_fails_leaves_the_mod_in_order() -> None:
    calls: dict[int, int] = {}

    def train(message: Message, context: Context) -> Message:
        calls[context.node_id] = calls.get(context.node_id, 0) + 1
        if calls[context.node_id] == 2:
            raise RuntimeError("out of memory")
        arrays = message.content.array_records["arrays"]
        return reply(message, record({"w": arrays["w"].numpy() + np.float32(0.1)}))

    start = record({"w": RANDOM.normal(size=600).astype(np.float32)})
    _, grid, final = federate(train, start, rounds=4)
    assert grid.errors == ["out of memory"] * 2
    np.testing.assert_allclose(final["w"].numpy(), start["w"].numpy() + 0.3, atol=2e-3)


def test_wrong_arguments_are_refused_when_the_app_is_made() -> None:
    with pytest.raises(CodecSpecError, match="did you mean 'int8'"):
        compression_mod("int9")
    with pytest.raises(CodecError, match="decay"):
        compression_mod(decay=1.5)
