from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flower_geo.data import PackedCorpus, load_tokenizer, prepare


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return load_tokenizer("builtin")


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that tests of the shipped corpora share."""
    return tmp_path_factory.mktemp("shipped")


@pytest.fixture
def pack(tokenizer: Any, tmp_path: Path) -> Callable[..., PackedCorpus]:
    """`prepare` with the shipped tokenizer and a cache of this test's own."""

    def packed(spec: str | Path, seq_len: int = 16, **options: Any) -> PackedCorpus:
        options.setdefault("cache_dir", tmp_path / "cache")
        return prepare(str(spec), tokenizer, seq_len=seq_len, **options)

    return packed


def numbered(first: int, count: int) -> str:
    """Words that occur once in a whole corpus, eight a line, five lines a paragraph."""
    words = [f"w{number:06d}" for number in range(first, first + count)]
    lines = [" ".join(words[at : at + 8]) for at in range(0, count, 8)]
    return "\n\n".join("\n".join(lines[at : at + 5]) for at in range(0, len(lines), 5))


@pytest.fixture
def words() -> Callable[[int, int], str]:
    return numbered


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve files of unique words, two of them long enough to be cut into parts."""
    root = tmp_path / "texts"
    (root / "sub").mkdir(parents=True)
    rng = np.random.default_rng(7)
    first = 0
    for number in range(12):
        count = 6000 if number in (2, 9) else int(rng.integers(200, 900))
        place = root / "sub" if number % 3 == 0 else root
        (place / f"{number:02d}.txt").write_text(numbered(first, count), encoding="utf-8")
        first += count
    return root
