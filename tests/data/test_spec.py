from __future__ import annotations

from pathlib import Path

import pytest

from flower_geo.data import CORPORA, data_spec
from flower_geo.data.spec import DataSpec, parse_spec
from flower_geo.errors import DataError


def test_four_sites_get_a_corpus_each() -> None:
    assert [data_spec("builtin", {}, p, 4) for p in range(4)] == [f"corpus:{n}" for n in CORPORA]


def test_more_sites_share_and_every_shard_is_given_once() -> None:
    for sites in range(1, 14):
        specs = [parse_spec(data_spec("builtin", {}, p, sites)) for p in range(sites)]
        for name in {spec.source for spec in specs}:
            mine = [spec for spec in specs if spec.source == name]
            assert [spec.shard for spec in mine] == list(range(len(mine)))
            assert {spec.n_shards for spec in mine} == {len(mine)}
    assert data_spec("builtin", {}, 5, 6) == "corpus:austen[1/2]"
    assert data_spec("builtin", {}, 3, 6) == "corpus:bible"


def test_the_node_s_own_data_wins() -> None:
    assert data_spec("builtin", {"data": " /srv/notes "}, None, None) == "/srv/notes"
    assert data_spec("corpus:bible", {"data": "builtin"}, 1, 4) == "corpus:austen"
    assert data_spec("corpus:bible", {"site": "north"}, None, None) == "corpus:bible"


def test_a_star_is_the_site_s_own_shard() -> None:
    assert data_spec("corpus:sotu[*]", {}, 2, 3) == "corpus:sotu[2/3]"
    assert data_spec("texts[*]", {}, 0, 1) == "texts[0/1]"


@pytest.mark.parametrize(
    ("config", "node", "partition", "total", "says"),
    [
        ("builtin", {}, None, None, "set partition-id and num-partitions in the node-config"),
        ("texts[*]", {}, 1, None, "set partition-id and num-partitions"),
        ("builtin", {}, 4, 4, "outside 0..3"),
        ("builtin", {"data": ""}, 0, 4, "in the node-config names no text"),
        ("  ", {}, 0, 4, "in the run-config names no text"),
        ("builtin", {"data": 7}, 0, 4, "data=7 in the node-config"),
    ],
)
def test_what_cannot_be_decided(
    config: str, node: dict[str, object], partition: int | None, total: int | None, says: str
) -> None:
    with pytest.raises(DataError) as caught:
        data_spec(config, node, partition, total)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("corpus:sotu", DataSpec("corpus", "sotu")),
        ("corpus:sotu[1/3]", DataSpec("corpus", "sotu", 1, 3)),
        ("/srv/notes[0/2]", DataSpec("path", "/srv/notes", 0, 2)),
        ("notes.jsonl", DataSpec("path", "notes.jsonl")),
        ("hf:imdb:train", DataSpec("hf", "imdb")),
        ("hf:imdb:plain:test", DataSpec("hf", "imdb", config="plain", split="test")),
        ("hf:imdb::train:body", DataSpec("hf", "imdb", split="train", field="body")),
        (
            "hf:json:/d/*.jsonl:train[:10%]:body[1/4]",
            DataSpec("hf", "json", 1, 4, "/d/*.jsonl", "train[:10%]", "body"),
        ),
    ],
)
def test_specs_that_are_read(text: str, spec: DataSpec) -> None:
    assert parse_spec(text) == spec


def test_names_say_the_shard() -> None:
    assert parse_spec("corpus:sotu[1/3]").name == "sotu[1/3]"
    assert parse_spec("/srv/notes").name == "notes"


def test_a_file_with_brackets_in_its_name_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes[1").mkdir()
    (tmp_path / "notes[1" / "2]").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_spec("notes[1/2]") == DataSpec("path", "notes[1/2]")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("builtin", "name a corpus such as corpus:sotu"),
        ("corpus:sotu[*]", "depends on the site's partition"),
        ("corpus:sotus", "did you mean corpus:sotu?"),
        ("corpus:Shakespear[0/2]", "did you mean corpus:shakespeare?"),
        ("corpus:", "The shipped ones are sotu, austen, shakespeare, bible"),
        ("corpus:zzz", "unknown corpus 'zzz'"),
        ("corpus:sotu[2/2]", "shards count from 0"),
        ("corpus:sotu[0/0]", "shards count from 0"),
        ("corpus:sotu[-1/2]", "malformed shard"),
        ("corpus:sotu[a/b]", "malformed shard"),
        ("[0/2]", "no source"),
        ("hf:imdb", "is malformed"),
        ("hf::train", "is malformed"),
        ("hf:a:b:c:d:e", "is malformed"),
        ("hf:imdb:", "empty split or field"),
        ("hf:imdb::train:", "empty split or field"),
        ("hf:json:train", "names no files: write hf:json:FILES:train"),
    ],
)
def test_specs_that_are_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_spec(text)
    assert says in str(caught.value) and "\n" not in str(caught.value)
