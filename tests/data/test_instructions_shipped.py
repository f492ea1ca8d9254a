from __future__ import annotations

import hashlib
import importlib.util
import json
import lzma
import re
import sys
from importlib import resources
from pathlib import Path
from types import ModuleType

import pytest

from flower_geo.data.instructions import CATEGORIES

FOLDER = resources.files("flower_geo.data.instructions") / "shipped"
TOOL = Path(__file__).resolve().parents[2] / "tools" / "build_instructions.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    pytest.importorskip("yaml")
    spec = importlib.util.spec_from_file_location("build_instructions", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def shipped() -> tuple[bytes, bytes]:
    packed = (FOLDER / "instructions.jsonl.xz").read_bytes()
    return packed, lzma.decompress(packed)


def test_the_pairs_are_what_their_sources_say() -> None:
    packed, text = shipped()
    said = (FOLDER / "SOURCES.md").read_text("utf-8")
    sums = re.findall(r"`([0-9a-f]{64})`", said)
    assert sums == [hashlib.sha256(packed).hexdigest(), hashlib.sha256(text).hexdigest()]
    assert {name: int(n) for name, n in re.findall(r"\| (\w+) \| (\d+) \|", said)} == CATEGORIES
    assert len(packed) < 300_000


def test_the_licence_travels_with_the_pairs() -> None:
    licence = (FOLDER / "LICENSE-chatterbot-corpus.md").read_text("utf-8")
    for phrase in ("Copyright (c) 2017, Gunther Cox", "Redistributions in binary form", '"AS IS"'):
        assert phrase in licence


def test_the_pairs_are_clean_and_each_is_there_once() -> None:
    rows = [json.loads(line) for line in shipped()[1].decode("utf-8").splitlines()]
    pairs = [(row["category"], row["question"], row["answer"]) for row in rows]
    assert len(set(pairs)) == len(pairs) == sum(CATEGORIES.values())
    assert [row["category"] for row in rows] == sorted(row["category"] for row in rows)
    for _, question, answer in pairs:
        assert question == question.strip() != "" and answer == answer.strip() != ""
        assert not re.search(r"[\r\ufeff\u00a0]", question + answer)
        assert len(question) > 1


def test_how_entries_become_pairs(tool: ModuleType) -> None:
    def pairs(category: str, *entries: list[str]) -> list[tuple[str, str]]:
        return list(tool.pairs(category, list(entries)))

    assert pairs("health", ["a?", "b ", "c?"]) == [("a?", "b"), ("b", "c?")]
    assert pairs("emotion", ["q?", "a1", "a2"]) == [("q?", "a1"), ("q?", "a2")]
    assert pairs("ai", ["q?", "a1"], ["q?", "a1"], ["q?", ""]) == [("q?", "a1")]
    assert pairs("trivia", list("a bare string")) == []


def test_packing_again_gives_the_same_bytes(tool: ModuleType) -> None:
    text = shipped()[1]
    assert tool.compress(text) == tool.compress(text)
    assert lzma.decompress(tool.compress(text)) == text
