"""Runs that choose their codecs: by site, by round, and the same again after a kill."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from flower_geo.compression.adaptive import encoded_bytes, ladder
from flower_geo.config import DiLoCoConfig
from flower_geo.errors import CodecSpecError, ConfigError, NotEnoughSites
from flower_geo.observe import write_report
from flower_geo.strategies import DiLoCo, initial_arrays
from tests.resilience.scripted import Clock
from tests.strategies.lines import SlowGrid, on_clock, slow_federation
from tests.strategies.runs import Killed, configured, dying, equal, events, federation, run

LADDER = "bf16 > int8(block=256) > int4(block=64) > topk(density=0.05,chunk=4096)|int4(block=64)"
RUNGS = ladder(LADDER)
VALUES: dict[str, Any] = {
    "codec-up": "adaptive", "codec-ladder": LADDER, "comm-target": "10", "deadline": 10_000.0,
    "rounds": 4,
}  # fmt: skip
FAST = 1e9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    on_clock(monkeypatch, made)
    return made


@pytest.fixture(scope="session")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Bytes of the small model under each rung."""
    config = configured(tmp_path_factory.mktemp("sizes"))
    shapes = {name: tuple(array.shape) for name, array in initial_arrays(config).items()}
    return [encoded_bytes(spec, shapes) for spec in RUNGS]


def codecs(config: DiLoCoConfig, site: str = "site-0") -> list[int]:
    """Rungs of a site's accepted updates, by round."""
    lines = [e for e in events(config, "site") if e["site"] == site and e["status"] == "accepted"]
    return [RUNGS.index(e["codec_up"]) for e in sorted(lines, key=lambda e: e["round"])]


def downs(config: DiLoCoConfig) -> list[int]:
    return [RUNGS.index(e["codec_down"]) for e in events(config, "round")]


# -- up -------------------------------------------------------------------------


def test_a_slow_uplink_moves_a_site_down_the_ladder_and_back(
    tmp_path: Path, clock: Clock, sizes: list[int]
) -> None:
    slow = sizes[2] / 48  # int4 takes 48 seconds of 30

    def line(site: str, kind: str, round: int) -> tuple[float, float]:
        return (slow if site == "site-1" and 5 <= round < 10 else FAST, FAST)

    config = configured(tmp_path, **VALUES | {"rounds": 17, "comm-target": "60"})
    run(config, slow_federation(tmp_path, 2, clock, line))
    assert codecs(config) == [2, 1] + [0] * 15  # begins in the middle, the line is free
    other = codecs(config, "site-1")
    assert other[:5] == [2, 1, 0, 0, 0]
    assert other[5:9] == sorted(other[5:9]) and 3 in other[5:11]
    assert other[-1] == 0
    assert all(abs(a - b) <= 1 for a, b in itertools.pairwise(other))
    # what was sent is what the rungs say, and the change is told with its reason
    lines = [e for e in events(config, "site") if e["site"] == "site-1"]
    for event, rung in zip(lines, other, strict=True):
        assert event["bytes_up"] == pytest.approx(sizes[rung], rel=0.01)
    changed = [bool(e["codec_why"]) for e in lines]
    assert changed == [False] + [a != b for a, b in itertools.pairwise(other)]
    assert any("of its time" in e["codec_why"] for e in lines)
    # the speed it was driven by, in the log and in the report
    seen = [e["speed_up"] for e in lines if e["round"] == 9]
    assert seen[0] == pytest.approx(slow, rel=0.35)
    page = write_report(Path(config.run_dir) / config.run_name).read_text()
    assert "codec up" in page and "changes</small>" in page and " a second" in page


