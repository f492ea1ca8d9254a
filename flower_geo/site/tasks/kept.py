"""Data that a process opens once, as long as the files it comes from stay as they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

__all__ = ["KeptByFiles", "Stamps", "file_stamps"]

_Data = TypeVar("_Data")

#: Of each file its path, inode, size and times.
Stamps = tuple[tuple[Any, ...], ...]

#: Data sets kept at once, the newest.
_MOST = 8


def file_stamps(files: Iterable[Any]) -> Stamps | None:
    """What tells that files were changed; None where one cannot be looked at."""
    stamps = []
    for path in files:
        try:
            found = Path(path).stat()
        except (OSError, TypeError):  # a shipped file may lie in an archive
            return None
        stamps.append(
            (str(path), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        )
    return tuple(stamps)


class KeptByFiles(Generic[_Data]):
    """Opened data by all it depends on."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], _Data] = {}

    def get(
        self,
        deciding: tuple[Any, ...],
        stamps: Callable[[], Stamps | None],
        make: Callable[[], _Data],
    ) -> _Data:
        """What ``make`` gives, or gave while everything was the same.

        Args:
            deciding: all that it depends on beside the files and the working folder.
            stamps: of the files as they are now; None = make it anew each time.
            make: reads the files.
        """
        files = stamps()
        if files is None:
            return make()
        key = (*deciding, os.getcwd(), files)
        if key not in self._kept:
            found = make()
            if stamps() != files:  # written to meanwhile: look again next time
                return found
            self._kept[key] = found
            for old in list(self._kept)[:-_MOST]:
                del self._kept[old]
        return self._kept[key]
