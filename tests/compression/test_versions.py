"""Versions: every site comes to the same bits, whatever it missed."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flower_geo.compression import (
    Broadcaster,
    Codec,
    Replica,
    codec,
    content_hash,
    record_blobs,
    record_nbytes,
)
from flower_geo.errors import CheckpointCorrupt, CodecError, CorruptPayload, NonFiniteTensor
from tests.compression.blobs import noise

State = dict[str, Tensor]
LOSSY = [
    "bf16",
    "int4(block=64)",
    "topk(density=0.1,chunk=64)|int8(block=64)",
    "*.bias=fp32; *=int8(block=64)",
]


def weights(round_: int = 0) -> State:
    """A walk: each version is a small step away from the last."""
    state = {
        "w": noise(30, 40),
        "w.bias": noise(40, seed=1),
        "s": torch.tensor(1.0),
        "e": torch.zeros(0),
    }
    for step in range(1, round_ + 1):
        for number, name in enumerate(state):
            state[name] = state[name] + noise(*state[name].shape, seed=9 * step + number) * 0.01
    return state


def bring(site: Replica, server: Broadcaster) -> str:
    """Do what a site does with an offer; returns its kind."""
    offer = server.offer(site.version, content_hash(site.state))
    if offer.kind != "none":
        assert offer.record is not None and offer.nbytes == record_nbytes(offer.record)
        site.apply(offer.kind, offer.record, offer.first, offer.last, server.hash)
    assert site.version == server.version
    assert equal(site.state, server.shadow)
    return offer.kind


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return content_hash(dict(a)) == content_hash(dict(b))


@pytest.mark.parametrize("spec", ["fp32", *LOSSY])
def test_twenty_versions_and_sites_that_miss_some(spec: str) -> None:
    server = Broadcaster(codec(spec), weights())
    sites = [Replica(weights(), 0) for _ in range(4)]
    often, kinds = random.Random(5), set()
    for round_ in range(1, 21):
        server.advance(weights(round_))
        assert server.version == round_ and server.hash == content_hash(server.shadow)
        assert equal(server.master, weights(round_))
        kinds.add(bring(sites[0], server))
        for number, site in enumerate(sites[1:], start=2):
            if often.random() < 1 / number:
                kinds.add(bring(site, server))
    for site in sites:
        bring(site, server)
        assert bring(site, server) == "none"
    assert kinds == ({"snapshot"} if spec == "fp32" else {"deltas", "snapshot", "none"} & kinds)
    assert spec == "fp32" or "deltas" in kinds


@pytest.mark.parametrize("missed", [1, 2, 3, 4, 5])
def test_the_window_holds_deltas_and_beyond_it_is_a_snapshot(missed: int) -> None:
    server = Broadcaster(codec("int4(block=64)"), weights(), window=4)
    for round_ in range(1, missed + 7):
        server.advance(weights(round_))
        if round_ == 6:
            site = Replica(dict(server.shadow), 6)
    offer = server.offer(6, content_hash(site.state))
    if missed <= 4:
        assert (offer.kind, offer.first, offer.last) == ("deltas", 7, 6 + missed)
        assert offer.record is not None
        assert list(offer.record) == [
            f"{version}/{name}" for version in range(7, 7 + missed) for name in weights()
        ]
    else:
        assert (offer.kind, offer.first, offer.last) == ("snapshot", 11, 11)
    bring(site, server)


def test_a_snapshot_is_sent_where_it_is_smaller() -> None:
    server = Broadcaster(codec("bf16"), {"w": noise(1000)}, window=8)
    start = Replica({"w": noise(1000)}, 0)
    kinds = []
    for round_ in range(1, 5):
        server.advance({"w": noise(1000) * (1 + round_ / 100)})
        kinds.append(server.offer(0, content_hash(start.state)).kind)
    assert kinds == ["deltas", "snapshot", "snapshot", "snapshot"]
    bring(start, server)


@pytest.mark.parametrize(
    ("version", "hash"), [(2, "0" * 64), (3, "0" * 64), (99, ""), (-5, "x"), (0, "")]
)
def test_a_site_that_holds_something_else_gets_a_snapshot(version: int, hash: str) -> None:
    server = Broadcaster(codec("int8(block=64)"), weights())
    for round_ in (1, 2, 3):
        server.advance(weights(round_))
    offer = server.offer(version, hash)
    assert (offer.kind, offer.first, offer.last) == ("snapshot", 3, 3)
    assert offer.record is not None
    site = Replica({name: torch.zeros_like(t) for name, t in weights().items()}, version)
    site.apply(offer.kind, offer.record, offer.first, offer.last, server.hash)
    assert equal(site.state, server.shadow)


def test_a_lossless_shadow_is_the_master_to_the_bit() -> None:
    server = Broadcaster(codec("fp32"), {"w": torch.tensor([1e8, 1.0, 0.0])})
    site = Replica({"w": torch.tensor([1e8, 1.0, 0.0])}, 0)
    # 1e8 + (0.1 - 1e8) is not 0.1 in fp32, and a difference would lose the sign of zero
    for values in ([0.1, 1e-30, -0.0], [3e38, -1.0, 5e-45], [-3e38, 0.1, 0.0]):
        server.advance({"w": torch.tensor(values)})
        assert bring(site, server) == "snapshot"
        assert equal(server.shadow, {"w": torch.tensor(values)})
        assert equal(site.state, server.master)


@pytest.mark.parametrize("spec", ["int2(block=64)", "topk(density=0.25,chunk=64)|int4(block=64)"])
def test_the_downlinks_error_does_not_accumulate(spec: str) -> None:
    """What coding lost goes out with the next version; coding bare steps would drift off."""
    chosen, target = codec(spec), {"w": noise(4096)}
    server, bare = Broadcaster(chosen, target), target["w"]
    gaps = []
    for round_ in range(1, 61):
        step = noise(4096, seed=round_) * 0.01 + 0.002
        bare = bare + Codec.decode(chosen.encode(step))
        target = {"w": target["w"] + step}
        server.advance(target)
        gaps.append(float((server.shadow["w"] - server.master["w"]).norm()))
    one = float((noise(4096, seed=1) * 0.01 + 0.002).norm())
    assert max(gaps[40:]) < 4 * one
    assert max(gaps[40:]) < 1.25 * max(gaps[15:40])
    assert float((bare - target["w"]).norm()) > 2 * gaps[-1]
    for _ in range(40):  # at rest, the shadow comes all the way
        server.advance(target)
    assert float((server.shadow["w"] - target["w"]).norm()) < 1e-3 * one


@pytest.mark.parametrize("spec", ["fp32", *LOSSY])
def test_restore_goes_on_bit_equal(spec: str) -> None:
    server = Broadcaster(codec(spec), weights(), window=3)
    held = [Replica(weights(), 0)]
    for round_ in range(1, 7):
        server.advance(weights(round_))
        held.append(Replica(dict(server.shadow), round_))
    deltas, meta = server.state()
    assert all(tensor.dtype == torch.uint8 for tensor in deltas.values())
    meta = json.loads(json.dumps(meta))
    shuffled = {name: deltas[name].clone() for name in sorted(deltas, reverse=True)}
    twin = Broadcaster.restore(codec(spec), server.master, server.shadow, shuffled, meta)
    for round_ in range(7, 12):
        for each in (server, twin):
            each.advance(weights(round_))
        assert (twin.version, twin.hash, twin.window) == (server.version, server.hash, 3)
        assert equal(twin.master, server.master) and equal(twin.shadow, server.shadow)
        for site in held:
            a, b = (each.offer(site.version, content_hash(site.state)) for each in (server, twin))
            assert (a.kind, a.first, a.last, a.nbytes) == (b.kind, b.first, b.last, b.nbytes)
            assert a.record is not None and b.record is not None
            assert record_blobs(a.record) == record_blobs(b.record)
    assert twin.state()[1] == server.state()[1]


def test_restore_refuses_other_weights() -> None:
    server = Broadcaster(codec("int8(block=64)"), weights())
    server.advance(weights(1))
    deltas, meta = server.state()
    with pytest.raises(CheckpointCorrupt, match="version 1 fail their hash"):
        Broadcaster.restore(codec("int8(block=64)"), server.master, weights(2), deltas, meta)


def test_a_state_of_version_zero_restores() -> None:
    server = Broadcaster(codec("int8(block=64)"), weights())
    twin = Broadcaster.restore(server.codec, server.master, server.shadow, *server.state())
    assert twin.offer(0, server.hash).kind == "none"


# --- what must be refused --------------------------------------------------------------------


def one_behind() -> tuple[Broadcaster, Replica, ArrayRecord]:
    server = Broadcaster(codec("int8(block=64)"), weights())
    server.advance(weights(1))
    site = Replica(weights(), 0)
    record = server.offer(0, content_hash(site.state)).record
    assert record is not None
    return server, site, record


def unchanged(site: Replica) -> None:
    assert site.version == 0 and equal(site.state, weights())


def test_a_wrong_hash_keeps_the_old_state() -> None:
    server, site, record = one_behind()
    held = dict(site.state)
    with pytest.raises(CorruptPayload, match="version 1 has another hash"):
        site.apply("deltas", record, 1, 1, "0" * 64)
    unchanged(site)
    assert all(site.state[name] is tensor for name, tensor in held.items())
    snapshot = server.offer(0, "").record
    assert snapshot is not None
    with pytest.raises(CorruptPayload, match="another hash"):
        site.apply("snapshot", snapshot, 1, 1, content_hash(site.state))
    unchanged(site)
    site.apply("deltas", record, 1, 1, server.hash)
    assert equal(site.state, server.shadow)


@pytest.mark.parametrize(
    ("first", "last"),
    [(0, 1), (2, 2), (1, 0), (1, 2**62), (-1, 1), (1, 2), (1, -5), (2**63, 2**64)],
)
def test_versions_that_do_not_follow_are_refused(first: int, last: int) -> None:
    server, site, record = one_behind()
    with pytest.raises(CorruptPayload):
        site.apply("deltas", record, first, last, server.hash)
    unchanged(site)


def test_the_same_delta_twice_is_refused() -> None:
    server, site, record = one_behind()
    site.apply("deltas", record, 1, 1, server.hash)
    with pytest.raises(CorruptPayload, match="do not follow 1"):
        site.apply("deltas", record, 1, 1, server.hash)
    assert equal(site.state, server.shadow)


def test_deltas_a_site_has_already_are_passed_over() -> None:
    server, site, record = one_behind()
    site.apply("deltas", record, 1, 1, server.hash)
    for step in (1, 2):
        server.advance({name: tensor + step for name, tensor in server.master.items()})
    offer = server.offer(0, content_hash(one_behind()[1].state))
    assert (offer.kind, offer.first, offer.last) == ("deltas", 1, 3) and offer.record is not None
    site.apply("deltas", offer.record, 1, 3, server.hash)
    assert equal(site.state, server.shadow) and site.version == 3


@pytest.mark.parametrize("kind", ["none", "Deltas", "", "pickle"])
def test_other_kinds_are_refused(kind: str) -> None:
    server, site, record = one_behind()
    with pytest.raises(CorruptPayload, match="cannot be applied"):
        site.apply(kind, record, 1, 1, server.hash)
    unchanged(site)


@given(data=st.data())
@settings(max_examples=40)
def test_a_damaged_record_keeps_the_old_state(data: st.DataObject) -> None:
    server, site, record = one_behind()
    name = data.draw(st.sampled_from(list(record)))
    blob = bytearray(record[name].data)
    what = data.draw(st.sampled_from(["flip", "cut", "drop", "rename", "other"]))
    if what == "flip":
        blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif what == "cut":
        del blob[data.draw(st.integers(0, len(blob) - 1)) :]
    elif what == "other":
        blob = bytearray(codec("fp32").encode(noise(3, 3)))
    broken = ArrayRecord(
        {
            ("2" + key if key == name and what == "rename" else key): (
                Array(array.dtype, tuple(array.shape), array.stype, bytes(blob))
                if key == name
                else array
            )
            for key, array in record.items()
            if not (key == name and what == "drop")
        }
    )
    with pytest.raises(CorruptPayload):
        site.apply("deltas", broken, 1, 1, server.hash)
    unchanged(site)


@pytest.mark.parametrize("spec", ["fp32", "int8(block=64)"])
def test_a_master_that_is_not_finite_changes_nothing(spec: str) -> None:
    server = Broadcaster(codec(spec), weights())
    for bad in (float("nan"), float("inf")):
        with pytest.raises(NonFiniteTensor, match="tensor s holds"):
            server.advance({**weights(1), "s": torch.tensor(bad)})
        assert (
            server.version == 0
            and equal(server.shadow, weights())
            and equal(server.master, weights())
        )
    assert server.offer(0, content_hash(weights())).kind == "none"
    server.advance(weights(1))
    bring(Replica(weights(), 0), server)


@pytest.mark.parametrize("spec", ["fp32", "int8(block=64)"])
@pytest.mark.parametrize(
    "change",
    [
        {"w": noise(30, 1)},  # torch would broadcast it
        {"w": noise(40)},
        {"more": torch.zeros(3)},
        {"w": noise(30, 40).double()},
        {"w": noise(30, 40).to(torch.bfloat16)},
        None,
    ],
)
def test_a_master_of_another_schema_changes_nothing(spec: str, change: State | None) -> None:
    server = Broadcaster(codec(spec), weights())
    new = {**weights(1), **change} if change is not None else {"w": weights(1)["w"]}
    with pytest.raises(CodecError, match="names and shapes must stay"):
        server.advance(new)
    assert server.version == 0 and equal(server.master, weights())


@pytest.mark.parametrize("spec", ["fp32", *LOSSY])
def test_tensors_handed_out_are_never_changed(spec: str) -> None:
    start = weights()
    server, site = Broadcaster(codec(spec), start), Replica(start, 0)
    handed = [start]
    for round_ in range(1, 6):
        new = weights(round_)
        server.advance(new)
        handed += [new, server.master, server.shadow]
        if round_ % 2:
            bring(site, server)
        handed.append(site.state)
    hashes = [content_hash(state) for state in handed]
    for round_ in range(6, 9):
        server.advance(weights(round_))
        bring(site, server)
    assert [content_hash(state) for state in handed] == hashes
    assert equal(start, weights())


def test_offers_do_not_share_a_record() -> None:
    server, _, _ = one_behind()
    for version, hash in ((0, content_hash(weights())), (0, "")):
        a, b = server.offer(version, hash), server.offer(version, hash)
        assert a.record is not b.record and a.record is not None and b.record is not None
        for name in list(a.record):
            del a.record[name]
        assert len(b.record) == len(weights())
        offer = server.offer(version, hash)
        assert offer.record is not None and len(offer.record) == len(weights())


def test_a_lossless_codec_packs_its_snapshots() -> None:
    weights = {"w": torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).bfloat16()}
    weights = {name: tensor.float() for name, tensor in weights.items()}  # planes of zeros
    master = Broadcaster(codec("zstd"), {"w": torch.zeros(256, 64)})
    master.advance(weights)
    offer = master.offer(0, "another")
    assert offer.kind == "snapshot" and offer.record is not None
    assert 0 < offer.nbytes < 0.6 * 4 * weights["w"].numel()
    site = Replica({"w": torch.zeros(256, 64)}, 0)
    site.apply(offer.kind, offer.record, offer.first, offer.last, master.hash)
    assert torch.equal(site.state["w"], weights["w"])
