from __future__ import annotations

import json

from flower_geo.models import model_card


def test_a_card_has_header_list_sections_and_tables() -> None:
    card = model_card(
        {
            "title": "Support adapter",
            "base_model": "org/base",
            "license": "apache-2.0",
            "sites": 4,
            "tokens": 1234567,
            "merged": True,
            "loss": 2.345678,
            "rules": ["svd", "mean"],
            "privacy": {"epsilon": 8.0, "secure_aggregation": False},
            "evaluation": [{"site": "a", "base": 3.0}, {"site": "b", "after": 2.5}],
        }
    )
    head, _, body = card.removeprefix("---\n").partition("\n---\n")
    header = {k: json.loads(v) for k, v in (line.split(": ", 1) for line in head.splitlines())}
    assert header["base_model"] == "org/base"
    assert header["license"] == "apache-2.0"
    assert header["library_name"] == "peft"
    assert "lora" in header["tags"]
    lines = body.splitlines()
    assert "# Support adapter" in lines
    assert "- Sites: 4" in lines
    assert "- Tokens: 1,234,567" in lines
    assert "- Merged: yes" in lines
    assert "- Loss: 2.346" in lines
    assert "- Rules: svd, mean" in lines
    assert lines[lines.index("## Privacy") + 2 :][:2] == [
        "- Epsilon: 8",
        "- Secure aggregation: no",
    ]
    table = lines[lines.index("## Evaluation") + 2 :]
    assert table == [
        "| Site | Base | After |",
        "| --- | --- | --- |",
        "| a | 3 |  |",
        "| b |  | 2.5 |",
    ]


def test_what_others_write_starts_no_markup() -> None:
    hostile = 'a|b\n# Title\n---\n<script>x</script> [l](http://x) `c` "quoted"'
    card = model_card({"title": hostile, "base_model": hostile, "sites": [{"site": hostile}]})
    lines = card.splitlines()
    assert [line for line in lines if line.startswith("#")] == [lines[6], "## Sites"]
    assert lines.count("---") == 2
    assert all("<script>" not in line for line in lines[6:])
    row = lines[-1]
    assert row.replace("\\|", "").count("|") == 2
    assert "[l](" not in row
    assert json.loads(lines[1].removeprefix("base_model: ")) == hostile


def test_an_empty_card_is_a_card() -> None:
    assert "# LoRA adapter" in model_card({})
    assert "library_name" in model_card({}, library="transformers")
