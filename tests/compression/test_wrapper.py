from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Result,
    Strategy,
)

from flower_geo.compression.envelope import KEY
from flower_geo.compression.mod import compression_mod
from flower_geo.compression.wrapper import CompressedStrategy
from flower_geo.errors import CodecSpecError, ConfigError, CorruptPayload
from tests.compression.stock import (
    NODES,
    STRATEGIES,
    TOPK,
    StockGrid,
    apart,
    flower_lines,
    grid,
    make,
    make_app,
    run,
    same_bits,
    weights,
)  # fmt: skip
from tests.integration.anyapp import client_app

INT8 = "int8(block=256)"


@pytest.fixture
def lines() -> Iterator[list[str]]:
    with flower_lines(logging.WARNING) as found:
        yield found


@pytest.fixture(scope="module")
def references() -> Callable[[str], Result]:
    found: dict[str, Result] = {}

    def reference(name: str) -> Result:
        if name not in found:
            found[name] = run(make(name), grid(mod=()))
        return found[name]

    return reference


@pytest.mark.parametrize("name", STRATEGIES)
def test_stock_strategies_end_close_to_the_uncompressed_run(
    name: str, references: Callable[[str], Result]
) -> None:
    around = CompressedStrategy(make(name), uplink=INT8, downlink=INT8)
    nodes = grid()
    result = run(around, nodes)
    reference = references(name)
    assert not nodes.errors
    assert apart(result, reference) < 0.005
    traffic = around.traffic
    assert traffic.plain_up > 3.5 * traffic.up
    # the first message to each client is plain
    assert traffic.plain_down > 3.0 * traffic.down
    losses = result.evaluate_metrics_clientapp[4]["eval-loss"]
    assert losses == pytest.approx(reference.evaluate_metrics_clientapp[4]["eval-loss"], rel=0.02)
    assert result.arrays["steps"].numpy() == reference.arrays["steps"].numpy()


@pytest.mark.parametrize(
    ("name", "spec"), [*((name, "fp32") for name in STRATEGIES), ("FedAvg", "zstd(level=1)")]
)
def test_a_lossless_codec_changes_no_bit(
    name: str, spec: str, references: Callable[[str], Result]
) -> None:
    around = CompressedStrategy(make(name), uplink=spec, downlink=spec)
    result = run(around, grid())
    assert same_bits(result, references(name))
    # evaluation and the next round's training use the weights that are there already
    if name != "FedAdam":  # its weights are fp64, which no codec carries without loss
        assert around.traffic.plain_down > 1.5 * around.traffic.down


def test_stock_clients_work_from_the_first_round_on(references: Callable[[str], Result]) -> None:
    mixed = StockGrid({n: make_app(*([compression_mod()] * (n % 2))) for n in NODES})
    around = CompressedStrategy(make())
    result = run(around, mixed)
    assert not mixed.errors and around.traffic.refused == 0
    assert apart(result, references("FedAvg")) < 0.005
    plain = 4 * sum(a.numpy().size for a in client_app.initial().values())
    for node, _, nbytes in mixed.sent[len(NODES) :]:
        assert (nbytes < plain / 3) == (node % 2 == 1)
    all_stock = run(CompressedStrategy(make()), grid(mod=()))
    assert same_bits(all_stock, references("FedAvg"))


def test_without_the_wrapper_the_mod_says_what_to_add() -> None:
    nodes = grid()
    result = run(make(), nodes, rounds=1)
    assert not result.arrays
    assert len(nodes.errors) == 8  # training and evaluation of four
    for line in nodes.errors:
        assert "CompressedStrategy(FedAvg()" in line and "\n" not in line
    # no work was done
    assert all(not context.state for context in nodes.states.values())


