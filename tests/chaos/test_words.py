"""The page of faults: words for all the driver can do, the same as README's, and the figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults_page import chaos_page, faults_section
from benchmarks.write_docs import with_sections
from tests.chaos.__main__ import summary
from tests.chaos.driver import Played, Strike
from tests.chaos.faults import pairs
from tests.chaos.words import NAMES, WORDS

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")

#: README's cases that are no fault of the driver's: somebody's choice or mistake.
NO_FAULT = (
    "a reply comes late", "a site is slow", "a site fails or keeps silent twice in a row",
    "a site is started twice", "the cloud's half of a split model dies",
    "the same round fails again and again",
    "the same request comes twice", "the input is wrong",
)  # fmt: skip


def _cases() -> dict[str, str]:
    """README's cases and what it says of each, on one line."""
    section = README.partition("## What happens when ...")[2].partition("\n## ")[0]
    found = {}
    for item in re.split(r"^- ", section, flags=re.MULTILINE)[1:]:
        _, title, text = item.split("**", 2)
        found[" ".join(title.split()).rstrip(":")] = " ".join(text.split())
    return found


def test_every_fault_has_its_words_and_no_other() -> None:
    assert sorted(WORDS) == sorted(pairs())
    assert {target for target, _ in WORDS} == set(NAMES)


@pytest.mark.parametrize("pair", [pair for pair, words in WORDS.items() if words.case])
def test_readme_says_the_same(pair: tuple[str, str]) -> None:
    words = WORDS[pair]
    said = [text for title, text in _cases().items() if title.startswith(words.case)]
    assert len(said) == 1, words.case
    assert words.phrase and words.phrase in words.happens
    assert words.phrase in said[0]


def test_the_page_knows_every_case_of_readme() -> None:
    known = {*NO_FAULT, *(words.case for words in WORDS.values() if words.case)}
    assert [title for title in _cases() if not title.startswith(tuple(known))] == []


def _record(**figures: Any) -> dict[str, Any]:
    strikes = [
        Strike("worker", "kill -9", hit=True, seconds=3.0),
        Strike("worker", "kill -9", hit=True, seconds=9.04),
        Strike("worker", "kill -9", hit=True, seconds=5.0),
        Strike("worker", "stopped 5 s", hit=False),
        Strike("disk", "full", hit=True, seconds=20.0, by_hand=2),
    ]
    runs = [Played(seed, False).json() for seed in (1, 2, 1001)]
    return {
        "machine": "2 cores", "python": "3.11",
        "figures": {
            "matrix": summary(strikes), "runs": runs, "faults": 4, "kills": 3, "lost": 0,
            "replayed": 9, "retrained": 25, "problems": [], **figures,
        },
    }  # fmt: skip


def test_the_page_holds_what_was_measured() -> None:
    cost = {"title": "Cost", "text": "A table.", "machine": "m", "python": "3.12"}
    text = with_sections(chaos_page(_record()), faults_section(cost))
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    cells = [row[-4:] for row in rows if row[0] == "| kill -9"]
    assert cells[0] == ["3", "0", "5.0", "9.0 |"]  # of the worker, which comes first
    assert next(row[-4:] for row in rows if row[0] == "| stopped 5 s") == ["0", "-", "-", "- |"]
    assert "4 faults, 3 of them kill -9, in 3 runs" in text and "seeds 1-2, 1001," in text
    assert "2 times `flower-geo run` ended with its reason" in text
    assert "## Cost\n\nA table.\n" in text
    assert sum(line.startswith("| ") for line in text.splitlines()) == len(WORDS) + len(NAMES)


def test_broken_promises_are_no_figures() -> None:
    with pytest.raises(ValueError, match="2 problems, the first: a thing"):
        chaos_page(_record(problems=["a thing", "another"]))


def test_a_section_takes_the_place_of_its_older_self() -> None:
    page = "# Page\n\nWords.\n\n## A\n\nold\n\n### Part\n\nof a\n\n## B\n\nb\n"
    assert with_sections(page, {}) == page
    assert with_sections(page, {"A": "new\n", "C": "c"}) == (
        "# Page\n\nWords.\n\n## A\n\nnew\n\n## B\n\nb\n\n## C\n\nc\n"
    )
    assert with_sections("# Page\n", {"C": "c"}) == "# Page\n\n## C\n\nc\n"
