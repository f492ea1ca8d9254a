"""The corpus of odd blobs, as it is, cut, changed and crossed: refused or decoded as before."""

from __future__ import annotations

import json
import random

import pytest
import torch

from flower_geo.compression import Codec, unpack
from flower_geo.compression.codec import MAX_VALUES_PER_BYTE
from flower_geo.compression.records import record_from_blobs
from flower_geo.errors import CorruptPayload
from tests.compression.blobs import allocating_at_most, seal
from tests.compression.odd_blobs import FOLDER, INDEX, outcome

KNOWN = json.loads(INDEX.read_text(encoding="utf-8"))
BLOBS = {path.stem: path.read_bytes() for path in sorted(FOLDER.glob("*.blob"))}


def test_the_index_is_that_of_the_files() -> None:
    assert set(BLOBS) == set(KNOWN)
    assert sum(map(len, BLOBS.values())) < 200_000
    refused = [name for name, what in KNOWN.items() if what.startswith("refused: ")]
    assert len(refused) > 50 and len(KNOWN) - len(refused) > 25


@pytest.mark.parametrize("name", BLOBS)
def test_a_blob_is_what_it_was(name: str) -> None:
    blob = BLOBS[name]
    with allocating_at_most(8 * MAX_VALUES_PER_BYTE * len(blob) + (1 << 18)):
        found = outcome(blob)
    told, was = found.startswith("refused: "), KNOWN[name].startswith("refused: ")
    assert told == was, found
    if not told:  # what a refusal says may change, what was decoded may not
        assert found == KNOWN[name]
        return
    assert "\n" not in found and len(found) < 400
    # Where the header can be read, a record says which tensor it was.
    try:
        record = record_from_blobs({"h.0.attn": blob})
    except CorruptPayload:
        return
    with pytest.raises(CorruptPayload, match=r"tensor h\.0\.attn: "):
        unpack(record)


def survives(blob: bytes) -> None:
    try:
        back = Codec.decode(blob)
    except CorruptPayload as error:
        assert "\n" not in str(error) and len(str(error)) < 400
    else:
        assert bool(torch.isfinite(back).all())


@pytest.mark.parametrize("name", BLOBS)
def test_cut_and_changed(name: str) -> None:
    blob, chance = BLOBS[name], random.Random(name)
    places = chance.sample(range(len(blob)), min(len(blob), 60))
    with allocating_at_most(8 * MAX_VALUES_PER_BYTE * len(blob) + (1 << 20)):
        for place in places:
            with pytest.raises(CorruptPayload):
                Codec.decode(blob[:place])
            if place >= 8:
                changed = bytearray(blob[8:])
                changed[place - 8] = chance.randrange(256)
                survives(seal(bytes(changed)))
                survives(seal(blob[8:place]))


def test_crossed() -> None:
    chance = random.Random(0)
    names = list(BLOBS)
    for _ in range(3000):
        one, other = (BLOBS[chance.choice(names)][8:] for _ in range(2))
        cut = chance.randrange(min(len(one), 90) + 1)
        start = cut if chance.random() < 0.7 else chance.randrange(len(other) + 1)
        survives(seal(one[:cut] + other[start:]))