def test_metrics_of_a_round_hold_the_bytes() -> None:
    around, nodes = CompressedStrategy(make()), grid()
    result = run(around, nodes, rounds=2)
    rounds = [*result.train_metrics_clientapp.values(), *result.evaluate_metrics_clientapp.values()]
    for ours, name in (
        ("down", "geo-bytes-down"), ("up", "geo-bytes-up"),
        ("plain_down", "geo-plain-bytes-down"), ("plain_up", "geo-plain-bytes-up"),
    ):  # fmt: skip
        assert sum(metrics[name] for metrics in rounds) == getattr(around.traffic, ours) > 0  # type: ignore[misc]
    assert set(result.train_metrics_clientapp[1]) > {"loss"}
    payload = sum(nbytes for _, _, nbytes in nodes.sent)
    assert payload <= around.traffic.down <= payload + 300 * len(nodes.sent)


def test_top_k_with_error_feedback_converges_and_without_it_less() -> None:
    def loss(feedback: bool) -> float:
        mod = compression_mod(TOPK, error_feedback=feedback)
        result = run(CompressedStrategy(make(), downlink=INT8), grid(mod=(mod,)), rounds=12)
        return float(result.evaluate_metrics_clientapp[12]["eval-loss"])  # type: ignore[arg-type]

    plain = run(make(), grid(mod=()), rounds=12).evaluate_metrics_clientapp[12]["eval-loss"]
    assert loss(True) < loss(False)
    assert loss(True) < 1.6 * float(plain)  # type: ignore[arg-type]


def test_what_the_downlink_loses_goes_out_later() -> None:
    # without feedback on the server nine tenths of every step would never reach a client
    around, nodes = CompressedStrategy(make(), downlink=TOPK), grid()
    compressed = run(around, nodes, rounds=12)
    plain = run(make(), grid(mod=()), rounds=12)
    train = [float(r.train_metrics_clientapp[12]["loss"]) for r in (compressed, plain)]  # type: ignore[arg-type]
    start = float(plain.train_metrics_clientapp[1]["loss"])  # type: ignore[arg-type]
    assert train[0] - train[1] < 0.3 * (start - train[1])
    assert around.traffic.plain_down > 5 * around.traffic.down


def test_a_client_that_lost_its_state_is_mended_by_the_next_message(lines: list[str]) -> None:
    nodes = grid()

    class Forgetful(FedAvg):
        def configure_train(self, server_round: int, *others: Any) -> Any:
            if server_round == 2:
                nodes.states.clear()
            return super().configure_train(server_round, *others)

    around = CompressedStrategy(Forgetful(min_train_nodes=4, min_evaluate_nodes=4))
    result = run(around, nodes, rounds=3)
    assert len(nodes.errors) == 4 and all("Context.state was lost" in e for e in nodes.errors)
    assert 2 not in result.train_metrics_clientapp
    assert 2 in result.evaluate_metrics_clientapp and 3 in result.train_metrics_clientapp
    assert not lines


def test_a_client_that_missed_rounds_gets_differences_or_all() -> None:
    away = {2, 3}

    class Partial(FedAvg):
        def configure_train(self, server_round: int, *others: Any) -> Any:
            messages = list(super().configure_train(server_round, *others))
            return [m for m in messages if m.metadata.dst_node_id != 13 or server_round not in away]

        def configure_evaluate(self, *others: Any) -> Any:
            return []

    for window, whole in ((4, False), (1, True)):
        nodes = grid()
        around = CompressedStrategy(Partial(min_train_nodes=4), window=window)
        run(around, nodes, rounds=5)
        assert not nodes.errors
        sizes = [nbytes for node, _, nbytes in nodes.sent if node == 13]
        assert len(sizes) == 3
        # three versions of differences, or the weights
        assert (sizes[1] > 0.95 * sizes[0]) == whole
        assert sizes[2] < sizes[0] / 3


