"""The checksum of blobs is zlib's CRC-32, whoever computes it."""

from __future__ import annotations

import sys
import zlib
from importlib import reload

import pytest

from flower_geo.compression import checksum


@pytest.mark.parametrize("length", [0, 1, 7, 8, 15, 16, 63, 64, 65, 4096, 100_003])
def test_it_is_the_crc32_of_zlib(length: int) -> None:
    data = bytes(range(256)) * (length // 256 + 1)
    assert checksum.crc32(memoryview(data)[:length]) == zlib.crc32(data[:length])


def test_without_isal_it_is_zlib_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "isal.isal_zlib", None)
        assert reload(checksum).crc32 is zlib.crc32
    reload(checksum)
