"""Work over tensors in threads, with the same result for any number of them.

torch, numpy, zlib and zstandard release the interpreter's lock while they
compute, so threads are enough.  Each tensor is the work of one thread: what is
computed and in what order does not depend on how many there are.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["SMALL", "THREADS", "in_order", "thread_count"]

T = TypeVar("T")
R = TypeVar("R")

#: Environment variable with the number of threads.
THREADS = "FLOWER_GEO_THREADS"
#: Values that are coded before threads would have started.
SMALL = 1 << 20
_starting = threading.Lock()


def thread_count(wanted: int | None = None, values: int | None = None) -> int:
    """Threads to use: as asked, else of the environment, else as many as torch uses.

    The last is the number of cores unless ``OMP_NUM_THREADS`` or
    ``torch.set_num_threads`` says less; never more than the cores of this process.

    Args:
        wanted: as asked.
        values: how many are to be coded in all; fewer than :data:`SMALL` take one thread.
    """
    if values is not None and values < SMALL:
        return 1
    if wanted is None:
        text = os.environ.get(THREADS, "")
        wanted = int(text) if text.isdecimal() and int(text) else _cores()
    return max(1, wanted)


def _cores() -> int:
    allowed = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    return min(allowed, torch.get_num_threads())


def in_order(
    work: Callable[[T], R],
    items: Iterable[T],
    threads: int | None = None,
    ahead: int | None = None,
) -> Iterator[R]:
    """``map`` in threads: results in the order of the items.

    With one thread everything runs in the caller, an item when its result is
    asked for.  In the threads of a pool torch itself uses one thread.

    Args:
        work: called once an item; what it raises is raised at its item's turn,
            and items not yet begun are then left.
        items: taken in the caller's thread.
        threads: see :func:`thread_count`.
        ahead: items that may be begun before their turn; any number by default.
    """
    count = thread_count(threads)
    if count == 1:
        yield from map(work, items)
        return
    pool = _pool(count)
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if ahead is not None and len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _pool(count: int) -> ThreadPoolExecutor:
    """Threads that have started, each with one thread of torch.

    torch keeps the number for the thread that sets it, and as what later threads
    begin with: the latter is set back.
    """
    with _starting:
        before = torch.get_num_threads()
        started = threading.Barrier(count + 1)

        def begin() -> None:
            torch.get_num_threads()  # the first call of a thread sets what is the default
            torch.set_num_threads(1)
            started.wait()

        pool = ThreadPoolExecutor(count, "codec", initializer=begin)
        for _ in range(count):
            pool.submit(int)
        started.wait()
        torch.set_num_threads(before)
    return pool
