"""Read rows: shipped pairs, JSON Lines, JSON and Parquet files, anything `datasets` builds.

A source yields a place (file and line, for error lines), the row's fields and
its category, and hashes its own content.  JSON Lines and Parquet are read a
line or a batch at a time; a JSON file is read whole.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import IO, Any, Protocol

from flower_geo.data.instructions.spec import CATEGORIES, is_glob
from flower_geo.data.sources import (
    json_lines,
    load_built,
    readable,
    unpacked,
    whole_parquet,
    wrong_encoding,
)
from flower_geo.data.spec import DataSpec
from flower_geo.errors import DataError

__all__ = ["Row", "Rows", "files_of", "open_rows"]

#: Where a row stands, its fields, its category ("" where there are none).
Row = tuple[str, dict[str, Any], str]

_KINDS = (".jsonl", ".json", ".parquet")
_PACKED = (".gz", ".xz")
_READABLE = ".jsonl, .json or .parquet (the first two also .gz or .xz)"
_BATCH = 256


class Rows(Protocol):
    """Where rows come from."""

    name: str

    def digest(self) -> str:
        """Hex sha256 of the content: equal rows in equal order, equal digest."""

    def rows(self) -> Iterator[Row]:
        """All rows in order."""


def open_rows(spec: DataSpec) -> Rows:
    """The source a spec names; fails at once when there is nothing to read.

    Raises:
        DataError: missing or unusable file, folder or pattern, failing builder.
    """
    if spec.kind == "builtin":
        return _Shipped()
    if spec.kind == "hf":
        return _Built(spec)
    return _Files(spec.name, _usable(spec.source))


def files_of(spec: DataSpec) -> list[Any] | None:
    """The files a spec is read from, in order; None where `datasets` decides.

    Raises:
        DataError: as `open_rows`.
    """
    if spec.kind == "hf":
        return None
    source = open_rows(spec)
    return source.files if isinstance(source, _Files) else None


class _Files:
    def __init__(self, name: str, files: list[Any]) -> None:
        self.name = name
        self.files = files

    def digest(self) -> str:
        """Over the kind and the bytes of each file; names do not count."""
        total = hashlib.sha256()
        for path in self.files:
            with readable(path), path.open("rb") as handle:
                content = hashlib.file_digest(handle, "sha256").hexdigest()
            total.update(f"{_kind(path.name)} {content}\n".encode())
        return total.hexdigest()

    def rows(self) -> Iterator[Row]:
        """All rows of all files."""
        for path in self.files:
            kind = _kind(path.name)
            with readable(path), path.open("rb") as raw:
                if kind == ".parquet":
                    found = _parquet(raw, path)
                elif kind.startswith(".jsonl"):
                    found = _json_lines(unpacked(raw, kind), path)
                else:
                    found = _json(unpacked(raw, kind), path)
                for where, row in found:
                    yield where, row, ""


class _Shipped(_Files):
    """The shipped pairs, all categories: which are wanted is decided after the split."""

    def __init__(self) -> None:
        folder = resources.files("flower_geo.data.instructions") / "shipped"
        super().__init__("instructions", [folder / "instructions.jsonl.xz"])

    def rows(self) -> Iterator[Row]:
        """Each pair with its category."""
        for where, row, _ in super().rows():
            category = row.pop("category")
            assert category in CATEGORIES
            yield where, row, category


class _Built:
    def __init__(self, spec: DataSpec) -> None:
        self.name = spec.source if spec.config is None else f"{spec.source}:{spec.config}"
        self.table = load_built(spec)

    def digest(self) -> str:
        """Over all rows as JSON."""
        total = hashlib.sha256()
        for _, row, _ in self.rows():
            text = json.dumps(row, sort_keys=True, default=str).encode("ascii")
            total.update(len(text).to_bytes(8, "little") + text)
        return total.hexdigest()

    def rows(self) -> Iterator[Row]:
        """All rows as `datasets` gives them."""
        for number, row in enumerate(self.table):
            yield f"hf:{self.name}, row {number}", dict(row), ""


def _usable(source: str) -> list[Path]:
    """The files behind a path or a pattern, in the order of their names."""
    path = Path(source).expanduser()
    if path.is_file():
        if not _kind(path.name):
            raise DataError(f"{path} is of no kind that holds instruction data: give {_READABLE}")
        return [path]
    if path.is_dir():
        found = [file for file in path.rglob("*") if _seen(file, path)]
        place = f"folder {path}"
    elif is_glob(source):
        names = glob.glob(os.fspath(path), recursive=True)
        found = [Path(name) for name in names if Path(name).is_file() and _kind(name)]
        place = f"the pattern {source!r}"
    else:
        raise DataError(
            f"no file or folder {source!r} (looked for {path.absolute()}): correct the path"
        )
    if not found:
        raise DataError(f"{place} holds no usable file: put {_READABLE} files there")
    return sorted(found, key=lambda file: file.as_posix())


def _seen(file: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
    return not hidden and bool(_kind(file.name)) and file.is_file()


def _kind(name: str) -> str:
    """The suffix that decides how a file is read, "" when it cannot be."""
    stem, packed = name.lower(), ""
    for suffix in _PACKED:
        if stem.endswith(suffix):
            stem, packed = stem.removesuffix(suffix), suffix
    for kind in _KINDS:
        if stem.endswith(kind) and not (packed and kind == ".parquet"):
            return kind + packed
    return ""


def _json_lines(handle: IO[bytes], path: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, row in json_lines(handle, path):
        yield where, _object(row, where)


def _json(handle: IO[bytes], path: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    data = handle.read()
    try:
        rows = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise wrong_encoding(path, error.start, error) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not JSON ({error}): write a list of objects, or one object a line and "
            "call it .jsonl"
        ) from error
    if not isinstance(rows, list):
        raise DataError(f"{path} holds no list: write [{{...}}, {{...}}], an object a row")
    for number, row in enumerate(rows):
        where = f"{path}, row {number}"
        yield where, _object(row, where)


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f'{where} is not a JSON object: write {{"question": ..., "answer": ...}}')
    return row


def _parquet(raw: IO[bytes], path: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow.parquet

    with whole_parquet(path):
        table = pyarrow.parquet.ParquetFile(raw)
        rows = (row for batch in table.iter_batches(batch_size=_BATCH) for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield f"{path}, row {number}", row
