from __future__ import annotations

import pytest

from flower_geo.launch.tables import markdown_table, print_table


def test_markdown_keeps_bars_within_their_cell() -> None:
    made = markdown_table(("a", "b"), [("x|y", "1"), ("z", "2")])
    assert made == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |\n| z | 2 |\n"


def test_in_a_pipe_columns_stand_below_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("title", ("name", "n"), [("long name", "1"), ("[x]", "200")])
    assert capsys.readouterr().out.splitlines() == [
        "title", "name         n", "long name    1", "[x]        200",
    ]  # fmt: skip
