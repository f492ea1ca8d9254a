from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flower_geo.data import load_tokenizer
from flower_geo.data.instructions import (
    CATEGORIES,
    IGNORED,
    InstructionCorpus,
    chat_template_of,
    prepare_instructions,
    rows,
)
from flower_geo.data.instructions import prepare as module
from flower_geo.errors import DataError

Prepare = Callable[..., InstructionCorpus]


@pytest.fixture
def prepared(tokenizer: Any, tmp_path: Path) -> Prepare:
    def call(spec: str | Path, seq_len: int = 64, **options: Any) -> InstructionCorpus:
        options.setdefault("cache_dir", tmp_path / "cache")
        options.setdefault("tokenizer", tokenizer)
        return prepare_instructions(str(spec), seq_len=seq_len, **options)

    return call


def pairs(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}."}
        for n in range(first, first + count)
    ]


def write(path: Path, table: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in table), "utf-8")
    return path


def texts(tokenizer: Any, examples: Any) -> list[str]:
    return [tokenizer.decode(example.input_ids) for example in examples]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "pairs.jsonl", pairs(80))


def test_pairs_become_examples(prepared: Prepare, file: Path, tokenizer: Any) -> None:
    corpus = prepared(file)
    assert corpus.name == "pairs.jsonl"
    assert len(corpus.train) + len(corpus.held_out) == 80 and len(corpus.held_out) == 8
    example = corpus.train[0]
    assert tokenizer.decode(example.input_ids) == (
        "User:\nWhat is 0 and 0?\nAssistant:\nIt is 0.<|endoftext|>\n"
    )
    counted = example.labels[example.labels != IGNORED]
    assert tokenizer.decode(counted) == "It is 0.<|endoftext|>"
    report = corpus.report
    assert (report.rows, report.kept, report.train, report.held_out) == (80, 80, 72, 8)
    assert report.dropped == {} and report.truncated == 0
    lengths = sorted(corpus.train.lengths + corpus.held_out.lengths)
    assert report.lengths == {"p50": lengths[39], "p90": lengths[71], "max": lengths[79]}
    assert report.tokens == sum(lengths)
    assert report.trained_tokens == corpus.train.trained_tokens + corpus.held_out.trained_tokens
    assert json.loads(json.dumps(report.as_dict())) == report.as_dict()


def test_all_tokens_are_trained_on_when_asked(prepared: Prepare, file: Path) -> None:
    one = prepared(file, completion_only=False)
    assert (one.train[0].labels[1:] == one.train[0].input_ids[1:]).all()
    assert one.train[0].labels[0] == IGNORED
    assert one.fingerprint != prepared(file).fingerprint


def test_held_out_answers_can_be_asked_for(
    prepared: Prepare, file: Path, tokenizer: Any, tmp_path: Path
) -> None:
    corpus = prepared(file)
    assert len(corpus.held_out_answers) == len(corpus.held_out)
    for answer, example in zip(corpus.held_out_answers, corpus.held_out, strict=True):
        size = answer.prompt_ids.numel()
        assert torch.equal(example.input_ids[:size], answer.prompt_ids)
        counted = example.labels[example.labels != IGNORED]
        assert tokenizer.decode(counted) == answer.answer + "<|endoftext|>"
    long = [{"question": f"q{n}", "answer": "word " * 40 + str(n)} for n in range(9)]
    several = [{"question": f"p{n}", "answer": f"a\nb{n}"} for n in range(9)]
    assert prepared(write(tmp_path / "l.jsonl", long + several)).held_out_answers == []


