"""The site's parts, their random streams, and the calls they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from flower_geo.calls import Answer, Blob, Call
from flower_geo.errors import DataError
from flower_geo.evaluation.batch import Batch, Counted, counted, model_inputs
from flower_geo.evaluation.precision import Precision, autocast, device_of
from flower_geo.models.split import Role, SplitPart
from flower_geo.training.split.lane import Traffic
from flower_geo.training.split.streams import Stream
from flower_geo.training.split.values import exact_blob, integers_blob
from flower_geo.training.split.wire import WireEnd

__all__ = ["SAMPLES", "Channel", "Link", "Micro", "SiteHalf", "micro_of"]

#: In a batch: ``LongTensor[b]``, a number for each row that names its sample for ever.
SAMPLES = "sample_ids"


class Channel(Protocol):
    """What a site's half talks to."""

    def submit(self, call: Call, /) -> Future[Answer]:
        """Send a call; the future gets its answer, or a ``SplitError``."""


class SiteHalf(nn.Module):
    """The parts at a site as one module, with the parameters' names of the whole model.

    Args:
        parts: bottom, and top for a U-shape, of one ``split_parts``.
    """

    def __init__(self, parts: Mapping[Role, SplitPart]) -> None:
        super().__init__()
        self.bottom = parts["bottom"]
        self.top = parts.get("top")

    @property
    def parts(self) -> dict[Role, SplitPart]:
        """By role, in the order of a forward."""
        found: dict[Role, SplitPart] = {"bottom": self.bottom}
        return found | ({"top": self.top} if self.top is not None else {})

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters in the whole model's order; a tied one once, as the bottom's."""
        seen: set[int] = set()
        for part in self.parts.values():
            for name, parameter in part.named_parameters(prefix, recurse, remove_duplicate):
                if not (remove_duplicate and id(parameter) in seen):
                    yield name, parameter
                seen.add(id(parameter))


@dataclass(frozen=True)
class Micro:
    """A micro-batch with something to predict.

    Attributes:
        inputs: what the bottom is called with, on its device.
        places: where labels count.
        labels: [b, n].
        samples: ids of the rows, where the batch names them.
    """

    inputs: Mapping[str, Tensor]
    places: Counted
    labels: Tensor
    samples: list[int] | None

    def __len__(self) -> int:
        return len(self.places)

    def blobs(self, *, labels: bool) -> dict[str, Blob]:
        """What the cloud needs beside hidden states."""
        found: dict[str, Blob] = {}
        if "attention_mask" in self.inputs:
            found["mask"] = integers_blob(self.inputs["attention_mask"], "mask")
        if "position_ids" in self.inputs:
            found["positions"] = integers_blob(self.inputs["position_ids"], "positions")
        if labels:
            found["labels"] = integers_blob(self.labels, "labels")
        return found


def micro_of(batch: Batch, device: torch.device) -> Micro | None:
    """A batch as a micro-batch; None where none of its labels counts.

    Raises:
        DataError: it is no batch, or its sample ids are not one for each row.
    """
    given = {"input_ids": batch, "labels": batch} if isinstance(batch, Tensor) else dict(batch)
    ids = given.pop(SAMPLES, None)
    places = counted(given)
    if ids is not None and (ids.is_floating_point() or ids.shape != given["labels"].shape[:1]):
        raise DataError(
            f"sample_ids are {ids.dtype} {list(ids.shape)}, not a whole number for each of the "
            f"batch's {given['labels'].shape[0]} rows"
        )
    samples = None if ids is None else [int(value) for value in ids.tolist()]
    if not len(places):
        return None
    return Micro(model_inputs(given, device), places, given["labels"], samples)


class Link:
    """A site's parts at one end of the wire to the cloud.

    Args:
        parts: bottom, and top for a U-shape.
        channel: to the cloud's half.
        wire: this end.
        streams: dropout's, by role.
        precision: as in ``InnerConfig``.
        labels: whether labels go to the cloud.
    """

    def __init__(
        self,
        parts: Mapping[Role, SplitPart],
        channel: Channel,
        wire: WireEnd,
        streams: Mapping[Role, Stream],
        precision: Precision,
        *,
        labels: bool,
    ) -> None:
        self.bottom = parts["bottom"]
        self.top = parts.get("top")
        self.wire = wire
        self.traffic = Traffic()
        self.device = device_of(self.bottom)
        self.precision: Precision = precision
        self.labels = labels
        self._channel = channel
        self._streams = streams
        #: Whether the other end's references are still to be compared with ours.
        self.unproven = True

    def below(self, micro: Micro) -> Tensor:
        """Hidden states [b, n, d] of the bottom."""
        with self._streams["bottom"].active(), autocast(self.precision, self.device):
            return self.bottom.run(
                micro.inputs["input_ids"],
                micro.inputs.get("attention_mask"),
                micro.inputs.get("position_ids"),
            )

    def dropout(self, role: Role) -> Stream:
        """The random stream of a part."""
        return self._streams[role]

    def forward(
        self, step: int, index: int, micro: Micro, hidden: Tensor, total: int, *, gradient: bool
    ) -> Future[Answer]:
        """Send hidden states of a micro-batch.

        Raises:
            NonFiniteTensor: they are not finite.
        """
        given = self.wire.noisy(hidden)
        extra = micro.blobs(labels=self.labels)
        meta: dict[str, object] = {"tokens": len(micro), "total": total, "gradient": gradient}
        if self.wire.mark is not None and micro.samples is not None:
            meta["samples"] = micro.samples

        def sent(**more: str | None) -> Future[Answer]:
            found = self.wire.send("lower", given, micro.samples)
            return self.call("forward", step, index, meta | found.meta | more, found.blobs | extra)

        if not self.unproven or self.wire.mark is None:
            return sent()
        future = sent(mark=self.wire.mark)
        if self.answer(future).meta.get("again"):
            # References differ, as after a loss of either side's state: both have none now.
            self.wire.forget()
            future = sent(mark=self.wire.mark)
            self.answer(future)
        self.unproven = False
        return future

    def call(
        self,
        kind: str,
        step: int,
        micro: int,
        meta: Mapping[str, object],
        blobs: Mapping[str, Blob] | None = None,
    ) -> Future[Answer]:
        """Make a call."""
        made = Call(kind, step, micro, meta, blobs or {})
        self.traffic.sent(made)
        return self._channel.submit(made)

    def answer(self, future: Future[Answer]) -> Answer:
        """Wait for an answer."""
        return future.result()

    def took(self, future: Future[Answer]) -> Answer:
        """Wait for an answer and count its blobs."""
        answer = self.answer(future)
        self.traffic.answered(answer)
        return answer

    def held_out(self, micro: Micro) -> Future[Answer]:
        """Send a held-out batch, without loss and without noise."""
        hidden = self.below(micro)
        blobs = {"activation": exact_blob(hidden, "activation")} | micro.blobs(labels=self.labels)
        meta = {"tokens": len(micro), "dtype": str(hidden.dtype).removeprefix("torch.")}
        return self.call("evaluate", 0, 0, meta, blobs)
