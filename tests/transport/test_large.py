"""A blob larger than the memory one would spend on it."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from flower_geo.calls import Call
from flower_geo.errors import DeadlineExceeded, FrameRefused
from flower_geo.transport import Limits
from tests.transport.world import Notes, client, serving

ROOT = Path(__file__).resolve().parents[2]
#: Bytes the process may grow by, whatever the size of the blob.
FLAT = 40 * 2**20


def echo(megabytes: int, folder: Path, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.transport.large", str(megabytes), str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def check(found: dict[str, Any]) -> None:
    assert found["same"]
    assert found["growth"] < FLAT, f"{found['growth'] / 2**20:.0f} MiB"
    assert found["left"] == []


def test_300_megabytes_there_and_back_in_constant_memory(tmp_path: Path) -> None:
    check(echo(300, tmp_path, 100))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_3_gigabytes_there_and_back_in_constant_memory(tmp_path: Path) -> None:
    check(echo(3 * 1024, tmp_path, 800))


LIMITS = Limits(chunk=1024, spool=4096, memory=10_000, beat=20.0, silence=60.0, call=30.0)


def test_what_memory_cannot_hold_goes_to_files() -> None:
    kinds: list[list[type]] = []
    notes = Notes()
    inner = notes.serve

    def serve(site: str, call: Call, answer: Any) -> None:
        kinds.append([type(blob) for blob in call.blobs.values()])
        inner(site, call, answer)

    notes.serve = serve  # type: ignore[method-assign]
    sizes = [4096, 4097, 4096, 4096, 10]
    blobs = {str(n): bytes([n]) * size for n, size in enumerate(sizes)}
    with serving(notes, LIMITS) as (server, address), client(address, limits=LIMITS) as site:
        site.join()
        answer = site.submit(Call("forward", 1, 0, {}, dict(blobs))).result(10)
        assert {name: bytes(blob) for name, blob in answer.blobs.items()} == blobs
        # the second is larger than one may be, the fourth more than all together
        assert kinds == [[bytes, memoryview, bytes, memoryview, bytes]]
        assert server.store.held == 0


def test_a_call_beyond_the_credit_is_not_sent() -> None:
    limits = Limits(bytes=1000)
    with serving(Notes(), limits) as (_, address), client(address) as site:
        site.join()
        with pytest.raises(FrameRefused, match="1001 bytes is larger than the 1000"):
            site.submit(Call("forward", 1, 0, {}, {"x": b"x" * 1001}))
        assert site.submit(Call("forward", 1, 0, {}, {"x": b"x" * 1000})).result(5).blobs


def test_an_answer_larger_than_a_site_takes_is_refused_there() -> None:
    with serving(Notes()) as (_, address), client(address, limits=Limits(bytes=100)) as site:
        site.join()
        future = site.submit(Call("forward", 1, 0, {}, {"x": b"x" * 101}))
        with pytest.raises(FrameRefused, match="answer to call 1 has 101 bytes") as caught:
            future.result(5)
        assert caught.value.fault == "cloud"


def test_no_run_of_bytes() -> None:
    with serving(Notes()) as (_, address), client(address) as site:
        site.join()
        with pytest.raises(FrameRefused, match="no run of bytes"):
            site.submit(Call("forward", 1, 0, {}, {"x": memoryview(b"abcdef")[::2]}))


def test_a_full_disk_is_an_error_of_the_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    limits = Limits(spool=10)
    with serving(Notes(), limits) as (server, address), client(address, deadline=1.0) as site:
        site.join()
        assert site.submit(Call("step", 1, 0, {}, {"x": b"x" * 10})).result(5).blobs
        with monkeypatch.context() as patched:
            patched.setattr(tempfile, "TemporaryFile", full)
            future = site.submit(Call("step", 2, 0, {}, {"x": b"x" * 11}))
            with pytest.raises(DeadlineExceeded, match="No space left"):
                future.result(10)
        assert server.stats().refused.keys() == {"CallFailed"}
