"""Memory for a blob: filled in place, then handed out as ``bytes`` without a copy."""

from __future__ import annotations

import ctypes
import io
import mmap
import sys

import numpy as np
from numpy.typing import NDArray

__all__ = ["blank"]

#: Bytes from which large pages are asked for, as numpy does for its arrays.
_LARGE = 1 << 22


def blank(nbytes: int) -> tuple[io.BytesIO, NDArray[np.uint8]]:
    """Zeros to write into; ``getvalue()`` of the first then gives the bytes.

    CPython hands out the very memory that was filled, once the array and all
    views of it are gone, and a copy before.  Joining parts instead would always
    copy the payload, and touching new pages of 4 KiB for the first time takes
    longer than quantising what goes into them.

    Returns:
        The owner and a writable uint8 array over its memory.
    """
    owner = io.BytesIO(bytes(nbytes))
    array = np.frombuffer(owner.getbuffer(), dtype=np.uint8)
    if nbytes >= _LARGE and sys.platform == "linux":
        _ask_for_large_pages(array)
    return owner, array


def _ask_for_large_pages(array: NDArray[np.uint8]) -> None:
    """A hint to the kernel; where it does not follow, nothing is lost."""
    start = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (array.ctypes.data + array.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None)
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
