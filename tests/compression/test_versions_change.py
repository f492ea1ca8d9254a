"""Versions whose codec changes on the way, and weights whose owner goes on using them."""

from __future__ import annotations

import json
import random

import pytest
import torch

from flower_geo.compression import Broadcaster, Replica, codec, content_hash
from flower_geo.errors import CodecError, NonFiniteTensor
from tests.compression.test_versions import LOSSY, State, bring, equal, weights

CODECS = [*LOSSY, "fp32"]


def test_every_version_under_another_codec_brings_all_sites_to_the_same_bits() -> None:
    server, rng = Broadcaster(codec("bf16"), weights(), window=5), random.Random(2)
    sites, kinds = [Replica(weights(), 0) for _ in range(4)], set()
    for round_ in range(1, 40):
        spec = rng.choice(CODECS)
        server.advance(weights(round_), codec=codec(spec))
        assert server.codec.spec == codec(spec).spec
        kinds.add(bring(sites[0], server))
        for number, site in enumerate(sites[1:], start=2):
            if rng.random() < 1 / number:
                kinds.add(bring(site, server))
        if round_ % 9 == 0:  # a restart in between
            deltas, meta = server.state()
            meta = json.loads(json.dumps(meta))
            server = Broadcaster.restore(codec("int8"), server.master, server.shadow, deltas, meta)
    for site in sites:
        bring(site, server)
    assert kinds == {"deltas", "snapshot"}


def test_what_one_codec_lost_goes_out_under_the_next() -> None:
    server = Broadcaster(codec("int2(block=64)"), weights())
    server.advance(weights(1))
    assert not equal(server.shadow, server.master)
    server.advance(weights(1), codec=codec("topk(density=1.0,chunk=64)|fp32"))
    gap = max(float((server.master[n] - server.shadow[n]).abs().max()) for n in ("w", "w.bias"))
    assert gap < 1e-6  # fp32 rounding of shadow + (master - shadow)
    server.advance(weights(2), codec=codec("fp32"))
    assert equal(server.shadow, server.master)


def test_a_lossless_version_in_between_needs_a_snapshot_and_the_next_deltas_do_not() -> None:
    server, site = Broadcaster(codec("int8(block=64)"), weights()), Replica(weights(), 0)
    server.advance(weights(1))
    server.advance(weights(2), codec=codec("fp32"))
    assert bring(site, server) == "snapshot"
    server.advance(weights(3), codec=codec("int4(block=64)"))
    assert bring(site, server) == "deltas"
    late = Replica(weights(), 0)
    assert server.offer(0, content_hash(late.state)).kind == "snapshot"


def test_old_deltas_go_also_while_versions_are_lossless() -> None:
    server = Broadcaster(codec("int8(block=64)"), weights(), window=2)
    server.advance(weights(1))
    for round_ in (2, 3, 4):
        server.advance(weights(round_), codec=codec("fp32"))
    assert server.state()[0] == {} and server.state()[1]["before"] == {}


@pytest.mark.parametrize("missed", [1, 3, 6])
def test_deltas_or_a_snapshot_whichever_is_smaller(missed: int) -> None:
    """Several cheap deltas go beside one dear one: it is their sum that counts."""
    server, site = Broadcaster(codec("int4(block=64)"), weights(), window=8), Replica(weights(), 0)
    for round_ in range(1, missed + 1):
        server.advance(weights(round_), codec=codec("int4(block=64)" if round_ < 6 else "bf16"))
    offer = server.offer(0, content_hash(site.state))
    snapshot = server.offer(0, "").nbytes
    assert offer.nbytes <= snapshot
    assert offer.kind == ("deltas" if missed < 6 else "snapshot")
    bring(site, server)


def test_a_codec_that_fails_leaves_the_version_and_the_codec_as_they_were() -> None:
    server = Broadcaster(codec("int8(block=64)"), weights())
    for bad in ("fp32", "bf16"):
        with pytest.raises(NonFiniteTensor):
            server.advance({**weights(1), "s": torch.tensor(float("nan"))}, codec=codec(bad))
        assert server.version == 0 and server.codec.spec == "int8(block=64)"
    with pytest.raises(CodecError):
        server.advance({"w": weights()["w"]}, codec=codec("bf16"))
    assert server.version == 0 and equal(server.master, weights())


@pytest.mark.parametrize("spec", ["fp32", "int8(block=64)"])
def test_weights_given_may_be_changed_by_their_owner(spec: str) -> None:
    mine = weights()
    server = Broadcaster(codec(spec), mine)
    site = Replica(weights(), 0)
    for round_ in range(1, 4):
        for name, tensor in weights(round_).items():
            mine[name].copy_(tensor)  # a training loop that updates in place
        server.advance(mine)
        before = (content_hash(server.master), content_hash(server.shadow))
        assert before[0] == content_hash(weights(round_)) and before[1] == server.hash
        for tensor in mine.values():
            tensor.fill_(7.0)
        assert (content_hash(server.master), content_hash(server.shadow)) == before
        bring(site, server)


def test_weights_given_away_are_not_copied() -> None:
    first, second = weights(), weights(1)
    server = Broadcaster(codec("fp32"), first, own=True)
    assert all(server.master[name] is first[name] for name in first)
    server.advance(second, own=True)
    assert all(server.master[name] is second[name] for name in second)


def test_a_parameter_that_wants_gradients_is_taken_without_them() -> None:
    state: State = {"w": torch.nn.Parameter(torch.ones(3, 4))}
    server = Broadcaster(codec("int8(block=64)"), state)
    server.advance({"w": torch.nn.Parameter(torch.ones(3, 4) * 2)})
    assert not any(t.requires_grad for t in (*server.master.values(), *server.shadow.values()))
