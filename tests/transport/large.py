"""Sends a blob of many megabytes there and back in a process of its own; prints what it took.

Called as ``python -m tests.transport.large MEGABYTES FOLDER``.
"""

from __future__ import annotations

import json
import mmap
import sys
import tempfile
import time
import zlib
from pathlib import Path

from flower_geo.calls import Answer, Call
from flower_geo.transport import Limits
from tests.transport.world import Notes, client, serving

STEP = 2**20


def peak() -> int:
    """Largest resident size since :func:`reset`, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (each for each in lines if each.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def reset() -> None:
    """Begin to watch the resident size anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def checksum(view: memoryview) -> int:
    """CRC-32 of a view, without keeping its pages."""
    found = 0
    for start in range(0, len(view), STEP):
        found = zlib.crc32(view[start : start + STEP], found)
        if isinstance(view.obj, mmap.mmap):
            view.obj.madvise(mmap.MADV_DONTNEED, start, min(STEP, len(view) - start))
    return found


def main(megabytes: int, folder: str) -> None:
    """Echo one blob."""
    size = megabytes * STEP + 12_345
    limits = Limits(bytes=4 * 2**30, folder=folder, call=600.0)
    seen: list[int] = []

    def echo(site: str, call: Call) -> Answer:
        view = call.blobs["x"]
        assert isinstance(view, memoryview)
        seen.append(checksum(view))
        return Answer({}, {"x": view})

    with tempfile.TemporaryFile(dir=folder) as file:
        for number in range(0, size, STEP):
            file.write(number.to_bytes(8, "little") * (min(STEP, size - number) // 8 + 1))
        file.truncate(size)
        file.flush()
        given = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
    with serving(Notes(echo), limits) as (_, address), client(address, limits=limits) as site:
        site.join()
        site.submit(Call("step", 1, 0, {}, {"x": memoryview(b"x" * 2 * limits.spool)})).result(30)
        reset()
        before, began = peak(), time.monotonic()
        answer = site.submit(Call("forward", 1, 0, {}, {"x": given})).result(600)
        seconds = time.monotonic() - began
        back = answer.blobs["x"]
        assert isinstance(back, memoryview)
        same = len(back) == size and checksum(back) == checksum(given) == seen[-1]
        result = {"same": same, "growth": peak() - before, "seconds": seconds}
    left = [path.name for path in Path(folder).iterdir()]
    print(json.dumps(result | {"left": left}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
