"""Versions whose tensors come and go, for names that may."""

from __future__ import annotations

import json

import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flower_geo.compression import Broadcaster, Codec, Replica, codec, content_hash
from flower_geo.compression.versions import none_grows
from flower_geo.errors import CodecError, CorruptPayload

State = dict[str, Tensor]


def grows(name: str) -> bool:
    return name.startswith("fold.")


def at(version: int) -> State:
    """Version 2 has one more tensor, 3 two, 4 another one in their stead."""
    maker = torch.Generator().manual_seed(version)
    state = {"a": torch.randn(8, 300, generator=maker)}
    for each in {2: [1], 3: [1, 2], 4: [9]}.get(version, []):
        state[f"fold.{each}"] = torch.randn(
            each, 500, generator=torch.Generator().manual_seed(100 + each)
        )
    return state


def sent(caster: Broadcaster, replica: Replica) -> ArrayRecord:
    offer = caster.offer(replica.version, content_hash(replica.state))
    assert offer.record is not None
    replica.apply(offer.kind, offer.record, offer.first, offer.last, caster.hash)
    return offer.record


@pytest.mark.parametrize("spec", ["int8(block=64)", "fp32", "topk(density=0.1)|int2"])
@pytest.mark.parametrize("missed", [1, 2, 4])
def test_sites_follow_tensors_that_come_and_go(spec: str, missed: int) -> None:
    caster = Broadcaster(codec(spec), at(0), window=8, growing=grows)
    replica = Replica(at(0), 0, growing=grows)
    for version in range(1, 5):
        caster.advance(at(version))
        if version % missed == 0:
            sent(caster, replica)
            assert replica.state.keys() == at(version).keys()
            assert content_hash(replica.state) == caster.hash


def test_what_was_sent_of_a_growing_tensor_is_final_and_costs_nothing_again() -> None:
    caster = Broadcaster(codec("int8(block=64)"), at(1), growing=grows)
    replica = Replica(at(1), 0, growing=grows)
    caster.advance(at(2))
    sent(caster, replica)
    assert torch.equal(caster.master["fold.1"], caster.shadow["fold.1"])
    assert not torch.equal(caster.master["a"], caster.shadow["a"])
    caster.advance({**at(3), "fold.1": caster.master["fold.1"]})
    record = sent(caster, replica)
    assert Codec.inspect(record["2/fold.1"].data).spec == "zero"
    assert Codec.inspect(record["2/fold.2"].data).spec == "int8(block=64)"


def test_only_growing_names_may_change() -> None:
    caster = Broadcaster(codec("int8"), at(1), growing=grows)
    with pytest.raises(CodecError, match="names and shapes must stay"):
        caster.advance({**at(1), "b": torch.zeros(3)})
    with pytest.raises(CodecError, match="names and shapes must stay"):
        caster.advance({"fold.1": torch.zeros(1, 500)})
    strict = Broadcaster(codec("int8"), at(1))
    assert strict.growing is none_grows
    with pytest.raises(CodecError, match="names and shapes must stay"):
        strict.advance(at(2))


def test_a_site_takes_no_other_name_and_no_made_up_tensor() -> None:
    caster = Broadcaster(codec("int8"), at(1), growing=grows)
    caster.advance(at(2))
    record = caster.offer(0, content_hash(at(1))).record
    assert record is not None
    extra = ArrayRecord({**record, "1/b": record["1/a"]})
    made_up = ArrayRecord({**record, "1/fold.7": record["1/a"]})
    for bad in (extra, made_up):
        replica = Replica(at(1), 0, growing=grows)
        with pytest.raises(CorruptPayload):
            replica.apply("deltas", bad, 1, 1, caster.hash)
        assert replica.version == 0 and replica.state.keys() == at(1).keys()


def test_a_growing_tensor_keeps_its_shape() -> None:
    caster = Broadcaster(codec("int8"), at(2), growing=grows)
    with pytest.raises(CodecError, match=r"fold\.1"):
        caster.advance({**at(2), "fold.1": torch.zeros(2, 500)})
    other = Broadcaster(codec("int8"), {**at(2), "fold.1": torch.ones(2, 500)}, growing=grows)
    other.advance({**at(3), "fold.1": torch.zeros(2, 500)})
    offer = other.offer(0, content_hash({**at(2), "fold.1": torch.ones(2, 500)}))
    assert offer.kind == "deltas" and offer.record is not None
    replica = Replica(at(2), 0, growing=grows)
    with pytest.raises(CorruptPayload, match="shape"):
        replica.apply("deltas", offer.record, 1, 1, other.hash)


def test_a_restored_broadcaster_goes_on_to_the_same_bits() -> None:
    caster = Broadcaster(codec("int8(block=64)"), at(1), growing=grows)
    caster.advance(at(2))
    tensors, meta = caster.state()
    again = Broadcaster.restore(
        codec("int8(block=64)"), caster.master, caster.shadow, tensors,
        json.loads(json.dumps(meta)), growing=grows,
    )  # fmt: skip
    for each in (caster, again):
        each.advance({**at(3), "fold.1": each.master["fold.1"]})
    assert again.hash == caster.hash
    offers = [each.offer(0, content_hash(at(1))).record for each in (caster, again)]
    assert offers[0] is not None and offers[1] is not None
    assert {k: v.data for k, v in offers[0].items()} == {k: v.data for k, v in offers[1].items()}
