"""Rows in the common forms, read as conversations.

    messages     {"messages": [{"role": "user", "content": ...}, ...]}
    prompt       {"prompt": ..., "completion": ...}; both texts, or both lists of messages
    alpaca       {"instruction": ..., "input": ..., "output": ...}, also with "system"
    question     {"question": ..., "answer": ...}

Texts become a user's turn and an assistant's turn.  Other fields are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flower_geo.data.sources import plain_text
from flower_geo.errors import DataError

__all__ = ["FORMS", "ROLES", "Conversation", "Dropped", "conversation"]

#: The forms, and the fields a row must have for each.
FORMS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "question": ("question", "answer"),
}

#: Roles a message may have.  Tools are left to libraries that run them.
ROLES = ("system", "developer", "user", "assistant")


class Dropped(Exception):
    """A row, or an example, that is not trained on; its text is the reason, a word or two."""


@dataclass(frozen=True)
class Conversation:
    """Turns in order; the last one is the assistant's.

    Attributes:
        turns: (role, text) pairs, texts not empty and without blanks around.
        where: the row it was read from, for error lines.
        category: name of the part of the source it belongs to, "" when there is one part.
    """

    turns: tuple[tuple[str, str], ...]
    where: str
    category: str = ""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns as chat templates take them."""
        return [{"role": role, "content": text} for role, text in self.turns]

    @property
    def asked(self) -> str:
        """What comes before the assistant's first turn: equal text, one side of the split."""
        first = next(i for i, (role, _) in enumerate(self.turns) if role == "assistant")
        return "\n".join(text for _, text in self.turns[:first])


def conversation(row: Mapping[str, Any], where: str, category: str = "") -> Conversation:
    """Read one row.

    Args:
        row: the row's fields.
        where: file and line, for error lines.
        category: kept with the conversation.

    Raises:
        DataError: the row is of no known form, or a field is of a wrong type.
        Dropped: the row is merely empty, or holds no answer.
    """
    form = _form(row, where)
    turns = _READERS[form](row, where)
    while turns and turns[-1][0] != "assistant":
        turns.pop()
    if not turns:
        raise Dropped("no answer")
    if all(role == "assistant" for role, _ in turns):
        raise Dropped("no question")
    return Conversation(tuple(turns), where, category)


def _form(row: Mapping[str, Any], where: str) -> str:
    """The first form whose fields are there; where columns are joined, one that is filled."""
    fitting = [form for form, fields in FORMS.items() if all(name in row for name in fields)]
    if not fitting:
        have = ", ".join(map(repr, list(row)[:8])) or "none"
        known = "; ".join(" + ".join(fields) for fields in FORMS.values())
        raise DataError(
            f"{where} has the fields of no known form (its fields: {have}): rename them to one "
            f"of {known}"
        )
    filled = [form for form in fitting if all(row[name] is not None for name in FORMS[form])]
    return (filled or fitting)[0]


def _from_messages(row: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    return _messages(row["messages"], "messages", where)


def _from_prompt(row: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) != isinstance(completion, list):
        if prompt is None or completion is None:
            raise Dropped("empty")
        raise DataError(
            f"{where}: 'prompt' holds {_kind(prompt)} and 'completion' {_kind(completion)}: make "
            "both text, or both lists of messages"
        )
    if isinstance(prompt, list):
        answered = _messages(completion, "completion", where)
        return _messages(prompt, "prompt", where) + answered
    return [
        ("user", _text(prompt, "prompt", where)),
        ("assistant", _text(completion, "completion", where)),
    ]


def _from_alpaca(row: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    asked = _text(row["instruction"], "instruction", where)
    given = _text(row.get("input"), "input", where, needed=False)
    system = _text(row.get("system"), "system", where, needed=False)
    turns = [("system", system)] if system else []
    turns.append(("user", f"{asked}\n\n{given}" if given else asked))
    turns.append(("assistant", _text(row["output"], "output", where)))
    return turns


def _from_question(row: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    return [
        ("user", _text(row["question"], "question", where)),
        ("assistant", _text(row["answer"], "answer", where)),
    ]


_READERS = {
    "messages": _from_messages,
    "prompt": _from_prompt,
    "alpaca": _from_alpaca,
    "question": _from_question,
}


def _messages(value: object, field: str, where: str) -> list[tuple[str, str]]:
    if value is None:
        raise Dropped("empty")
    if not isinstance(value, list):
        raise DataError(
            f"{where}: field {field!r} holds {_kind(value)}, not messages: write "
            '[{"role": "user", "content": "..."}, ...]'
        )
    turns = []
    for number, message in enumerate(value):
        place = f"{field}[{number}]"
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise DataError(
                f"{where}: {place} is no message: write "
                '{"role": "user", "content": "..."} with both fields'
            )
        role = message["role"]
        if role not in ROLES:
            raise DataError(
                f"{where}: {place} has the role {role!r:.40}: write one of {', '.join(ROLES)}"
            )
        turns.append((str(role), _text(message["content"], f"{place}.content", where)))
    if not turns:
        raise Dropped("empty")
    return turns


def _text(value: object, field: str, where: str, *, needed: bool = True) -> str:
    """A field's text without blanks around it, with plain line ends."""
    if value is None:
        value = ""
    if not isinstance(value, str):
        raise DataError(
            f"{where}: field {field!r} holds {_kind(value)}, not text: make it a string"
        )
    text = plain_text(value, field, where).strip()
    if needed and not text:
        raise Dropped("empty")
    return text


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