def test_lost_and_refused_replies_leave_the_sum_right() -> None:
    """Over all updates that were handed on: sum decoded + residual = sum given."""
    given: dict[int, list[np.ndarray]] = {n: [] for n in NODES}
    decoded: dict[int, np.ndarray] = {n: np.zeros((48, 96)) for n in NODES}
    chance = random.Random(3)

    def spy(message: Message, context: Any, call_next: Any) -> Message:
        # inside the mod: what the app got and gave
        before = message.content.array_records["arrays"]["hidden.weight"].numpy()
        reply: Message = call_next(message, context)
        if message.metadata.message_type == "train":
            after = reply.content.array_records["arrays"]["hidden.weight"].numpy()
            given[context.node_id].append(after - before)
        return reply

    def fault(node: int, message: Message, reply: Message) -> list[Message]:
        lost = message.metadata.message_type == "train" and chance.random() < 0.3
        if lost:
            given[node].pop()
        return [] if lost else [reply]

    class Watching(FedAvg):
        master: np.ndarray

        def configure_train(self, server_round: int, arrays: ArrayRecord, *others: Any) -> Any:
            self.master = arrays["hidden.weight"].numpy()
            return super().configure_train(server_round, arrays, *others)

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            for reply in replies:
                arrays = reply.content.array_records["arrays"]
                decoded[reply.metadata.src_node_id] += arrays["hidden.weight"].numpy() - self.master
            return super().aggregate_train(server_round, replies)

    nodes = grid(mod=(compression_mod(TOPK), spy), fault=fault)
    strategy = Watching(min_train_nodes=4, min_evaluate_nodes=4)
    run(CompressedStrategy(strategy, downlink=TOPK), nodes, rounds=10)
    assert not nodes.errors
    assert any(len(one) < 10 for one in given.values())
    for node in NODES:
        state = nodes.states[node].state
        residual = state.array_records[f"{KEY}/residual"]["difference\narrays\nhidden.weight"]
        want = np.sum(given[node], axis=0)
        assert np.abs(want).max() > 1e-3
        np.testing.assert_allclose(decoded[node] + residual.numpy(), want, atol=2e-6)


def test_records_that_differ_by_client_travel_whole_and_come_back_as_differences() -> None:
    class Personal(FedAvg):
        def configure_train(self, *others: Any) -> Any:
            messages = list(super().configure_train(*others))
            for message in messages:
                arrays = dict(message.content.array_records["arrays"])
                scale = np.float32(message.metadata.dst_node_id)
                arrays["scale"] = Array(np.asarray(scale / 10, np.float32))
                message.content = RecordDict({**message.content, "arrays": ArrayRecord(arrays)})
            return messages

    def make_personal() -> FedAvg:
        return Personal(min_train_nodes=4, min_evaluate_nodes=4)

    around, nodes = CompressedStrategy(make_personal()), grid()
    result = run(around, nodes)
    assert not nodes.errors
    assert apart(result, run(make_personal(), grid(mod=()))) < 0.005
    assert around.traffic.plain_up > 3.5 * around.traffic.up


