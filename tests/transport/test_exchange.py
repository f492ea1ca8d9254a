"""A call goes there, and its answer comes back."""

from __future__ import annotations

from flower_geo.calls import Blob, Call
from flower_geo.transport import Joined
from tests.transport.world import Notes, client, serving


def test_a_call_is_answered() -> None:
    notes = Notes()
    with serving(notes) as (_, address), client(address) as site:
        assert site.join((0, 4)) == Joined(7, 4)
        blobs: dict[str, Blob] = {"x": b"abc" * 1000, "none": b"", "y": memoryview(b"z" * 1024)}
        answer = site.submit(Call("forward", 5, 2, {"tokens": 3}, blobs)).result(10)
        assert answer.meta == {"site": "a", "step": 5, "meta": {"tokens": 3}}
        assert answer.blobs == {"x": b"cba" * 1000, "none": b"", "y": b"z" * 1024}
    assert notes.calls == [("a", "forward", 5, 2)]
    assert notes.left == ["a"]
    assert notes.joins[0].steps == (0, 4)
