"""Read text: the shipped corpora, files and folders, anything `datasets` builds.

A source yields pieces of text and None at the end of each document, and hashes
its own content.  Nothing here holds more than a chunk, a line or a row batch.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import IO, Any, Protocol

from flower_geo.data.parts import Events, separated
from flower_geo.data.spec import FILE_BUILDERS, DataSpec, nearest_spec
from flower_geo.errors import DataError

__all__ = [
    "Built",
    "Files",
    "Source",
    "json_lines",
    "load_built",
    "open_source",
    "plain_text",
    "readable",
    "unpacked",
    "whole_parquet",
    "wrong_encoding",
]

_CHUNK = 1 << 16
_KINDS = (".txt", ".md", ".jsonl", ".parquet")
_PACKED = (".gz", ".xz")
_READABLE = ".txt, .md, .jsonl or .parquet (text also .gz or .xz)"


class Source(Protocol):
    """Where documents come from."""

    name: str

    def digest(self) -> str:
        """Hex sha256 of the content: equal text in equal order, equal digest."""

    def events(self) -> Events:
        """Pieces of text, None after each document."""


def open_source(spec: DataSpec) -> Source:
    """The source a spec names; fails at once when there is nothing to read.

    Raises:
        DataError: missing or unusable file or folder, failing builder.
    """
    if spec.kind == "corpus":
        folder = resources.files("flower_geo.data") / "corpora"
        return Files(spec.source, [folder / f"{spec.source}.txt.xz"], spec.field)
    if spec.kind == "hf":
        return Built(spec)
    return Files(spec.source, _usable(spec.source), spec.field)


class Files:
    """Text files, JSON Lines and Parquet, one after the other."""

    def __init__(self, name: str, files: list[Any], field: str) -> None:
        self.name = name
        self.files = files
        self.field = field

    def digest(self) -> str:
        """Hex sha256 over the kind and the bytes of each file; names do not count."""
        total = hashlib.sha256(self.field.encode("utf-8"))
        for path in self.files:
            with readable(path), path.open("rb") as handle:
                content = hashlib.file_digest(handle, "sha256").hexdigest()
            total.update(f"{_kind(path.name)} {content}\n".encode())
        return total.hexdigest()

    def events(self) -> Events:
        """Pieces of text, None after each document."""
        for path in self.files:
            kind = _kind(path.name)
            with readable(path), path.open("rb") as raw:
                if kind.startswith(".parquet"):
                    yield from _parquet(raw, path, self.field)
                    continue
                handle = unpacked(raw, kind)
                if kind.startswith(".jsonl"):
                    yield from _text_lines(handle, path, self.field)
                else:
                    yield from separated(_decoded(handle, path))


class Built:
    """Rows of a data set that `datasets` builds or finds in its own cache."""

    def __init__(self, spec: DataSpec) -> None:
        self.name = spec.source if spec.config is None else f"{spec.source}:{spec.config}"
        self.field = spec.field
        self.rows = load_built(spec)
        if self.field not in self.rows.column_names:
            raise DataError(
                f"hf:{self.name}:{spec.split} has no field {self.field!r}: it has "
                f"{', '.join(self.rows.column_names)}; name one as the spec's last part"
            )
        self.rows = self.rows.select_columns([self.field])

    def digest(self) -> str:
        """Hex sha256 over the texts of all rows."""
        total = hashlib.sha256()
        for event in self.events():
            text = b"" if event is None else event.encode("utf-8")
            total.update(len(text).to_bytes(8, "little") + text)
        return total.hexdigest()

    def events(self) -> Events:
        """The text of each row, None after it."""
        row = 0
        for batch in self.rows.iter(batch_size=256):
            for value in batch[self.field]:
                yield from _document(value, self.field, f"hf:{self.name}, row {row}")
                row += 1


def load_built(spec: DataSpec) -> Any:
    """The rows a spec of kind "hf" names, as a `datasets.Dataset`.

    Raises:
        DataError: `datasets` is missing, or cannot build or find them.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError("hf: data needs the 'datasets' package: pip install datasets") from error
    where: dict[str, Any] = {"name": spec.config}
    if spec.source in FILE_BUILDERS:
        where = {"data_files": spec.config}
    try:
        return load_dataset(spec.source, split=spec.split, **where)
    # Builders raise what their formats raise; all of it means "not loadable".
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        name = spec.source if spec.config is None else f"{spec.source}:{spec.config}"
        raise DataError(
            f"datasets cannot load hf:{name}:{spec.split}: {reason}; check the spec "
            "hf:BUILDER:CONFIG:SPLIT:FIELD, and that the data lies on this machine"
        ) from error


def _usable(source: str) -> list[Path]:
    """The files behind a path, in the order of their names."""
    path = Path(source).expanduser()
    if path.is_file():
        if not _kind(path.name):
            raise DataError(f"{path} is of no kind that can be read: give {_READABLE}")
        return [path]
    if not path.is_dir():
        near = nearest_spec(source) if "/" not in source else None
        hint = f"did you mean {near}?" if near else "correct the path"
        raise DataError(f"no file or folder {source!r} (looked for {path.absolute()}): {hint}")
    found = []
    for folder, folders, names in os.walk(path, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if _kind(name) and not name.startswith(".")]
    if not found:
        raise DataError(f"folder {path} holds no usable file: put {_READABLE} files there")
    return sorted(found, key=lambda file: file.relative_to(path).as_posix())


