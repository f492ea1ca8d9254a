from __future__ import annotations

import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from flower_geo.data.parts import cut
from flower_geo.data.sources import open_source
from flower_geo.data.spec import parse_spec
from flower_geo.errors import DataError


def read(spec: str | Path) -> list[str]:
    return [text for _, text in cut(open_source(parse_spec(str(spec))).events())]


def refused(spec: str | Path) -> str:
    with pytest.raises(DataError) as caught:
        read(spec)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_kind_of_file_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("hidden", "utf-8")
    (tmp_path / ".y.txt").write_text("hidden", "utf-8")
    (tmp_path / "z.csv").write_text("not read", "utf-8")
    (tmp_path / "a.TXT").write_bytes("\ufeffone\r\ntwo\rthree\n<|endoftext|>\nlast é".encode())
    (tmp_path / "b" / "c.md").write_text("# head", "utf-8")
    (tmp_path / "c.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "row\\r\\none", "n": 1}\n\n{"text": null}\n{"text": "row two"}'
    )
    pa.parquet.write_table(
        pa.table({"text": ["p1", None, "p2"], "n": [1, 2, 3]}), tmp_path / "d.parquet"
    )
    (tmp_path / "e.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "f.jsonl.xz").write_bytes(lzma.compress(b'{"text": "packed row"}\n'))
    texts = ["one\ntwo\nthree", "last é", "# head", "row\none", "row two", "p1", "p2"]
    assert read(tmp_path) == [*texts, "packed", "packed row"]


def test_letters_survive_chunks_that_cut_them(tmp_path: Path) -> None:
    text = "".join(f"日本é{n}\r\n" for n in range(40_000))
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert "".join(read(tmp_path / "a.txt")) == text.replace("\r\n", "\n").rstrip()


def test_the_digest_follows_content_and_not_places(tmp_path: Path) -> None:
    def digest(folder: str, **files: str) -> str:
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name.replace("_", ".")).write_text(text, "utf-8")
        return open_source(parse_spec(str(tmp_path / folder))).digest()

    first = digest("one", a_txt="x", b_txt="y")
    assert digest("two", c_txt="x", d_txt="y") == first
    others = [
        digest("swapped", a_txt="y", b_txt="x"),
        digest("joined", a_txt="xy"),
        digest("kind", a_txt="x", b_jsonl="y"),
        digest("moved", a_txt="xy", b_txt=""),
    ]
    assert len({first, *others}) == 5


@pytest.mark.parametrize("packed", ["", ".gz", ".xz"])
@pytest.mark.parametrize("place", [0, 3, 65535, 65536, 200_001])
def test_wrong_encoding_names_file_and_byte(tmp_path: Path, place: int, packed: str) -> None:
    path = tmp_path / f"notes.txt{packed}"
    body = b"x" * place + b"\xe9t\xe9" + b"y" * 100
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[packed](body))  # type: ignore[operator]
    message = refused(path)
    assert str(path) in message and f" {place};" in message and "0xe9" in message
    assert "iconv -f ISO-8859-1 -t UTF-8" in message
    assert ("(unpacked)" in message) == bool(packed)


def test_a_letter_cut_off_at_the_end_is_wrong_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\xe6\x97")
    assert "at byte offset 3;" in refused(tmp_path / "a.txt")


def test_utf_16_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("hello".encode("utf-16"))
    assert "iconv -f UTF-16 -t UTF-8" in refused(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"body": "x", "id": 3}', "line 2 has no field 'text' (its fields: 'body', 'id')"),
        (b"{}", "its fields: none"),
        (b"not json", "line 2 is not JSON"),
        (b'["x"]', "line 2 is not a JSON object"),
        (b'{"text": 5}', "field 'text' holds int, not text"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair at letter 0"),
        (b'{"text": "\xff"}', "byte 0xff at byte offset 27"),
        (b"[" * 100_000, "line 2 is not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, says: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "good"}' + b"\n" + line + b"\n")
    message = refused(path)
    assert says in message and str(path) in message


def test_parquet_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pa.parquet.write_table(pa.table({"body": ["x"], "n": [1]}), path)
    assert "no column 'text' (its columns: body, n)" in refused(path)
    pa.parquet.write_table(pa.table({"text": [1, 2]}), path)
    assert "row 0: field 'text' holds int" in refused(path)
    path.write_bytes(path.read_bytes()[:-20])
    assert "not a whole Parquet file" in refused(path)


@pytest.mark.parametrize("suffix", ["gz", "xz"])
@pytest.mark.parametrize("fault", ["cut", "other", "flipped"])
def test_damaged_archives_are_named(tmp_path: Path, suffix: str, fault: str) -> None:
    path = tmp_path / f"a.txt.{suffix}"
    good = {"gz": gzip, "xz": lzma}[suffix].compress(os.urandom(3000).hex().encode())
    middle = len(good) // 2
    flipped = good[:middle] + bytes([good[middle] ^ 0xFF]) + good[middle + 1 :]
    path.write_bytes({"cut": good[:-30], "other": b"plain text", "flipped": flipped}[fault])
    message = refused(path)
    assert f"cut short or no .{suffix} file" in message and str(path) in message


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nowhere/at/all.txt", "no file or folder 'nowhere/at/all.txt' (looked for /"),
        ("sotu", "did you mean corpus:sotu?"),
        ("corpora:bible", "did you mean corpus:bible?"),
        ("bultin", "did you mean builtin?"),
    ],
)
def test_missing_paths_come_with_a_hint(
    spec: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refused(spec)


def test_a_folder_or_file_of_no_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x", "utf-8")
    (tmp_path / "b.parquet.gz").write_text("x", "utf-8")
    assert "holds no usable file: put .txt, .md, .jsonl or .parquet" in refused(tmp_path)
    assert "of no kind that can be read" in refused(tmp_path / "a.csv")


def test_a_file_without_access_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x", "utf-8")

    def closed(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    # Root, as which tests may run, is refused nothing.
    monkeypatch.setattr(Path, "open", closed)
    message = refused(tmp_path / "a.txt")
    assert f"cannot read {tmp_path / 'a.txt'}: Permission denied" in message


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for part in range(2):
        lines = [json.dumps({"body": f"row {part}{n}", "other": n}) for n in range(3)]
        (tmp_path / "in" / f"{part}.jsonl").write_text("\n".join(lines), "utf-8")
    return tmp_path / "in"


def test_datasets_builders_are_read(rows: Path) -> None:
    want = [f"row {part}{n}" for part in range(2) for n in range(3)]
    spec = f"hf:json:{rows}/*.jsonl:train:body"
    assert read(spec) == want
    source = open_source(parse_spec(spec))
    assert source.digest() == open_source(parse_spec(spec)).digest()
    part = open_source(parse_spec(f"hf:json:{rows}/*.jsonl:train[:4]:body"))
    assert [text for _, text in cut(part.events())] == want[:4]
    assert part.digest() != source.digest()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("hf:json:{rows}/*.jsonl:train:text", "has no field 'text': it has body, other"),
        ("hf:json:{rows}/none-*.jsonl:train:body", "datasets cannot load"),
        ("hf:json:{rows}/*.jsonl:test:body", "datasets cannot load"),
        ("hf:json:{rows}/*.jsonl:train:other", "field 'other' holds int"),
    ],
)
def test_datasets_faults_are_one_line(rows: Path, spec: str, says: str) -> None:
    assert says in refused(spec.format(rows=rows))


def test_shipped_corpora_open_by_name() -> None:
    first: Any = next(open_source(parse_spec("corpus:bible")).events())
    assert first.strip().startswith("Genesis 1\n")
