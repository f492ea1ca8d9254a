"""Threads over tensors: order, errors, equal bits for any number, torch's own threads, memory."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flower_geo.aggregation import weighted_mean
from flower_geo.compression import ErrorFeedback, codec, pack, parallel, record_blobs, unpack
from flower_geo.compression.parallel import THREADS, in_order, thread_count
from flower_geo.errors import CorruptPayload, NonFiniteTensor
from tests.compression.blobs import noise


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads for however few values."""
    monkeypatch.setattr(parallel, "SMALL", 0)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("ahead", [None, 1, 3])
def test_results_come_in_order(threads: int, ahead: int | None) -> None:
    def work(item: int) -> int:
        time.sleep(0.002 * (item % 3))
        return item * item

    assert list(in_order(work, range(12), threads, ahead)) == [n * n for n in range(12)]
    assert list(in_order(work, [], threads, ahead)) == []


def test_two_threads_work_at_once() -> None:
    both = threading.Barrier(2)
    assert list(in_order(lambda _: both.wait(20) < 2, range(2), 2)) == [True, True]


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_comes_at_its_turn_and_stops_the_rest(threads: int) -> None:
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        if item == 4:
            raise CorruptPayload("the fourth")
        return item

    results = in_order(work, range(1000), threads, ahead=threads)
    assert [next(results) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(CorruptPayload, match="the fourth"):
        next(results)
    assert len(begun) < 20


def test_no_more_is_begun_than_asked_for() -> None:
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        return item

    results = in_order(work, range(100), 2, ahead=2)
    next(results)
    time.sleep(0.05)
    assert len(begun) <= 3
    results.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name.startswith("codec")]


def test_torch_has_one_thread_in_the_pool_and_its_own_number_outside() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        inside = list(in_order(lambda _: torch.get_num_threads(), range(4), 2))
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (inside, later, torch.get_num_threads()) == ([1] * 4, [3], 3)
    finally:
        torch.set_num_threads(before)


def test_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(THREADS, raising=False)
    assert 1 <= thread_count() <= torch.get_num_threads()
    assert thread_count(7) == 7
    monkeypatch.setenv(THREADS, "5")
    assert (thread_count(), thread_count(2)) == (5, 2)
    for odd in ("0", "", "many", "-1"):
        monkeypatch.setenv(THREADS, odd)
        assert thread_count() == min(parallel._cores(), torch.get_num_threads())


STATE = {f"layer{n}": noise(37, 50 + n, seed=n) for n in range(9)}
SPECS = ["fp32", "int8(block=64)", "int4(block=64,round=stochastic)", "topk(density=0.1)|int2"]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("spec", SPECS)
def test_records_are_the_same_for_any_number_of_threads(spec: str) -> None:
    def run(threads: int) -> tuple[list[str], dict[str, bytes], dict[str, Tensor]]:
        feedback = ErrorFeedback()
        for _ in range(2):
            record = pack(STATE, codec(spec), feedback, threads=threads)
            feedback.acknowledge()
        decoded = unpack(record, threads=threads)
        assert list(decoded) == list(record)
        return list(record), record_blobs(record), {**feedback.state_dict(), **decoded}

    names, blobs, tensors = run(1)
    for threads in (2, 4):
        others = run(threads)
        assert others[:2] == (names, blobs)
        assert tensors.keys() == others[2].keys()
        assert all(torch.equal(tensors[name], others[2][name]) for name in tensors)


@pytest.mark.usefixtures("always")
def test_errors_name_the_first_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {**STATE, "layer3": torch.full((5000,), float("nan")), "layer7": torch.tensor([1e39])}
    for threads in (1, 3):
        with pytest.raises(NonFiniteTensor, match="layer3"):
            pack(bad, codec("int8"), threads=threads)
        record = pack(STATE, codec("int8"))
        for name in ("layer5", "layer6"):
            record[name].data = record[name].data[:-1]
        with pytest.raises(CorruptPayload, match="layer5"):
            unpack(record, threads=threads)


@dataclass
class Sent:
    weight: float
    kind: str
    blobs: dict[str, bytes]

    def names(self) -> list[str]:
        return list(self.blobs)

    def blob(self, name: str) -> bytes:
        return self.blobs[name]


def replies() -> Iterator[Sent]:
    for site, (kind, spec) in enumerate(
        [("delta", "int8"), ("weights", "fp32"), ("delta", "bf16")]
    ):
        state = {name: tensor * (1.1 + site) for name, tensor in STATE.items()}
        yield Sent(site + 0.7, kind, record_blobs(pack(state, codec(spec))))


@pytest.mark.usefixtures("always")
def test_means_are_the_same_for_any_number_of_threads() -> None:
    sent = list(replies())
    means = [list(weighted_mean(STATE, sent, threads=threads)) for threads in (1, 2, 4)]
    for other in means[1:]:
        for (name, mean), (same, again) in zip(means[0], other, strict=True):
            assert name == same and torch.equal(mean, again)
    assert [name for name, _ in means[0]] == list(STATE)
    sent[1].blobs["layer4"] = sent[1].blobs["layer4"][:-4]
    results = weighted_mean(STATE, sent, threads=2)
    assert [next(results)[0] for _ in range(4)] == [f"layer{n}" for n in range(4)]
    with pytest.raises(CorruptPayload):
        next(results)


MEMORY = """
import json, sys, torch
from flower_geo.compression import Codec, codec, pack

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

def peak(work):
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    result = work()
    return status("VmHWM") - before, result

torch.set_num_threads(1)
values = torch.randn(1 << 24) * 1e-3
copy = 4 * values.numel()
halves = {str(n): values[n << 22 : (n + 1) << 22] for n in range(4)}
found = {}
for spec in sys.argv[1:]:
    coder = codec(spec)
    pack({"a": values[: 1 << 20]}, coder)
    extra, blob = peak(lambda: coder.encode(values))
    threads, record = peak(lambda: pack(halves, coder, threads=2))
    extra_in, _ = peak(lambda: Codec.add_into(blob, values))
    found[spec] = [extra / copy, (threads - sum(len(a.data) for a in record.values())) / copy,
                   len(blob) / copy, extra_in / copy]
print(json.dumps(found))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_encoding_needs_no_more_than_one_copy() -> None:
    specs = ["fp32", "bf16", "fp16", "int8", "int4", "int8(block=256,round=stochastic)",
             "int2", "topk(density=0.03)|int8", "topk(density=0.0156)|int2"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *specs], capture_output=True, text=True, check=True
    )
    for spec, (extra, threads, blob, added) in json.loads(done.stdout).items():
        # Pieces take a few MiB; the blob itself is counted, once.
        assert extra <= blob + 0.2, (spec, extra, blob)
        assert extra <= 1.1, (spec, extra)
        assert threads <= 0.4, (spec, threads)
        assert added <= 0.2, (spec, added)