def test_long_rows_lose_their_end_and_long_questions_are_dropped(
    prepared: Prepare, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = pairs(40)
    table += [{"question": f"Say {n}", "answer": "word " * 90} for n in range(3)]
    table += [{"question": f"{n} " + "word " * 90, "answer": "x"} for n in range(2)]
    table += [{"question": "", "answer": "x"}, {"question": "x", "answer": None}]
    table += [{"messages": [{"role": "user", "content": "x"}]}]
    table += [{"question": "a <|endoftext|> b", "answer": "x"}]
    with caplog.at_level(logging.WARNING):
        corpus = prepared(write(tmp_path / "a.jsonl", table))
    report = corpus.report
    assert (report.rows, report.kept, report.truncated) == (49, 43, 3)
    assert report.dropped == {
        "control token in the text": 1,
        "empty": 2,
        "no answer": 1,
        "no room for an answer": 2,
    }
    assert report.lengths["max"] > 90
    every = [*corpus.train, *corpus.held_out]
    assert max(example.input_ids.numel() for example in every) == 64
    assert all((example.labels != IGNORED).any() for example in every)
    (line,) = [r.getMessage() for r in caplog.records]
    assert "3 truncated" in line and "2 dropped (empty)" in line


def test_a_template_that_marks_nothing_leaves_nothing(prepared: Prepare, file: Path) -> None:
    made = load_tokenizer("builtin")
    made.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    )
    with pytest.raises(DataError, match=r"80 dropped \(the chat template marks no answer\)"):
        prepared(file, tokenizer=made)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "x"}, "line 81 has the fields of no known form"),
        ({"question": "x", "answer": 3}, "line 81: field 'answer' holds int"),
    ],
)
def test_a_bad_row_is_one_line_with_its_place(
    prepared: Prepare, tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    path = write(tmp_path / "bad.jsonl", [*pairs(80), row])
    with pytest.raises(DataError) as caught:
        prepared(path)
    message = str(caught.value)
    assert str(path) in message and said in message and "\n" not in message
    assert not list((tmp_path / "cache").glob("*"))


def test_too_little_is_one_line(prepared: Prepare, tmp_path: Path) -> None:
    for table in ([], pairs(1), [{"question": "", "answer": ""}], pairs(1) * 5):
        path = write(tmp_path / "few.jsonl", table)
        with pytest.raises(DataError) as caught:
            prepared(path)
        assert "\n" not in str(caught.value) and "few.jsonl" in str(caught.value)
    with pytest.raises(DataError, match="fewer shards"):
        prepared(f"{write(tmp_path / 'few.jsonl', pairs(3))}[2/3]")
    with pytest.raises(DataError, match="seq-len 1 is too short"):
        prepared(path, seq_len=1)
    with pytest.raises(DataError, match="held-out share"):
        prepared(path, held_out=1.1)


def test_all_may_be_held_out_to_be_asked(prepared: Prepare, file: Path, tmp_path: Path) -> None:
    some, every = prepared(file), prepared(file, held_out=1.0)
    assert len(every.held_out) == len(some.held_out) + len(some.train) and not len(every.train)
    assert len(every.held_out_answers) > len(some.held_out_answers)
    assert every.fingerprint != some.fingerprint
    # Also of questions that are all the same, and cut into shards.
    same = write(tmp_path / "same.jsonl", pairs(1) * 6)
    assert len(prepared(same, held_out=1.0).held_out) == 6
    assert len(prepared(f"{same}[1/3]", held_out=1.0).held_out) == 2


def test_what_is_held_out_follows_content_and_not_order(
    prepared: Prepare, tokenizer: Any, tmp_path: Path
) -> None:
    table = pairs(200)
    one = prepared(write(tmp_path / "a.jsonl", table))
    other = prepared(write(tmp_path / "b.jsonl", table[::-1]))
    assert sorted(texts(tokenizer, one.held_out)) == sorted(texts(tokenizer, other.held_out))
    more = prepared(tmp_path / "a.jsonl", held_out=0.3)
    assert set(texts(tokenizer, one.held_out)) < set(texts(tokenizer, more.held_out))
    assert len(more.held_out) == 60
    reseeded = prepared(tmp_path / "a.jsonl", seed=1)
    assert set(texts(tokenizer, one.held_out)) != set(texts(tokenizer, reseeded.held_out))


def asked(tokenizer: Any, examples: Any) -> set[str]:
    return {text.split("\nAssistant:")[0].casefold() for text in texts(tokenizer, examples)}


def test_a_question_stands_on_one_side_only(
    prepared: Prepare, tokenizer: Any, tmp_path: Path
) -> None:
    table = [
        {"question": word.join(("How  is ", f" {n}?")), "answer": f"{word} {k}"}
        for n in range(40)
        for k, word in enumerate(("it", "IT", "It"))
    ]
    corpus = prepared(write(tmp_path / "a.jsonl", table))
    assert 6 <= len(corpus.held_out) <= 24
    assert not asked(tokenizer, corpus.train) & asked(tokenizer, corpus.held_out)


def test_one_question_with_many_answers_is_split_by_answer(
    prepared: Prepare, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = [{"question": "Tell me a joke", "answer": f"joke {n // 2}"} for n in range(100)]
    with caplog.at_level(logging.INFO):
        corpus = prepared(write(tmp_path / "a.jsonl", table))
    assert len(corpus.held_out) == 10
    assert not set(texts(tokenizer, corpus.train)) & set(texts(tokenizer, corpus.held_out))
    assert any("few questions" in record.getMessage() for record in caplog.records)


def test_shards_part_the_whole(prepared: Prepare, tokenizer: Any, file: Path) -> None:
    shards = [prepared(f"{file}[{n}/3]") for n in range(3)]
    for part in ("train", "held_out"):
        found = [texts(tokenizer, getattr(shard, part)) for shard in shards]
        joined = [text for some in found for text in some]
        assert len(set(joined)) == len(joined) and min(map(len, found)) > 0
    assert len({shard.fingerprint for shard in shards}) == 3
    assert sum(len(s.train) + len(s.held_out) for s in shards) == 80
    assert [s.name for s in shards] == [f"pairs.jsonl[{n}/3]" for n in range(3)]
    for shard in shards:
        assert len(shard.held_out_answers) == len(shard.held_out)


def test_no_site_trains_on_what_a_category_holds_out(
    prepared: Prepare, tokenizer: Any, shipped: Path
) -> None:
    every = prepared("builtin:instructions", cache_dir=shipped)
    held = set(texts(tokenizer, every.held_out))
    assert every.report.rows == sum(CATEGORIES.values())
    found: list[str] = []
    for name in ("ai", "humor", "greetings", "health", "gossip"):
        part = prepared(f"builtin:instructions:{name}", cache_dir=shipped)
        assert part.report.rows == CATEGORIES[name]
        assert not set(texts(tokenizer, part.train)) & held
        assert set(texts(tokenizer, part.held_out)) <= held
        assert len(part.held_out) <= max(2, 0.2 * CATEGORIES[name])
        found += texts(tokenizer, part.train)
    assert set(found) <= set(texts(tokenizer, every.train))


def test_packing_changes_the_rows_and_not_the_labels(prepared: Prepare, file: Path) -> None:
    plain, packed = prepared(file), prepared(file, packing=True)
    assert len(packed.train) < 0.6 * len(plain.train)
    assert packed.train.trained_tokens == plain.train.trained_tokens
    assert packed.held_out.lengths == plain.held_out.lengths
    assert packed.fingerprint != plain.fingerprint
    counted = [e.labels[e.labels != IGNORED].sum().item() for e in packed.train]
    assert sum(counted) == sum(e.labels[e.labels != IGNORED].sum().item() for e in plain.train)
    assert max(packed.train.lengths) <= 64


def entries(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache").iterdir()}


def test_tokens_are_cached_once_and_privately(
    prepared: Prepare, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepared(file)
    (entry,) = (tmp_path / "cache").iterdir()
    assert {path.name for path in entry.iterdir()} == {"tokens.safetensors", "meta.json"}
    for path in (entry.parent, entry, *entry.iterdir()):
        assert path.stat().st_mode & 0o077 == 0
    moved = file.rename(tmp_path / "moved.jsonl")

    def never(*_: Any) -> Any:
        raise AssertionError("a good entry was built anew")

    monkeypatch.setattr(module, "_Builder", never)
    again = prepared(moved)
    assert again.fingerprint == first.fingerprint and again.report == first.report
    assert [e.input_ids.tolist() for e in again.train] == [
        e.input_ids.tolist() for e in first.train
    ]
    assert [a.answer for a in again.held_out_answers] == [a.answer for a in first.held_out_answers]


@pytest.mark.parametrize(
    "change",
    [
        {"seq_len": 65},
        {"completion_only": False},
        {"held_out": 0.2},
        {"seed": 1},
        {"template": True},
        {"special": True},
        {"vocabulary": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_decides_the_tokens_decides_the_key(
    prepared: Prepare, file: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    first = prepared(file)
    made = load_tokenizer("builtin")
    if change.pop("template", False):
        made.chat_template = chat_template_of(made).replace("Assistant", "Model")
    same_tokens = change.pop("special", False)
    if same_tokens:
        # a template may write it, although no text is tokenised otherwise
        made.bos_token = "zq"
    if change.pop("vocabulary", False):
        made.add_tokens(["What is"])
    other = prepared(file, **{"tokenizer": made, **change})
    assert len(entries(tmp_path)) == 2
    assert (other.fingerprint == first.fingerprint) == same_tokens


def test_a_changed_file_is_prepared_anew(prepared: Prepare, file: Path, tmp_path: Path) -> None:
    first = prepared(file)
    write(file, pairs(81))
    assert prepared(file).fingerprint != first.fingerprint
    assert len(entries(tmp_path)) == 2


def test_a_file_that_changes_while_it_is_read_is_said(
    prepared: Prepare, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = rows._Files.rows

    def changing(self: Any) -> Any:
        yield from reads(self)
        write(file, pairs(90))

    monkeypatch.setattr(rows._Files, "rows", changing)
    with pytest.raises(DataError, match="changed while it was read"):
        prepared(file)


def cut_short(path: Path) -> None:
    with path.open("r+b") as handle:
        handle.truncate(path.stat().st_size - 9)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["tokens.safetensors", "meta.json"])
@pytest.mark.parametrize("fault", [cut_short, flip, Path.unlink], ids=["cut", "bit", "gone"])
def test_a_damaged_entry_is_built_anew(
    prepared: Prepare,
    file: Path,
    tmp_path: Path,
    name: str,
    fault: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = prepared(file)
    (entry,) = (tmp_path / "cache").iterdir()
    fault(entry / name)
    again = prepared(file)
    assert again.fingerprint == first.fingerprint and len(again.train) == 72
    assert any("building it anew" in record.getMessage() for record in caplog.records)
    caplog.clear()
    prepared(file)
    assert not caplog.records and entries(tmp_path) == {entry.name}


def test_a_folder_that_cannot_be_written_is_one_line(prepared: Prepare, file: Path) -> None:
    with pytest.raises(DataError, match="cannot write the data cache"):
        prepared(file, cache_dir=file)


def test_those_that_prepare_at_once_agree(file: Path, tmp_path: Path) -> None:
    # Between processes the same renames decide: tests/data/test_cache.py.
    ready = threading.Barrier(3)
    found: list[str] = []

    def one() -> None:
        made = load_tokenizer("builtin")
        ready.wait(60)
        corpus = prepare_instructions(str(file), made, seq_len=64, cache_dir=tmp_path / "cache")
        found.append(corpus.fingerprint)

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3 and len(set(found)) == 1
    assert len(entries(tmp_path)) == 1
