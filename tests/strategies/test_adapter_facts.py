"""An adapter's card says what was trained, by how many, how it was sent, and how private."""

from __future__ import annotations

from pathlib import Path

from flower_geo.config import FedAvgLoRAConfig
from flower_geo.models.identity import IDENTITY
from flower_geo.strategies import FedAvgLoRA
from flower_geo.strategies.tally import Tally
from tests.strategies.runs import Killed, dying, events
from tests.strategies.test_fedavg_lora import configured, federation, run


def card_of(config: FedAvgLoRAConfig) -> str:
    return (Path(config.run_dir) / config.run_name / "model" / "README.md").read_text()


def test_the_card_says_what_was_done(tmp_path: Path) -> None:
    config = configured(
        tmp_path, aggregation="avg", rslora=True, **{"codec-up": "int8(block=64)", "prox-mu": 0.1}
    )
    run(config, federation(tmp_path, 2))
    lines = card_of(config).splitlines()
    rounds = events(config, "round")
    tokens = int(sum(event["tokens"] for event in rounds))
    for line in (
        "- Rounds: 3 of 3", "- Sites: 2", "- Updates folded in: 6",
        f"- Tokens trained on: {tokens:,}", "- Rank: 4", "- Rslora: yes", "- Prox mu: 0.1",
        "- Codec up: int8(block=64)", "- Codec down: fp32",
        "- Rule: avg: means of A and of B (FedIT), not the mean of the updates",
    ):  # fmt: skip
        assert line in lines
    assert any(line.startswith("- Privacy: none; updates are sent without noise") for line in lines)
    hashes = FedAvgLoRA(config).model._hashes
    assert set(hashes) == set(IDENTITY)
    assert all(f": {digest}" in card_of(config) for digest in hashes.values())
    assert "site-" not in card_of(config) and str(tmp_path) not in card_of(config)


def test_a_resumed_run_counts_all_of_its_rounds(tmp_path: Path) -> None:
    cards = []
    for kind in ("whole", "killed"):
        config = configured(tmp_path / kind)
        if kind == "killed":
            try:
                run(config, federation(tmp_path / kind, 2, dying(5)))
            except Killed:
                assert "- Rounds: 2 of 3" in card_of(config)
        run(config, federation(tmp_path / kind, 2))
        cards.append(card_of(config))
    assert cards[0] == cards[1] and "- Rounds: 3 of 3" in cards[0]


def test_a_checkpoint_of_before_begins_at_nought() -> None:
    assert Tally(None).facts() == {
        "sites": 0, "updates folded in": 0, "tokens trained on": 0, "examples trained on": 0,
    }  # fmt: skip
    some = Tally({"sites": ["b", "a"], "replies": 3, "tokens": 7.0, "examples": 2.0})
    assert Tally(some.state()).facts() == some.facts() and some.facts()["sites"] == 2
