from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flower_geo.data import CORPORA, PackedCorpus, Split, prepare
from flower_geo.data.split import write_splits
from flower_geo.errors import DataError

Pack = Callable[..., PackedCorpus]

#: A word of `numbered` is at most eight tokens, so this many hold one whole word.
WIDE = 16


def numbers(tokenizer: Any, split: Split) -> list[str]:
    """The unique words whole in a split; a cut may leave a shorter rest at its ends."""
    return re.findall(r"w\d{6}", tokenizer.decode(split.tokens.tolist()))


def windows(split: Split, width: int) -> set[bytes]:
    raw, size = split.tokens.tobytes(), split.tokens.itemsize
    return {raw[at : at + width * size] for at in range(0, len(raw) - width * size + 1, size)}


def test_train_and_held_out_share_no_word_and_lose_none(
    pack: Pack, folder: Path, tokenizer: Any
) -> None:
    corpus = pack(folder)
    train, held = (numbers(tokenizer, split) for split in (corpus.train, corpus.held_out))
    assert not set(train) & set(held)
    assert len(train) + len(held) == len(set(train) | set(held))
    everything = re.findall(r"w\d{6}", "".join(p.read_text() for p in folder.rglob("*.txt")))
    assert sorted(train + held) == sorted(everything)
    assert not windows(corpus.train, WIDE) & windows(corpus.held_out, WIDE)
    share = corpus.held_out.n_tokens / (corpus.train.n_tokens + corpus.held_out.n_tokens)
    assert 0.045 <= share < 0.11


@pytest.mark.parametrize("n", [2, 3, 7])
def test_shards_partition_both_sides(pack: Pack, folder: Path, tokenizer: Any, n: int) -> None:
    shards = [pack(f"{folder}[{i}/{n}]", seq_len=32) for i in range(n)]
    for side in ("train", "held_out"):
        splits = [getattr(shard, side) for shard in shards]
        sizes = [split.n_tokens for split in splits]
        assert max(sizes) - min(sizes) <= 1 and min(len(split) for split in splits) >= 1
        words = [word for split in splits for word in numbers(tokenizer, split)]
        assert len(words) == len(set(words))
    seen = set().union(*(windows(shard.train, WIDE) for shard in shards))
    assert not any(seen & windows(shard.held_out, WIDE) for shard in shards)
    assert len({shard.fingerprint for shard in shards}) == n
    joined = np.concatenate([shard.train.tokens for shard in shards])
    whole = pack(f"{folder}[0/1]", seq_len=32)
    assert np.array_equal(joined, whole.train.tokens)


@pytest.mark.parametrize("name", CORPORA)
def test_shipped_corpora_are_packed(pack: Pack, name: str, shipped: Path) -> None:
    corpus = pack(f"corpus:{name}", seq_len=128, cache_dir=shipped)
    assert corpus.name == name
    assert corpus.train.tokens.dtype == np.dtype("<u2")
    assert len(corpus.train) > 1900 and len(corpus.held_out) > 100
    assert int(corpus.train.tokens.max()) < 4096
    # Verses and formulas recur in these texts; a window of 128 tokens does not.
    assert not windows(corpus.train, 128) & windows(corpus.held_out, 128)


def test_documents_end_with_an_end_and_so_do_seams(
    pack: Pack, tmp_path: Path, words: Any, tokenizer: Any
) -> None:
    (tmp_path / "one.txt").write_text(words(0, 40_000), "utf-8")
    corpus = pack(tmp_path / "one.txt")
    for split in (corpus.train, corpus.held_out):
        assert split.tokens[-1] == tokenizer.eos_token_id
        pieces = tokenizer.decode(split.tokens.tolist()).split("<|endoftext|>")[:-1]
        for piece in pieces:
            found = [int(number) for number in re.findall(r"w(\d{6})", piece)]
            assert found == list(range(found[0], found[-1] + 1)), "unlike text run together"


def test_special_tokens_in_text_are_text(pack: Pack, tmp_path: Path, tokenizer: Any) -> None:
    rows = [json.dumps({"text": f"row {n} says <|endoftext|> here"}) for n in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows), "utf-8")
    corpus = pack(tmp_path / "a.jsonl")
    ends = sum(int((s.tokens == 0).sum()) for s in (corpus.train, corpus.held_out))
    assert ends == 300


def test_copies_of_a_document_fall_on_one_side(pack: Pack, tmp_path: Path, tokenizer: Any) -> None:
    rows = [json.dumps({"text": f"w{n % 100:06d} " * 20}) for n in range(400)]
    (tmp_path / "many.jsonl").write_text("\n".join(rows), "utf-8")
    corpus = pack(tmp_path / "many.jsonl")
    sides = [set(numbers(tokenizer, split)) for split in (corpus.train, corpus.held_out)]
    assert all(sides) and not sides[0] & sides[1]


def test_a_small_text_does_not_hold_out_a_copy(pack: Pack, tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "few").mkdir()
    for n in range(6):
        (tmp_path / "few" / f"{n}.txt").write_text(f"w{n % 5:06d} " * 60, "utf-8")
    corpus = pack(tmp_path / "few")
    # The cut goes through the last document that is no copy of an earlier one.
    assert set(numbers(tokenizer, corpus.held_out)) == {"w000004"}
    assert numbers(tokenizer, corpus.train).count("w000000") == 60


