from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from flower_geo.data.instructions.rows import open_rows
from flower_geo.data.instructions.spec import CATEGORIES, deal, instruction_spec, parse_instructions
from flower_geo.errors import DataError

PAIR = {"question": "q", "answer": "a"}


def read(spec: str | Path) -> list[dict[str, Any]]:
    return [row for _, row, _ in open_rows(parse_instructions(str(spec))).rows()]


def refused(spec: str | Path) -> str:
    with pytest.raises(DataError) as caught:
        read(spec)
    message = str(caught.value)
    assert "\n" not in message
    return message


def lines(*names: str) -> bytes:
    return b"".join(json.dumps({**PAIR, "n": name}).encode() + b"\n" for name in names)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    root = tmp_path / "rows"
    (root / "b").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / ".git" / "x.jsonl").write_bytes(lines("hidden"))
    (root / ".y.jsonl").write_bytes(lines("hidden"))
    (root / "notes.txt").write_text("not read", "utf-8")
    (root / "a.JSONL").write_bytes(b"\xef\xbb\xbf" + lines("1") + b"\n" + lines("2"))
    (root / "b" / "c.json").write_text(json.dumps([{**PAIR, "n": "3"}]), "utf-8")
    (root / "d.jsonl.gz").write_bytes(gzip.compress(lines("4"), mtime=0))
    (root / "e.jsonl.xz").write_bytes(lzma.compress(lines("5")))
    table = pa.table({"question": ["q"] * 2, "answer": ["a"] * 2, "n": ["6", "7"]})
    pa.parquet.write_table(table, root / "f.parquet")
    return root


def test_a_folder_is_read_in_the_order_of_names(files: Path) -> None:
    assert [row["n"] for row in read(files)] == ["1", "2", "3", "4", "5", "6", "7"]
    assert all(row["question"] == "q" for row in read(files))


def test_a_pattern_reads_what_it_matches(files: Path) -> None:
    assert [row["n"] for row in read(f"{files}/*.jsonl.*")] == ["4", "5"]
    assert [row["n"] for row in read(f"{files}/**/*.json")] == ["3"]
    assert [row["n"] for row in read(f"{files}/[d-f]*")] == ["4", "5", "6", "7"]
    assert parse_instructions(f"{files}/*.jsonl[1/2]").shard == 1
    assert "the pattern" in refused(f"{files}/*.csv")


def test_datasets_builds_rows(files: Path, tmp_path: Path, monkeypatch: Any) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    spec = f"hf:parquet:{files}/f.parquet:train"
    assert [row["n"] for row in read(spec)] == ["6", "7"]
    source = open_rows(parse_instructions(spec))
    assert source.digest() == open_rows(parse_instructions(spec)).digest()
    assert "leave out the last part" in refused(f"{spec}:question")


def test_the_digest_follows_rows_and_not_places(files: Path, tmp_path: Path) -> None:
    def digest(path: Path) -> str:
        return open_rows(parse_instructions(str(path))).digest()

    (tmp_path / "moved.jsonl").write_bytes((files / "a.JSONL").read_bytes())
    (tmp_path / "other.jsonl").write_bytes(lines("1", "3"))
    assert digest(files / "a.JSONL") == digest(tmp_path / "moved.jsonl")
    assert digest(files / "a.JSONL") != digest(tmp_path / "other.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"question": "q"}\n\n{"a"\n', "a.jsonl, line 3 is not JSON"),
        ("a.jsonl", b'\n"text"\n', "a.jsonl, line 2 is not a JSON object"),
        ("a.jsonl", b'{"a": "b"}\n{"a": "\xe9"}\n', "byte 0xe9 at byte offset 18"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.jsonl.gz", gzip.compress(lines("x" * 999), mtime=0)[:-12], "is cut short"),
        ("a.json", b'{"question": "q"}', "a.json holds no list"),
        ("a.json", b"[1]", "a.json, row 0 is not a JSON object"),
        ("a.json", b'{"a": 1}\n{"a": 2}', "call it .jsonl"),
        ("a.json", b'["\xff"]', "byte 0xff at byte offset 2"),
        ("a.parquet", b"PAR1 not", "not a whole Parquet file"),
        ("a.txt", b"text", "no kind that holds instruction data"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    message = refused(tmp_path / name)
    assert said in message and str(tmp_path) in message


def test_nothing_there_is_one_line(tmp_path: Path) -> None:
    assert "no file or folder" in refused(tmp_path / "missing.jsonl")
    assert "holds no usable file" in refused(tmp_path)


def test_shipped_rows_have_the_counted_categories() -> None:
    found: dict[str, int] = {}
    for _, row, category in open_rows(parse_instructions("builtin:instructions")).rows():
        assert row.keys() == {"question", "answer"}
        found[category] = found.get(category, 0) + 1
    assert found == CATEGORIES and len(found) == 21


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("builtin:instructions:ia", "unknown category 'ia'"),
        ("builtin:instructions:trivias", "did you mean trivia?"),
        ("builtin:instructions:ai+", "unknown category ''"),
        ("builtin:instructions:", "unknown category ''"),
        ("builtin:instruction", "write builtin:instructions"),
        ("builtin:instructions:ai[2/2]", "shards count from 0"),
        ("builtin", "depends on the site's partition"),
        ("corpus:sotu", "plain text, not questions and answers"),
    ],
)
def test_a_wrong_spec_is_one_line(spec: str, said: str) -> None:
    assert said in refused(spec)


def test_shipped_specs_are_read() -> None:
    some = parse_instructions("builtin:instructions:food+ai[1/3]")
    assert (some.config, some.shard, some.n_shards) == ("ai+food", 1, 3)
    assert some.name == "ai+food[1/3]"
    every = parse_instructions("builtin:instructions")
    assert every.name == "instructions" and every.config == "+".join(CATEGORIES)
    assert parse_instructions("builtin:instructions[0/2]").n_shards == 2


@pytest.mark.parametrize("number", [1, 2, 4, 8, 21, 22, 40, 100])
def test_dealt_categories_are_whole_and_disjoint(number: int) -> None:
    specs = [parse_instructions(spec) for spec in deal(number)]
    assert len(specs) == number
    shards: dict[str, list[tuple[int, int]]] = {}
    for spec in specs:
        assert spec.config is not None
        for name in spec.config.split("+"):
            shards.setdefault(name, []).append((spec.shard, spec.n_shards))
    assert shards.keys() == CATEGORIES.keys()
    for found in shards.values():
        assert found == [(shard, len(found)) for shard in range(len(found))]


def test_four_sites_have_about_as_much_each() -> None:
    sizes = [
        sum(CATEGORIES[name] for name in str(parse_instructions(spec).config).split("+"))
        for spec in deal(4)
    ]
    assert max(sizes) < 1.1 * min(sizes)


def test_builtin_is_dealt_and_the_node_has_the_last_word() -> None:
    assert instruction_spec("builtin", {}, 1, 4) == deal(4)[1]
    assert instruction_spec("builtin", {"data": "my.jsonl"}, None, None) == "my.jsonl"
    assert instruction_spec("my.jsonl[*]", {}, 1, 4) == "my.jsonl[1/4]"
    assert instruction_spec("x", {"data": " builtin "}, 0, 1) == deal(1)[0]
    with pytest.raises(DataError, match="needs to know the site's partition"):
        instruction_spec("builtin", {}, None, None)
    with pytest.raises(DataError, match=r"outside 0\.\.3"):
        instruction_spec("builtin", {}, 4, 4)
    with pytest.raises(DataError, match="too many for the"):
        deal(1000)
    with pytest.raises(DataError, match="set num-partitions"):
        deal(0)
