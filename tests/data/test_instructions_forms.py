from __future__ import annotations

from typing import Any

import pytest

from flower_geo.data.instructions.forms import Dropped, conversation
from flower_geo.errors import DataError


def turns(row: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return conversation(row, "f.jsonl, line 3").turns


ASKED = (("user", "Why?"), ("assistant", "Because."))
CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": " Because.\n"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"messages": [*CHAT, {"role": "user", "content": "And?"}]},
        {"prompt": "Why?", "completion": "Because."},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"instruction": "Why?", "input": "", "output": "Because."},
        {"instruction": "Why?", "output": "Because.", "category": 7},
        {"question": " Why?", "answer": "Because.\r\n", "id": None},
        # columns of several forms joined, as a table of mixed rows has them
        {"messages": None, "question": "Why?", "answer": "Because."},
    ],
)
def test_every_form_gives_the_same_turns(row: dict[str, Any]) -> None:
    assert turns(row) == ASKED


def test_alpaca_joins_the_input_and_keeps_the_system() -> None:
    row = {"system": "Be brief.", "instruction": "Sum up", "input": "A text.", "output": "A."}
    assert turns(row) == (
        ("system", "Be brief."),
        ("user", "Sum up\n\nA text."),
        ("assistant", "A."),
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "", "answer": "x"}, "empty"),
        ({"question": "x", "answer": " \n"}, "empty"),
        ({"question": "x", "answer": None}, "empty"),
        ({"prompt": None, "completion": [CHAT[1]]}, "empty"),
        ({"instruction": "", "input": "x", "output": "y"}, "empty"),
        ({"messages": []}, "empty"),
        ({"messages": None}, "empty"),
        ({"messages": CHAT[:1]}, "no answer"),
        ({"messages": CHAT[1:]}, "no question"),
    ],
)
def test_what_is_merely_empty_is_dropped_by_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Dropped, match=f"^{reason}$"):
        turns(row)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x"}, "no known form (its fields: 'text')"),
        ({}, "(its fields: none)"),
        ({"question": "x"}, "question + answer"),
        ({"question": "x", "answer": 4}, "field 'answer' holds int, not text"),
        ({"question": ["x"], "answer": "y"}, "field 'question' holds list"),
        ({"instruction": "x", "input": 1, "output": "y"}, "field 'input' holds int"),
        ({"prompt": "x", "completion": CHAT[1:]}, "make both text, or both lists"),
        ({"messages": "x"}, "field 'messages' holds str, not messages"),
        ({"messages": [{"role": "user"}]}, "messages[0] is no message"),
        ({"messages": [CHAT[0], "x"]}, "messages[1] is no message"),
        ({"messages": [{"role": "gpt", "content": "x"}]}, "the role 'gpt'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "the role ['user']"),
        ({"messages": [{"role": "user", "content": 3}]}, "'messages[0].content' holds int"),
        ({"question": "\ud800", "answer": "y"}, "half of a surrogate pair at letter 0"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_its_place(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as caught:
        turns(row)
    message = str(caught.value)
    assert message.startswith("f.jsonl, line 3") and said in message and "\n" not in message


def test_asked_is_all_before_the_first_answer() -> None:
    row = {"messages": [{"role": "system", "content": "s"}, *CHAT, *CHAT]}
    assert conversation(row, "f").asked == "s\nWhy?"