def _raise(error: OSError) -> None:
    raise DataError(
        f"cannot list {error.filename}: {error.strerror}; give the site's user access"
    ) from error


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


@contextmanager
def readable(path: Any) -> Iterator[None]:
    """Turn what goes wrong below a file into one line that names it."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(
            f"{path} is cut short or no {Path(path.name).suffix} file ({error}): "
            "copy or pack it again"
        ) from error
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}; check the file and its access rights"
        ) from error


def unpacked(raw: IO[bytes], kind: str) -> IO[bytes]:
    """The bytes behind a handle, unpacked when `kind` ends in .gz or .xz."""
    if kind.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if kind.endswith(".xz"):
        return lzma.LZMAFile(raw)
    return raw


def _decoded(handle: IO[bytes], path: Any) -> Iterator[str]:
    """Chunks of text with plain line ends; a byte-order mark is dropped."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line_ends = io.IncrementalNewlineDecoder(None, translate=True)
    position, first = 0, True
    while True:
        data = handle.read(_CHUNK)
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise wrong_encoding(path, position - pending + error.start, error) from error
        position += len(data)
        if first and text:
            text, first = text.removeprefix("\ufeff"), False
        text = line_ends.decode(text, final=not data)
        if text:
            yield text
        if not data:
            return


def wrong_encoding(path: Any, offset: int, error: UnicodeDecodeError) -> DataError:
    """The error for bytes that are not UTF-8, `offset` bytes into the file."""
    byte = error.object[error.start]
    where = "offset" if _kind(path.name)[-3:] not in _PACKED else "offset (unpacked)"
    utf16 = offset == 0 and error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    name = "UTF-16" if utf16 else "ISO-8859-1"
    return DataError(
        f"{path} is not UTF-8: byte 0x{byte:02x} at byte {where} {offset}; convert it, "
        f"for instance with: iconv -f {name} -t UTF-8"
    )


def json_lines(handle: IO[bytes], path: Any) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) a line that is not blank; a byte order mark is passed over.

    Raises:
        DataError: a line is not UTF-8 or not JSON.
    """
    position = 0
    for number, line in enumerate(handle, start=1):
        start, position = position, position + len(line)
        if number == 1 and line.startswith(codecs.BOM_UTF8):
            line, start = line.removeprefix(codecs.BOM_UTF8), start + len(codecs.BOM_UTF8)
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise wrong_encoding(path, start + error.start, error) from error
        if text.isspace() or not text:
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where} is not JSON ({error}): write one JSON object a line"
            ) from error
        yield where, value


def _text_lines(handle: IO[bytes], path: Any, field: str) -> Events:
    for where, row in json_lines(handle, path):
        if not isinstance(row, dict):
            raise DataError(f"{where} is not a JSON object: write {{{field!r}: ...}} a line")
        if field not in row:
            have = ", ".join(map(repr, list(row)[:8])) or "none"
            raise DataError(
                f"{where} has no field {field!r} (its fields: {have}): rename the field that "
                f"holds the text to {field!r}"
            )
        yield from _document(row[field], field, where)


def _parquet(raw: IO[bytes], path: Any, field: str) -> Events:
    import pyarrow.parquet

    with whole_parquet(path):
        table = pyarrow.parquet.ParquetFile(raw)
        names = table.schema_arrow.names
        if field not in names:
            raise DataError(
                f"{path} has no column {field!r} (its columns: {', '.join(names)}): rename the "
                f"column that holds the text to {field!r}"
            )
        row = 0
        for batch in table.iter_batches(batch_size=256, columns=[field]):
            for value in batch.column(0).to_pylist():
                yield from _document(value, field, f"{path}, row {row}")
                row += 1


@contextmanager
def whole_parquet(path: Any) -> Iterator[None]:
    """What pyarrow raises for a file it cannot read becomes a ``DataError``."""
    import pyarrow

    try:
        yield
    except pyarrow.ArrowException as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"{path} is not a whole Parquet file ({reason}): write it again") from error


def _document(value: object, field: str, where: str) -> Events:
    """One row's text as a document; a row with null there is skipped."""
    if value is None:
        return
    if not isinstance(value, str):
        raise DataError(
            f"{where}: field {field!r} holds {type(value).__name__}, not text: make it a string"
        )
    yield plain_text(value, field, where)
    yield None


def plain_text(value: str, field: str, where: str) -> str:
    """A field's text with plain line ends.

    Raises:
        DataError: it cannot be written as UTF-8.
    """
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: field {field!r} holds half of a surrogate pair at letter {error.start}: "
            "write it as UTF-8"
        ) from error
    return value.replace("\r\n", "\n").replace("\r", "\n")
