"""One desk and two texts for all tests of the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.site.adapter_requests import AdapterDesk, write_pairs
from tests.site.requests import Desk, write_texts


@pytest.fixture(scope="session")
def desk() -> Desk:
    return Desk()


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture
def north(tmp_path: Path, texts: list[Path]) -> dict[str, Any]:
    """Node-config of a site."""
    return {"site": "north", "data": str(texts[0]), "state-dir": str(tmp_path / "state")}


@pytest.fixture
def south(tmp_path: Path, texts: list[Path]) -> dict[str, Any]:
    """Node-config of another site on the same host."""
    return {"site": "south", "data": str(texts[1]), "state-dir": str(tmp_path / "state")}


@pytest.fixture
def newer(desk: Desk) -> dict[str, torch.Tensor]:
    return {name: tensor + 0.125 for name, tensor in desk.initial.items()}


@pytest.fixture(scope="session")
def lora() -> AdapterDesk:
    return AdapterDesk()


@pytest.fixture
def harbour(tmp_path: Path) -> dict[str, Any]:
    """Node-config of a site with pairs of its own."""
    return {
        "site": "harbour", "data": str(write_pairs(tmp_path / "pairs.jsonl")),
        "state-dir": str(tmp_path / "state"), "cache-dir": str(tmp_path / "cache"),
    }  # fmt: skip
