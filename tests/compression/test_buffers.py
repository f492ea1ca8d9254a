"""Memory for blobs: zeros, filled in place, handed out whole."""

from __future__ import annotations

import tracemalloc

import pytest

from flower_geo.compression.buffers import blank


@pytest.mark.parametrize("nbytes", [0, 1, 11, 4096, (1 << 22) + 5])
def test_what_is_written_is_what_comes_out(nbytes: int) -> None:
    owner, array = blank(nbytes)
    assert array.size == nbytes and not array.any()
    array[:] = 7
    array[-1:] = 9
    part = array[:3]
    early = owner.getvalue()  # with views left: a copy
    del array, part
    assert type(early) is bytes and owner.getvalue() == early
    assert early == (b"\7" * nbytes)[:-1] + b"\t" * (nbytes > 0)


def test_bytes_are_the_memory_that_was_filled() -> None:
    tracemalloc.start()
    try:
        owner, array = blank(1 << 23)
        array.fill(1)
        del array
        assert len(owner.getvalue()) == 1 << 23
        assert tracemalloc.get_traced_memory()[1] < 1.01 * (1 << 23)
    finally:
        tracemalloc.stop()