def test_a_small_text_gives_up_its_tail(
    pack: Pack, tmp_path: Path, words: Any, tokenizer: Any
) -> None:
    (tmp_path / "a.txt").write_text(words(0, 300), "utf-8")
    corpus = pack(tmp_path / "a.txt")
    train, held = (numbers(tokenizer, split) for split in (corpus.train, corpus.held_out))
    assert train and held and max(train) < min(held)
    assert len(corpus.held_out) >= 1


def test_the_least_usable_text_and_the_one_below(
    pack: Pack, tmp_path: Path, tokenizer: Any
) -> None:
    (tmp_path / "a.txt").write_text("a b c d e f g", "utf-8")
    tokens = len(tokenizer.encode("a b c d e f g")) + 1
    corpus = pack(tmp_path / "a.txt", seq_len=tokens // 2)
    assert len(corpus.train) == len(corpus.held_out) == 1
    with pytest.raises(DataError) as caught:
        pack(tmp_path / "a.txt", seq_len=tokens // 2 + 1)
    message = str(caught.value)
    assert (
        f"is too short: {tokens} tokens, and seq-len {tokens // 2 + 1} needs {tokens + 2}"
        in message
    )
    with pytest.raises(DataError, match=r"in each of 3 shards"):
        pack(f"{tmp_path / 'a.txt'}[0/3]", seq_len=tokens // 2)


@pytest.mark.parametrize("content", ["", "\n \n\t\n", "<|endoftext|>\n"])
def test_an_empty_corpus_is_refused(pack: Pack, tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content, "utf-8")
    with pytest.raises(DataError, match="holds no text"):
        pack(tmp_path / "a.txt")
    assert not list((tmp_path / "cache").iterdir()), "a failed build left files"


def test_a_dominant_repeated_row_does_not_swallow_the_text(
    pack: Pack, tmp_path: Path, words: Any
) -> None:
    rows = [words(n * 40, 40) for n in range(40)] + ["again and again " * 4] * 2000
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows), "utf-8")
    for seed in range(6):
        corpus = pack(tmp_path / "a.jsonl", seed=seed)
        assert corpus.held_out.n_tokens < corpus.train.n_tokens / 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seq_len": 1}, "seq-len 1"),
        ({"held_out": 0.0}, "held-out share"),
        ({"held_out": 1.0}, "held-out share"),
        ({"held_out": float("nan")}, "held-out share"),
    ],
)
def test_bad_options_are_refused(pack: Pack, options: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        pack("corpus:sotu", **options)


def test_seed_and_share_choose_other_text(pack: Pack, folder: Path, tokenizer: Any) -> None:
    first, other = pack(folder, held_out=0.15), pack(folder, held_out=0.15, seed=1)
    more = pack(folder, held_out=0.4)
    held = [set(numbers(tokenizer, c.held_out)) for c in (first, other, more)]
    assert held[0] != held[1]
    assert held[0] < held[2]
    assert len({c.fingerprint for c in (first, other, more)}) == 3


def test_equal_text_has_an_equal_fingerprint_anywhere(
    pack: Pack, folder: Path, tmp_path: Path
) -> None:
    first = pack(folder)
    moved = folder.rename(tmp_path / "moved")
    assert pack(moved, cache_dir=tmp_path / "other").fingerprint == first.fingerprint
    assert pack(moved, seq_len=17).fingerprint != first.fingerprint


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path, folder: Path) -> None:
    class Wide:
        eos_token_id = 70_000

        def __len__(self) -> int:
            return 70_001

        def get_vocab(self) -> dict[str, int]:
            return {"x": 69_999, "<end>": 70_000}

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [69_999] * len(text.split())

    wide: Any = Wide()
    corpus = prepare(str(folder), wide, seq_len=8, cache_dir=tmp_path / "cache")
    assert corpus.train.tokens.dtype == np.dtype("<u4")
    assert set(np.unique(corpus.train.tokens)) == {69_999, 70_000}
    assert corpus.train[0].tolist() == [69_999] * 8


def test_text_that_changes_meanwhile_is_not_cached(
    pack: Pack, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:

    def slow(*args: Any, **options: Any) -> str:
        method = write_splits(*args, **options)
        (folder / "new.txt").write_text("late", "utf-8")
        (folder / "01.txt").write_text("other", "utf-8")
        return method

    monkeypatch.setattr("flower_geo.data.packing.write_splits", slow)
    with pytest.raises(DataError, match="changed while it was read"):
        pack(folder)
    assert not list((tmp_path / "cache").iterdir())


def test_memory_does_not_grow_with_the_text(pack: Pack, tmp_path: Path, words: Any) -> None:
    def peak(count: int) -> int:
        path = tmp_path / f"{count}.txt"
        with path.open("w", encoding="utf-8") as out:
            for first in range(0, count, 10_000):
                out.write(words(first, 10_000) + "\n\n")
        tracemalloc.start()
        pack(path)
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(10_000)
    small, large = peak(60_000), peak(180_000)
    assert large < small * 1.3 + 200_000, (small, large)