def test_speeds_given_at_a_site_place_it_before_the_first_round(
    tmp_path: Path, clock: Clock, sizes: list[int]
) -> None:
    grid = slow_federation(tmp_path, 3, clock, lambda *_: (FAST, FAST))
    by_hand = sizes[1] / 4 * 8 / 1e6
    nodes = list(grid.nodes.values())
    nodes[1].config["uplink-mbps"] = by_hand
    nodes[2].config |= {"uplink-mbps": 1e-5, "downlink-mbps": "4"}
    config = configured(tmp_path, **VALUES)
    run(config, grid)
    # what is given by hand wins over what is measured
    assert codecs(config, "site-1") == [1] * 4 and codecs(config, "site-2") == [3] * 4
    assert codecs(config, "site-0") == [2, 1, 0, 0]
    lines = [e for e in events(config, "site") if e["site"] == "site-1"]
    assert lines[0]["speed_up"] == pytest.approx(by_hand * 1e6 / 8)
    assert [e["accepted"] for e in events(config, "round")] == [3] * 4


@pytest.mark.parametrize("given", ["fast", 0, -3, "nan", True])
def test_a_speed_that_is_none_turns_the_site_away_with_a_line(
    tmp_path: Path, given: object
) -> None:
    node: dict[str, Any] = {"uplink-mbps": given}
    grid = federation(tmp_path, 1, **node)
    with pytest.raises(NotEnoughSites, match=r"uplink-mbps=.* is no speed"):
        run(configured(tmp_path, **VALUES), grid)


def test_a_connected_site_that_never_makes_it_is_asked_for_less(
    tmp_path: Path, clock: Clock, sizes: list[int]
) -> None:
    """Where nothing arrives in time, nothing is measured; that too says something."""
    slow = sizes[3] / 50

    def line(site: str, kind: str, round: int) -> tuple[float, float]:
        return (slow if site == "site-1" else FAST, FAST)

    config = configured(tmp_path, **VALUES | {"deadline": 100.0, "rounds": 5})
    run(config, slow_federation(tmp_path, 2, clock, line))
    lines = [e for e in events(config, "site") if e["site"] == "site-1"]
    missing = [e["round"] for e in lines if e["status"] == "missing"]
    assert missing and missing[0] == 1
    accepted = [e for e in lines if e["status"] == "accepted"]
    assert {RUNGS.index(e["codec_up"]) for e in accepted} == {3}
    assert any("no reply" in (e.get("codec_why") or "") for e in lines)


# -- down -----------------------------------------------------------------------


def test_broadcasts_follow_the_slowest_site_and_all_stay_equal(
    tmp_path: Path, clock: Clock, sizes: list[int]
) -> None:
    slow = sizes[2] / 54

    def line(site: str, kind: str, round: int) -> tuple[float, float]:
        return (FAST, slow if site == "site-1" and 4 <= round < 10 else FAST)

    values = VALUES | {"codec-up": "int8(block=256)", "codec-down": "adaptive", "rounds": 14}
    config = configured(tmp_path, **values | {"comm-target": "60"})
    run(config, slow_federation(tmp_path, 2, clock, line))
    seen = downs(config)
    assert seen[:3] == [1, 0, 0] and seen[-1] == 0
    assert 3 in seen[4:11]
    assert all(abs(a - b) <= 1 for a, b in itertools.pairwise(seen))
    # deltas of several codecs were applied without one snapshot: their bytes say so
    rounds = events(config, "round")
    for before, event in zip(seen, rounds[1:], strict=False):
        assert event["bytes_down"] == pytest.approx(2 * sizes[before], rel=0.01)
    whys = [e["codec_down_why"] for e in rounds]
    assert any("of its time" in why for why in whys)
    assert {e["status"] for e in events(config, "site")} == {"accepted"}


def test_both_ways_at_once_keep_to_the_target(
    tmp_path: Path, clock: Clock, sizes: list[int]
) -> None:
    up, down = sizes[1] / 4, sizes[0] / 4

    config = configured(tmp_path, **VALUES | {"codec-down": "adaptive", "rounds": 12})
    grid = slow_federation(tmp_path, 1, clock, lambda *_: (up, down))
    run(config, grid)
    lines = [e for e in events(config, "site")]
    seconds = [e["bytes_up"] / up + e["bytes_down"] / down for e in lines]
    assert max(seconds[4:]) <= 10.0
    assert seconds[-1] > 4.0  # and what is allowed is made use of


