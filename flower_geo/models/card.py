"""A model card: what was trained, on what, by how many, and how it was sent."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["model_card"]

#: Facts that stand in the card's header, where model hubs read them.
_HEADER = ("base_model", "license", "language", "datasets")


def model_card(facts: Mapping[str, Any], *, library: str = "peft") -> str:
    """Write facts as a model card: Markdown with the header that model hubs read.

    A plain value becomes a line of the list at the top, a mapping a section with
    a list, a sequence of mappings a section with a table.  Values may come from
    other parties (site names): each stands on one line and starts no markup.

    Args:
        facts: by name, in the order of the card.  ``title`` is the heading;
            ``base_model``, ``license``, ``language`` and ``datasets`` go into the
            header too.
        library: the library that loads the folder.
    """
    header = {key: facts[key] for key in _HEADER if facts.get(key)}
    header |= {"library_name": library, "tags": ["federated-learning", "flower-geo", "lora"]}
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in header.items()), "---", ""]
    lines += [f"# {_text(facts.get('title', 'LoRA adapter'))}", ""]
    rest = {name: value for name, value in facts.items() if name != "title"}
    plain = {n: v for n, v in rest.items() if not isinstance(v, Mapping) and not _is_table(v)}
    lines += _list(plain)
    for name, value in rest.items():
        if name not in plain:
            rows = _table(value) if _is_table(value) else _list(value)
            lines += ["", f"## {_label(name)}", "", *rows]
    return "\n".join(lines) + "\n"


def _is_table(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and bool(value)
        and all(isinstance(row, Mapping) for row in value)
    )


def _list(facts: Mapping[str, Any]) -> list[str]:
    return [f"- {_label(name)}: {_text(value)}" for name, value in facts.items()]


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_text(row.get(name, "")) for name in columns] for row in rows]
    return [
        _row([_label(name) for name in columns]),
        _row(["---"] * len(columns)),
        *map(_row, cells),
    ]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _label(name: object) -> str:
    words = _text(name).replace("_", " ").replace("-", " ")
    return words[:1].upper() + words[1:]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_text(item) for item in value)
    line = " ".join(str(value).split())
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", line)
