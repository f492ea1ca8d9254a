from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_geo.data import parts
from flower_geo.data.parts import SEPARATOR, cut, separated


def documents(events: list[str | None]) -> list[str]:
    joined: list[str] = [""]
    for event in events:
        if event is None:
            joined.append("")
        else:
            joined[-1] += event
    assert joined[-1] == "", "the last event ends a document"
    return joined[:-1]


def chunks(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


LINES = st.lists(
    st.sampled_from([SEPARATOR, "", "a", f" {SEPARATOR}", f"{SEPARATOR}!", "word word"]),
    max_size=12,
)


@given(lines=LINES, size=st.integers(1, 40), closed=st.booleans())
def test_separator_lines_part_documents_wherever_chunks_fall(
    lines: list[str], size: int, closed: bool
) -> None:
    text = "\n".join(lines) + ("\n" if closed else "")
    want: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line == SEPARATOR:
            want.append([])
        else:
            want[-1].append(line)
    got = documents(list(separated(chunks(text, size))))
    kept = [document.strip("\n") for document in got]
    assert [d for d in kept if d] == [d for d in ("\n".join(w).strip("\n") for w in want) if d]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART", 32)


TEXT = st.text(st.sampled_from(list("ab .\n")) | st.characters(codec="utf-8"), max_size=400)


@given(texts=st.lists(TEXT, max_size=4), size=st.integers(1, 100))
def test_parts_join_to_the_documents_and_do_not_depend_on_chunks(
    texts: list[str], size: int
) -> None:
    was, parts.PART = parts.PART, 32
    try:
        whole = list(cut(event for text in texts for event in (text, None)))
        pieces = list(cut(event for text in texts for event in (*chunks(text, size), None)))
    finally:
        parts.PART = was
    assert whole == pieces
    for number, text in enumerate(texts):
        mine = [part for document, part in whole if document == number]
        assert all(part and len(part) < 64 for part in mine)
        assert "".join("".join(mine).split()) == "".join(text.split())


@pytest.mark.usefixtures("small_parts")
def test_cuts_fall_on_the_best_boundary_in_reach() -> None:
    paragraphs = "x" * 20 + "\n\n" + "y" * 60
    assert [p for _, p in cut([paragraphs, None])] == ["x" * 20 + "\n\n", "y" * 60]
    sentence = "a" * 30 + ". " + "b" * 50
    assert [p for _, p in cut([sentence, None])] == ["a" * 30 + ".", " " + "b" * 50]
    blank = "a" * 30 + " " + "b" * 50
    assert [p for _, p in cut([blank, None])] == ["a" * 30, " " + "b" * 50]
    assert [p for _, p in cut(["c" * 70, None])] == ["c" * 32, "c" * 38]


def test_blank_documents_are_left_out_and_still_counted() -> None:
    assert list(cut(["\n\nfirst  \n", None, " \n ", None, "", None, "second", None])) == [
        (0, "first"),
        (3, "second"),
    ]