def test_a_lossless_rung_loses_no_residual(tmp_path: Path, clock: Clock) -> None:
    """fp32 sends weights; where a residual is owed, it sends it with the difference."""
    ladder_ = "fp32 > int8(block=256) > topk(density=0.05,chunk=4096)|int4(block=64)"
    values = VALUES | {"codec-ladder": ladder_, "codec-down": "adaptive", "rounds": 6}
    config = configured(tmp_path, **values)
    kinds: list[tuple[str, str]] = []

    def watch(site: str, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train":
            geo = reply.content.config_records["geo"]
            kinds.append((str(geo["codec"]), str(geo["kind"])))
        return [reply]

    run(config, slow_federation(tmp_path, 1, clock, lambda *_: (FAST, FAST), watch))
    assert kinds == [
        ("int8(block=256)", "delta"), ("fp32", "delta"), *[("fp32", "weights")] * 4,
    ]  # fmt: skip


# -- resume ---------------------------------------------------------------------


@pytest.mark.parametrize("when", [4, 7])
def test_killed_and_resumed_is_the_undisturbed_run(
    tmp_path: Path, clock: Clock, sizes: list[int], when: int
) -> None:
    down = 4.0  # megabits

    def line(site: str, kind: str, round: int) -> tuple[float, float]:
        return (sizes[2] / 8 if site == "site-1" and round >= 3 else FAST, down * 1e6 / 8)

    values = VALUES | {"codec-down": "adaptive", "rounds": 5, "min-sites": 2}
    node: dict[str, Any] = {"downlink-mbps": down}
    whole = configured(tmp_path / "a", **values)
    undisturbed = run(whole, slow_federation(tmp_path / "a", 2, clock, line, **node))

    config = configured(tmp_path / "b", **values)
    with pytest.raises(Killed):
        run(config, slow_federation(tmp_path / "b", 2, clock, line, dying(when), **node))
    clock.now = 1e5  # another life, another clock
    resumed = run(config, slow_federation(tmp_path / "b", 2, clock, line, **node))
    assert equal(resumed, undisturbed)
    for site in ("site-0", "site-1"):
        assert codecs(config, site) == codecs(whole, site)
    assert len(set(codecs(whole, "site-1"))) > 2
    assert downs(config) == downs(whole)


def test_spooled_replies_bring_their_times_along(
    tmp_path: Path, clock: Clock, sizes: list[int]
) -> None:
    """The state is the same to the last digit, though the first life measured a part of it."""

    def line(site: str, kind: str, round: int) -> tuple[float, float]:
        return (sizes[2] / (8 if site == "site-1" else 3), FAST)

    values = VALUES | {"rounds": 2, "min-sites": 2}
    whole = configured(tmp_path / "a", **values)
    undisturbed = run(whole, slow_federation(tmp_path / "a", 2, clock, line))

    def fall_silent(site: str, message: Message, reply: Message) -> list[Message]:
        train = message.metadata.message_type == "train"
        return [] if train and site == "site-1" else [reply]

    config = configured(tmp_path / "b", **values | {"deadline": 100.0})
    with pytest.raises(NotEnoughSites):
        run(config, slow_federation(tmp_path / "b", 2, clock, line, fall_silent))
    clock.now = 1e5
    grid = slow_federation(tmp_path / "b", 2, clock, line)
    assert equal(run(configured(tmp_path / "b", **values), grid), undisturbed)
    assert ("site-0", "train", "1") not in grid.served
    assert stored(config) == stored(whole)


def test_after_a_kill_the_open_round_is_done_again_under_the_same_codecs(
    tmp_path: Path, clock: Clock, sizes: list[int]
) -> None:
    """What is measured then may differ: a site that already holds the base gets no payload."""

    def line(site: str, kind: str, round: int) -> tuple[float, float]:
        return (sizes[2] / 8 if site == "site-1" and round >= 3 else FAST, 5e5)

    values = VALUES | {"codec-down": "adaptive", "rounds": 4, "min-sites": 2}
    whole = configured(tmp_path / "a", **values)
    run(whole, slow_federation(tmp_path / "a", 2, clock, line))
    config = configured(tmp_path / "b", **values)
    with pytest.raises(Killed):
        run(config, slow_federation(tmp_path / "b", 2, clock, line, dying(6)))
    run(config, slow_federation(tmp_path / "b", 2, clock, line))
    redone = 3
    for site in ("site-0", "site-1"):
        assert codecs(config, site)[:redone] == codecs(whole, site)[:redone]
    hashes = [[e["hash"] for e in events(c, "round")][:redone] for c in (whole, config)]
    assert hashes[0][: redone - 1] == hashes[1][: redone - 1]
    assert {e["status"] for e in events(config, "site")} == {"accepted"}


def stored(config: DiLoCoConfig) -> Any:
    folder = Path(config.run_dir) / config.run_name / "checkpoints"
    newest = max(folder.glob("round-*/state.json"))
    return json.loads(newest.read_text())["state"]["links"]


def test_a_run_without_adaptive_codecs_measures_nothing(tmp_path: Path) -> None:
    config = configured(tmp_path)
    run(config, federation(tmp_path, 1))
    assert stored(config) is None
    assert not any("speed_up" in e for e in events(config, "site"))


# -- what is measured -----------------------------------------------------------


def test_a_site_cannot_write_its_own_times(tmp_path: Path, clock: Clock, sizes: list[int]) -> None:
    slow = sizes[2] / 20

    def forge(site: str, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train":
            metrics = reply.content.metric_records["metrics"]
            for key, value in (("seconds", 1e-3), ("bytes-up", 1e12), ("bytes-down", 1e12)):
                metrics[f"link-{key}"] = value
        return [reply]

    config = configured(tmp_path, **VALUES | {"rounds": 2})
    run(config, slow_federation(tmp_path, 1, clock, lambda *_: (slow, FAST), forge))
    assert events(config, "site")[1]["speed_up"] == pytest.approx(slow, rel=0.05)


def test_a_site_that_lies_about_its_work_costs_nothing_but_its_codec(
    tmp_path: Path, clock: Clock
) -> None:
    class Lying(SlowGrid):
        def pull_messages(self, message_ids: Any) -> list[Message]:
            found = super().pull_messages(message_ids)
            for message in found:
                message.content.config_records["geo"]["at_work"] = 1e15
            return found

    base = slow_federation(tmp_path, 2, clock, lambda *_: (FAST, FAST))
    config = configured(tmp_path, **VALUES)
    run(config, Lying(base.nodes.values(), clock, base.line))
    assert codecs(config) == [2] * 4
    assert [e["accepted"] for e in events(config, "round")] == [2] * 4


# -- what is refused at the start -------------------------------------------------


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"codec-ladder": "bf16 > imt8(block=64)"}, CodecSpecError, r"rung 2.*did you mean 'int8'"),
        ({"codec-ladder": "int8"}, CodecSpecError, "no rung to step to"),
        ({"error-feedback": False}, ConfigError, "needs error-feedback=true"),
    ],
)
def test_a_ladder_with_a_typo_ends_before_anything_starts(
    tmp_path: Path, values: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        DiLoCo(configured(tmp_path, **VALUES | values))
    assert "\n" not in str(caught.value)


def test_a_ladder_that_is_not_used_is_not_read(tmp_path: Path) -> None:
    DiLoCo(configured(tmp_path, **{"codec-ladder": "nonsense"}))


def test_a_ladder_out_of_order_ends_before_a_site_is_asked(tmp_path: Path) -> None:
    config = configured(tmp_path, **VALUES | {"codec-ladder": "int4 > bf16"})
    grid = federation(tmp_path, 1)
    with pytest.raises(CodecSpecError, match="least compressed first"):
        run(config, grid)
    assert grid.served == [] and events(config, "end")[-1]["status"] == "failed"


@pytest.mark.parametrize("target", ["soon", "0", "-5", "100%", "0%", "nan", True, "inf"])
def test_a_target_that_is_none(tmp_path: Path, target: object) -> None:
    with pytest.raises(ConfigError, match=r"comm-target=.*seconds such as '10'"):
        configured(tmp_path, **{"comm-target": target})
