"""Both halves of small adapted models in one process, and what joins them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flower_geo.calls import Answer, Call
from flower_geo.models import AdapterSpec, attach, snapshot
from flower_geo.models.split import Cut, Role, SplitPart, split_parts
from flower_geo.training import InnerConfig, InnerResult
from flower_geo.training.split import Auxiliary, CloudEngine, Mode, SplitLoop, Wire
from tests.models.split_models import VOCAB, small_model

EXACT = Wire(codec_activations="fp32", codec_gradients="fp32", codec_whole="fp32")
CONFIG = InnerConfig(lr=0.02, warmup_steps=2, total_steps=20, clip_norm=0.5)
SITE = "a"


def cut_for(mode: Mode) -> Cut:
    return Cut(1, 1) if mode == "u-shape" else Cut(1)


def adapted(family: str = "gpt2", dropout: float = 0.0, device: str = "cpu", **options: Any) -> Any:
    """A small model with an adapter whose B is not zero; the same at each call."""
    model = attach(
        small_model(family, dropout=dropout, **options),
        AdapterSpec(rank=2, alpha=4, dropout=dropout), 0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.to(device).train()


def parts_of(model: Any, mode: Mode) -> tuple[dict[Role, SplitPart], SplitPart]:
    """The site's parts and the cloud's."""
    parts = split_parts(model, cut_for(mode))
    middle = parts.pop("middle")
    return parts, middle


def batch_stream(
    padding: str = "right", seed: int = 0, rows: int = 3, length: int = 8, samples: int = 0
) -> Callable[[], dict[str, Tensor]]:
    """An endless source of batches with labels on the later part of rows of unequal length.

    With ``samples`` the rows come, in turn, from so many examples, and are named.
    """

    def drawn() -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        taken = 0
        while True:
            if samples:
                rows_now = [(taken + row) % samples for row in range(rows)]
                taken += rows
                made = [_batch(torch.Generator().manual_seed(100 + r), padding, 1, length)
                        for r in rows_now]  # fmt: skip
                found = {key: torch.cat([each[key] for each in made]) for key in made[0]}
                yield found | {"sample_ids": torch.tensor(rows_now)}
            else:
                yield _batch(generator, padding, rows, length)

    stream = drawn()
    return lambda: next(stream)


def _batch(generator: torch.Generator, padding: str, rows: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCAB, (rows, length), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    for row in range(rows):
        gap = int(torch.randint(0, 3, (), generator=generator)) if padding != "none" else 0
        where = slice(0, gap) if padding == "left" else slice(length - gap, length)
        mask[row, where] = 0
        labels[row, : length // 3] = -100
    return {
        "input_ids": ids.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "labels": labels.masked_fill(mask == 0, -100),
    }


class Pumped(Future[Answer]):
    """A future whose owner runs the cloud until it is there."""

    def __init__(self, engine: CloudEngine, baton: threading.Lock | None) -> None:
        super().__init__()
        self._engine, self._baton = engine, baton

    def result(self, timeout: float | None = None) -> Answer:
        if self._baton is not None:  # another thread is the cloud's
            self._baton.release()
            try:
                return super().result(60)
            finally:
                self._baton.acquire()
        while not self.done():
            if not self._engine.work(0.0):
                raise AssertionError("the cloud has nothing to run, and this call no answer")
        return super().result(0)


@dataclass
class Direct:
    """A channel into an engine of this process; what passes is what JSON and bytes keep."""

    engine: CloudEngine
    site: str = SITE
    baton: threading.Lock | None = None
    calls: list[Call] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def submit(self, call: Call) -> Future[Answer]:
        future = Pumped(self.engine, self.baton)
        text = json.dumps(call.meta, allow_nan=False)
        assert len(text) < 65536
        sent = Call(call.kind, call.step, call.micro, json.loads(text), dict(call.blobs))
        self.calls.append(sent)

        def answered(answer: Answer | Exception) -> None:
            if isinstance(answer, Exception):
                future.set_exception(answer)
                return
            kept = Answer(json.loads(json.dumps(answer.meta, allow_nan=False)), answer.blobs)
            self.answers.append(kept)
            future.set_result(kept)

        self.engine.submit(self.site, sent, answered)
        return future


@dataclass
class Pair:
    """One site and the cloud."""

    site_model: Any
    cloud_model: Any
    engine: CloudEngine
    loop: SplitLoop
    channel: Direct

    def weights(self) -> dict[str, Tensor]:
        """What both halves train, by name."""
        return snapshot(self.loop.half) | self.engine_weights()

    def engine_weights(self) -> dict[str, Tensor]:
        return snapshot(self.engine.part)


def pair(
    mode: Mode,
    config: InnerConfig = CONFIG,
    wire: Wire = EXACT,
    *,
    family: str = "gpt2",
    in_flight: int = 4,
    steps: int | None = None,
    seed: int = 5,
    begin: bool = True,
    auxiliary: Auxiliary | None = None,
    span: float = 20.0,
    **options: Any,
) -> Pair:
    """A fresh site and cloud, each with a model of its own, in the round's begin."""
    site_model, cloud_model = (adapted(family, **options) for _ in range(2))
    parts, _ = parts_of(site_model, mode)
    _, middle = parts_of(cloud_model, mode)
    engine = CloudEngine(middle, config, wire, mode, seed=3)
    if begin:
        engine.begin(1, [SITE], 0, span, steps)
    channel = Direct(engine)
    torch.manual_seed(seed)
    loop = SplitLoop(parts, channel, config, wire, mode, in_flight=in_flight, auxiliary=auxiliary)
    return Pair(site_model, cloud_model, engine, loop, channel)


@contextmanager
def clouds_thread(engine: CloudEngine, baton: threading.Lock) -> Iterator[None]:
    """A thread that does the cloud's work whenever no site holds the baton."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            with baton:
                ran = engine.work(0.0)
            if not ran:
                ended.wait(0.001)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def run_sites(
    engine: CloudEngine,
    loops: Mapping[str, tuple[SplitLoop, Callable[[], Any]]],
    channels: Sequence[Direct],
    **run: Any,
) -> dict[str, InnerResult]:
    """Run all sites at once, a thread each; one thread computes at a time."""
    baton = threading.Lock()
    results: dict[str, InnerResult] = {}
    errors: list[BaseException] = []
    for channel in channels:
        channel.baton = baton

    def one(site: str) -> None:
        loop, source = loops[site]
        with baton:
            try:
                results[site] = loop.run(source, **run)
            except BaseException as error:
                errors.append(error)
                engine.leave(site)

    with clouds_thread(engine, baton):
        threads = [threading.Thread(target=one, args=(site,)) for site in loops]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results
