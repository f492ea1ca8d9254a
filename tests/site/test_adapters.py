"""A site that tunes an adapter: its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flower_geo.data.instructions import prepare_instructions
from flower_geo.site.work import greet_request, train_request
from tests.site.adapter_requests import AdapterDesk, write_pairs


def test_data_is_read_once_while_its_file_stays(
    lora: AdapterDesk, harbour: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def counting(spec: str, *values: Any, **named: Any) -> Any:
        made.append(spec)
        return prepare_instructions(spec, *values, **named)

    monkeypatch.setattr("flower_geo.site.tasks.adapters.prepare_instructions", counting)
    before = greet_request(lora.request(0), harbour).metrics["train-examples"]
    assert train_request(lora.request(1), harbour).status == "done"
    assert len(made) == 1
    write_pairs(Path(harbour["data"]), count=90)
    assert greet_request(lora.request(0), harbour).metrics["train-examples"] > before
    assert len(made) == 2
    # What decides the tokens decides it too.
    greet_request(AdapterDesk(packing=True).request(0), harbour)
    greet_request(AdapterDesk(**{"seq-len": 40}).request(0), harbour)
    assert len(made) == 4