def test_a_record_may_get_other_tensors_between_rounds() -> None:
    class Growing(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            assert arrays is not None
            arrays[f"extra-{server_round}"] = Array(np.ones(5, np.float32))
            return arrays, metrics

    def echoing(message: Message, context: Any) -> Message:
        metrics = MetricRecord({"num-examples": 1})
        arrays = message.content.array_records["arrays"]
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    nodes = grid()
    for node in nodes.nodes.values():
        app = ClientApp(mods=[compression_mod()])
        app.train()(echoing)
        app.evaluate()(client_app.evaluate)
        node.app = app
    result = run(CompressedStrategy(Growing(min_train_nodes=4, min_evaluate_nodes=4)), nodes, 3)
    assert not nodes.errors
    assert {"extra-1", "extra-2", "extra-3"} < set(result.arrays)


def test_a_client_that_sends_back_all_it_got_is_no_client_with_the_mod() -> None:
    def echo(message: Message, context: Any) -> Message:
        content = RecordDict(dict(message.content))
        content["metrics"] = MetricRecord({"num-examples": 1})
        return Message(content, reply_to=message)

    app = ClientApp()
    app.train()(echo)
    app.evaluate()(client_app.evaluate)
    nodes = StockGrid(dict.fromkeys(NODES, app))
    around = CompressedStrategy(make())
    result = run(around, nodes, rounds=3)
    assert not nodes.errors and around.traffic.refused == 0
    start = {n: a.numpy() for n, a in client_app.initial().items()}
    # FedAvg's mean of integers is fp64, and its sum of weights rounds
    assert all(np.allclose(weights(result)[n], start[n], rtol=1e-6) for n in start)


def test_everything_else_is_the_strategys_own() -> None:
    inner = make("FedAdam")
    around = CompressedStrategy(inner)
    assert isinstance(around, Strategy)
    assert around.eta == 0.01 and around.min_train_nodes == 4
    around.eta = 0.5
    assert inner.eta == 0.5  # type: ignore[attr-defined]
    around.note = "mine"
    assert not hasattr(inner, "note")
    with pytest.raises(AttributeError):
        around.nothing  # noqa: B018
    assert copy.deepcopy(around).eta == 0.5
    with flower_lines(logging.INFO) as found:
        around.summary()
    text = "\n".join(found)
    assert "uplink int8(block=256) | downlink int8(block=256)" in text and "FedOpt settings" in text


def test_a_start_of_the_strategys_own_is_used() -> None:
    class Own(FedAvg):
        rounds_done = 0

        def start(self, grid: Any, initial_arrays: ArrayRecord, num_rounds: int = 1) -> Result:  # type: ignore[override]
            arrays, result = initial_arrays, Result()
            for number in range(1, num_rounds + 1):
                sent = self.configure_train(number, arrays, ConfigRecord(), grid)
                found, _ = self.aggregate_train(number, grid.send_and_receive(sent, timeout=9))
                assert found is not None
                result.arrays = arrays = found
                self.rounds_done += 1
            return result

    inner = Own(min_train_nodes=4)
    around = CompressedStrategy(inner)
    before = set(vars(inner))
    result = run(around, grid(), rounds=4)
    assert inner.rounds_done == 4 and set(vars(inner)) - before == {"rounds_done"}
    assert apart(result, run(make(), grid(mod=()))) < 0.005
    assert around.traffic.plain_up > 3.5 * around.traffic.up


def test_privacy_goes_inside() -> None:
    def private() -> Strategy:
        inner = make()
        return DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 0.5, num_sampled_clients=4)

    # clipping takes all tensors for floats, so the counter goes along as one
    def run_floats(strategy: Strategy, nodes: StockGrid) -> Result:
        random.seed(0)
        start = client_app.initial()
        start["steps"] = Array(np.zeros((), np.float32))
        return strategy.start(grid=nodes, initial_arrays=start, num_rounds=3)

    around = CompressedStrategy(private())
    found, want = run_floats(around, grid()), run_floats(private(), grid(mod=()))
    for name in weights(want):
        np.testing.assert_allclose(weights(found)[name], weights(want)[name], atol=2e-2)
    assert around.traffic.plain_up > 3.5 * around.traffic.up


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(CodecSpecError, match="did you mean 'int8'"):
        CompressedStrategy(make(), uplink="int9")
    with pytest.raises(CodecSpecError, match="did you mean 'int8'"):
        CompressedStrategy(make(), downlink="int9")
    for wrong in (CompressedStrategy(make()), FedAvg, "FedAvg"):
        with pytest.raises(ConfigError, match="cannot wrap"):
            CompressedStrategy(wrong)  # type: ignore[arg-type]


def test_weights_of_the_strategy_that_are_not_finite_end_the_run() -> None:
    broken = client_app.initial()
    broken["out.weight"] = Array(np.full((96, 24), np.inf, np.float32))
    with pytest.raises(CorruptPayload, match=r"out\.weight"):
        CompressedStrategy(make()).start(grid=grid(), initial_arrays=broken, num_rounds=1)
