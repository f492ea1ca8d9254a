"""Base against local-only against federated, on the sites' data and the coordinator's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from flower_geo.errors import DataError
from flower_geo.resilience import Measured
from flower_geo.strategies.comparison import card_rows, compared
from tests.site.adapter_requests import write_pairs
from tests.strategies.runs import Killed, dying, equal, events
from tests.strategies.test_fedavg_lora import configured, federation, run


def measured(site: str, tokens: float, **metrics: float) -> Measured:
    named = {name.replace("_", "-"): value for name, value in metrics.items()}
    return Measured(site, named["loss-before"], tokens, {"eval-tokens": tokens, **named})


def rows_by_site(event: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["site"]: row for row in event["rows"]}


# -- the table ------------------------------------------------------------------


def test_rows_and_their_means_by_tokens() -> None:
    one = measured(
        "a", 30.0, loss_base=4.0, loss_local=3.0, loss_before=2.0, accuracy_before=0.5,
        exact_match_before=0.5, exact_asked_before=2.0,
    )  # fmt: skip
    two = measured(
        "b", 10.0, loss_base=8.0, loss_local=7.0, loss_before=6.0, accuracy_before=0.1,
        exact_match_before=1.0, exact_asked_before=6.0,
    )  # fmt: skip
    a, b, whole = compared([one, two])
    assert a == {
        "site": "a", "tokens": 30.0, "base": {"loss": 4.0}, "local": {"loss": 3.0},
        "federated": {"loss": 2.0, "accuracy": 0.5, "exact_match": 0.5},
    }  # fmt: skip
    assert b["site"] == "b" and whole["site"] == "*" and whole["tokens"] == 40.0
    assert whole["base"]["loss"] == 5.0 and whole["local"]["loss"] == 4.0
    assert whole["federated"]["loss"] == 3.0
    assert whole["federated"]["accuracy"] == pytest.approx(0.4)
    assert whole["federated"]["exact_match"] == pytest.approx(7 / 8)


def test_a_mean_is_of_what_every_site_has() -> None:
    one = measured("a", 3.0, loss_base=4.0, loss_local=3.0, loss_before=2.0)
    two = measured("b", 3.0, loss_base=4.0, loss_before=2.0)
    *_, whole = compared([one, two])
    assert set(whole) == {"site", "tokens", "base", "federated"}


def test_without_a_base_there_is_no_table() -> None:
    assert compared([measured("a", 3.0, loss_before=2.0)]) == []
    assert compared([]) == []
    assert card_rows({}, {}) == {}


# -- runs -----------------------------------------------------------------------


def test_a_federation_of_one_is_the_site_alone(tmp_path: Path) -> None:
    for rule in ("avg", "ffa", "alternate"):
        config = configured(tmp_path / rule, aggregation=rule, **{"local-baseline": True})
        run(config, federation(tmp_path / rule, 1))
        (event,) = events(config, "comparison")
        row = rows_by_site(event)["site-0"]
        assert row["local"] == row["federated"] and row["federated"]["loss"] < row["base"]["loss"]


def test_each_site_gets_its_row_and_the_federation_is_not_moved(tmp_path: Path) -> None:
    ends = []
    for wanted in (False, True):
        config = configured(
            tmp_path / str(wanted), **{"local-baseline": wanted, "exact-match": 2, "eval-every": 1}
        )
        ends.append(run(config, federation(tmp_path / str(wanted), 2)))
        (event,) = events(config, "comparison")
        rows = rows_by_site(event)
        assert set(rows) == {"site-0", "site-1", "*"} and event["round"] == 3
        assert not event["server"]
        for row in rows.values():
            assert ("local" in row) == wanted
            for column in ("base", "federated"):
                assert set(row[column]) == {"loss", "accuracy", "exact_match"}
        final = [e for e in events(config, "eval") if e["round"] == 3]
        assert {e["site"]: e["loss"] for e in final} == {
            site: pytest.approx(row["federated"]["loss"]) for site, row in rows.items()
        }
        assert all("accuracy" in e for e in final if e["site"] != "*")
        first = {e["site"]: e["loss"] for e in events(config, "eval") if e["round"] == 0}
        assert first == {s: pytest.approx(row["base"]["loss"]) for s, row in rows.items()}
    assert equal(*ends)


@pytest.mark.parametrize("rule", ["svd", "stack"])
def test_killed_and_resumed_the_table_is_the_same(rule: str, tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "server.jsonl")
    found = []
    for kind in ("whole", "killed"):
        config = configured(
            tmp_path / kind, aggregation=rule, **{"local-baseline": True},
            **{"server-data": str(pairs), "codec-up": "int8(block=64)"},
        )  # fmt: skip
        if kind == "killed":
            with pytest.raises(Killed):
                run(config, federation(tmp_path / kind, 2, dying(4)))
        run(config, federation(tmp_path / kind, 2))
        (event,) = events(config, "comparison")
        card = (Path(config.run_dir) / config.run_name / "model" / "README.md").read_text()
        found.append((event["rows"], event["server"], card))
    assert found[0] == found[1]


def test_the_coordinator_evaluates_on_its_own_set(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "server.jsonl", count=20)
    config = configured(
        tmp_path, data=f"{write_pairs(tmp_path / 'pairs.jsonl')}[*]",
        **{"server-data": str(pairs), "eval-every": 1, "exact-match": 4},
    )  # fmt: skip
    run(config, federation(tmp_path, 2))
    asked = {event["round"]: event for event in events(config, "server")}
    assert sorted(asked) == [0, 1, 2, 3]
    losses = [asked[round]["loss"] for round in sorted(asked)]
    assert losses == sorted(losses, reverse=True) and math.isfinite(sum(losses))
    (event,) = events(config, "comparison")
    assert event["server"]["base"]["loss"] == losses[0]
    assert event["server"]["federated"]["loss"] == losses[-1]
    assert set(event["server"]["federated"]) == {"loss", "accuracy", "exact_match"}


def test_after_folds_the_servers_base_is_the_untouched_one(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "server.jsonl", count=20)
    config = configured(
        tmp_path, aggregation="stack", data=f"{pairs}[*]", **{"server-data": str(pairs)}
    )
    run(config, federation(tmp_path, 2))
    (first,) = [e for e in events(config, "server") if e["round"] == 0]
    (event,) = events(config, "comparison")
    assert event["server"]["base"]["loss"] == first["loss"] > event["server"]["federated"]["loss"]


def test_all_of_a_file_is_asked_and_of_the_shipped_what_sites_hold_out(tmp_path: Path) -> None:
    from flower_geo.strategies.adapter import AdapterModel

    pairs = write_pairs(tmp_path / "server.jsonl", count=20)
    of_file = AdapterModel(configured(tmp_path, **{"server-data": str(pairs)})).server_set
    assert of_file is not None and len(of_file.data.held_out) == 20
    assert len(of_file.data.train) == 0
    shipped = AdapterModel(configured(tmp_path, **{"server-data": "builtin"})).server_set
    assert shipped is not None and 50 < len(shipped.data.held_out) < len(shipped.data.train)


def test_a_server_set_that_cannot_be_read_ends_the_run_at_once(tmp_path: Path) -> None:
    config = configured(tmp_path, **{"server-data": str(tmp_path / "none.jsonl")})
    grid = federation(tmp_path, 1)
    with pytest.raises(DataError, match=r"^server-data: no file or folder") as caught:
        run(config, grid)
    assert "\n" not in str(caught.value) and not grid.served


def test_the_table_stands_in_the_report_and_the_card(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "server.jsonl", count=20)
    config = configured(tmp_path, **{"local-baseline": True, "server-data": str(pairs)})
    run(config, federation(tmp_path, 2))
    folder = Path(config.run_dir) / config.run_name
    page = (folder / "report.html").read_text()
    assert "Did joining pay?" in page and "server set" in page and "local-only" in page
    card = (folder / "model" / "README.md").read_text()
    assert "## Evaluation" in card and "one site alone" in card and "server set" in card
    # No site by name in what is published.
    assert "site-0" not in card
