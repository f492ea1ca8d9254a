from __future__ import annotations

import functools
import hashlib
import importlib.util
import lzma
import re
import sys
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flower_geo.data import CORPORA
from flower_geo.data.parts import SEPARATOR

FOLDER = resources.files("flower_geo.data") / "corpora"
TOOLS = Path(__file__).resolve().parents[2] / "tools"


@functools.cache
def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_is_what_its_sources_say(name: str) -> None:
    packed = (FOLDER / f"{name}.txt.xz").read_bytes()
    text = lzma.decompress(packed)
    section = (
        (FOLDER / "SOURCES.md").read_text("utf-8").split(f"## {name}.txt.xz")[1].split("##")[0]
    )
    sums = re.findall(r"`([0-9a-f]{64})`", section)
    assert sums == [hashlib.sha256(packed).hexdigest(), hashlib.sha256(text).hexdigest()]
    assert "licence:" in section and "origin:" in section
    assert 900_000 < len(text) < 1_300_000


@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_is_clean(name: str) -> None:
    text = lzma.decompress((FOLDER / f"{name}.txt.xz").read_bytes()).decode("utf-8")
    assert not re.search(r"gutenberg|copyright|licen[cs]e:|\betext|https?:", text, re.IGNORECASE)
    assert not re.search(r"[\t\r\ufeff\u00a0]|[ ]\n|\n{3,}", text)
    documents = text.split(f"\n{SEPARATOR}\n")
    assert len(documents) >= 8 and SEPARATOR not in "".join(documents)
    assert all(document.strip() for document in documents)
    assert len(set(documents)) == len(documents)


def test_packing_a_corpus_again_gives_the_same_bytes() -> None:
    # Not compared with the shipped bytes: another liblzma may pack a little differently.
    text = lzma.decompress((FOLDER / "bible.txt.xz").read_bytes())[:200_000]
    packed = tool("build_corpora").compress(text)
    assert tool("build_corpora").compress(text) == packed
    assert lzma.decompress(packed) == text


def test_the_shipped_tokenizer_is_what_its_tool_builds() -> None:
    for name, content in tool("build_tokenizer").build().items():
        shipped = (resources.files("flower_geo.data") / "tokenizer" / name).read_text("utf-8")
        assert shipped == content, f"{name} drifted: run tools/build_tokenizer.py"


@pytest.mark.parametrize("name", CORPORA)
def test_the_tokenizer_never_saw_what_is_held_out(
    name: str, pack: Any, tokenizer: Any, shipped: Path
) -> None:
    corpus = pack(f"corpus:{name}", seq_len=128, cache_dir=shipped)
    seen = "\n".join(tool("build_tokenizer").training_parts(name))
    held = tokenizer.decode(corpus.held_out.tokens.tolist()).split(SEPARATOR)[:-1]
    assert held and not any(passage[:500] in seen for passage in held)
