"""Lives of the coordinator and of the sites: what an earlier one left is used when it fits."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from flower_geo.compression import content_hash
from flower_geo.config import DiLoCoConfig
from flower_geo.errors import NotEnoughSites, StateError
from flower_geo.observe import metrics as metrics_log
from flower_geo.resilience import Journal, Spool, checkpoint, spool
from flower_geo.site import work
from flower_geo.site.state import SiteState
from flower_geo.strategies import session
from tests.federation import Node
from tests.resilience.scripted import Clock
from tests.strategies.lines import on_clock, slow_federation
from tests.strategies.runs import Killed, configured, dying, equal, events, federation, run


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """How often each site really trained each round."""
    counts: Counter[tuple[str, int]] = Counter()
    train = work._train

    def counted(session: Any, *rest: Any) -> Any:
        counts[session.site, session.request.round] += 1
        return train(session, *rest)

    monkeypatch.setattr(work, "_train", counted)
    return counts


def folder_of(config: DiLoCoConfig) -> Path:
    return Path(config.run_dir) / config.run_name


# -- an earlier life of the server ------------------------------------------------


def test_what_was_answered_to_an_earlier_life_is_used(
    tmp_path: Path, trainings: Counter[tuple[str, int]]
) -> None:
    undisturbed = run(configured(tmp_path / "a"), federation(tmp_path / "a", 3))
    trainings.clear()
    config = configured(tmp_path / "b")
    with pytest.raises(Killed):
        run(config, federation(tmp_path / "b", 3, dying(6)))
    assert equal(run(config, federation(tmp_path / "b", 3)), undisturbed)
    assert set(trainings.values()) == {1} and len(trainings) == 9
    assert [e["incarnation"] for e in events(config, "start")] == [1, 2]


def test_what_an_earlier_life_had_on_disk_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainings: Counter[tuple[str, int]]
) -> None:
    undisturbed = run(configured(tmp_path / "a"), federation(tmp_path / "a", 3))
    trainings.clear()
    config, put, count = configured(tmp_path / "b"), Spool.put, [0]

    def killed(self: Spool, round: int, meta: Any, blobs: Any) -> Any:
        count[0] += 1
        if count[0] == 6:  # the third reply of round 2
            raise Killed
        return put(self, round, meta, blobs)

    with monkeypatch.context() as patched:
        patched.setattr(Spool, "put", killed)
        with pytest.raises(Killed):
            run(config, federation(tmp_path / "b", 3))
    grid = federation(tmp_path / "b", 3)
    assert equal(run(config, grid), undisturbed)
    asked = [site for site, kind, round in grid.served if (kind, round) == ("train", "2")]
    assert asked == ["site-2"] and set(trainings.values()) == {1}


def test_under_another_configuration_it_is_trained_anew(
    tmp_path: Path, trainings: Counter[tuple[str, int]]
) -> None:
    config = configured(tmp_path)
    with pytest.raises(Killed):
        run(config, federation(tmp_path, 2, dying(4)))
    run(configured(tmp_path, **{"inner-lr": 2e-3}), federation(tmp_path, 2))
    assert trainings["site-0", 1] == 1 and trainings["site-0", 2] == 2
    assert [e["accepted"] for e in events(config, "round")] == [2, 2, 2]


def test_an_answer_to_an_earlier_life_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    config, kept = configured(tmp_path), dict[str, Message]()

    def keep(site: str, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train":
            kept[site + message.metadata.group_id] = reply
        return [reply]

    run(config, federation(tmp_path, 2, keep))
    for round in (1, 2, 3):
        shutil.rmtree(folder_of(config) / f"checkpoints/round-00000{round}")

    def replay(site: str, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type != "train":
            return [reply]
        if (site, message.metadata.group_id) == ("site-1", "1"):
            return []  # so round 1 ends otherwise than in the earlier life
        if (site, message.metadata.group_id) == ("site-0", "2"):
            old = kept["site-02"]
            return [Message(old.content, reply_to=message)]
        return [reply]

    # The checkpoint of the initial model is gone too after three rounds, so keep it.
    config = configured(tmp_path, **{"run-name": "again", "checkpoint-keep": 9})
    run(config, federation(tmp_path, 2, keep))
    for round in (1, 2, 3):
        shutil.rmtree(folder_of(config) / f"checkpoints/round-00000{round}")
    run(config, federation(tmp_path, 2, replay))
    (refused,) = [e for e in events(config, "site") if e["status"] == "refused"]
    assert (refused["site"], refused["round"]) == ("site-0", 2)
    assert "earlier life of the coordinator" in refused["reason"]
    entries = [e for e in Journal(folder_of(config) / "journal.jsonl").entries() if e["round"] == 2]
    assert [len(e["replies"]) for e in entries] == [2, 1]


# -- two SuperNodes with one name -------------------------------------------------


def test_a_site_started_twice_is_told_so_in_its_own_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trainings: Counter[tuple[str, int]]
) -> None:
    grid = federation(tmp_path, 2)
    twin = dict(grid.nodes[101].config, **{"state-dir": str(tmp_path / "elsewhere")})
    grid.nodes[300] = Node(300, twin)
    config = configured(tmp_path)
    with caplog.at_level(logging.ERROR):
        run(config, grid)
    assert [e["accepted"] for e in events(config, "round")] == [2, 2, 2]
    assert set(trainings.values()) == {1}
    (fault,) = [e for e in events(config, "fault") if e["what"] == "started twice"]
    logged = [r.getMessage() for r in caplog.records if r.name == "flower_geo.site.handlers"]
    assert logged == [f"site site-1: {fault['detail']}"]
    assert "started twice" in (folder_of(config) / "report.html").read_text()


# -- replies that come too late, several in a row ---------------------------------


def test_dropped_replies_roll_the_site_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Residual, optimizer and place in the data: those of the last round that counted."""
    clock = Clock()
    on_clock(monkeypatch, clock)
    config = configured(
        tmp_path, rounds=12, deadline=100.0, **{"codec-up": "int4(block=64)", "min-sites": 1}
    )
    grid = slow_federation(tmp_path, 2, clock, lambda *_: (1e9, 1e9))
    late = range(2, 8)
    for round in late:
        grid.extra["site-1", round] = 75.0  # after the deadline, within the next round
    run(config, grid)
    lines = [e for e in events(config, "site") if e["site"] == "site-1"]
    counted = [e["round"] for e in lines if e["status"] == "accepted"]
    asked = [int(round) for site, kind, round in grid.served if (site, kind) == ("site-1", "train")]
    lost = [round for round in asked if round in late]
    assert len(lost) >= 3 and counted == [round for round in asked if round not in late]
    assert all("dropped: " in e["reason"] for e in lines if e["status"] == "late")
    folder = next((tmp_path / "state").glob("diloco-*/site-1"))
    name, uid = folder.parent.name.rsplit("-", 1)
    state, per_round = SiteState(tmp_path / "state", name, uid, "site-1"), 4
    last = state.load(counted[-1])
    assert last is not None and last.parent == counted[-2]
    assert last.consumed == per_round * len(counted)
    saved = json.loads((folder_of(config) / "checkpoints/round-000012/state.json").read_text())
    (record,) = [s for s in saved["state"]["sites"] if s["name"] == "site-1"]
    assert (record["accepted"], record["consumed"]) == (counted[-1], last.consumed)
    assert record["answered"] == len(counted)
    assert record["late"] + record["missed"] == len(lost)


# -- disks and ends ---------------------------------------------------------------


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["checkpoint", "spool", "metrics"])
def test_a_full_disk_ends_the_run_in_one_line_and_room_lets_it_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    undisturbed = run(configured(tmp_path / "a"), federation(tmp_path / "a", 2))
    config = configured(tmp_path / "b")
    module: Any = {"checkpoint": checkpoint, "spool": spool, "metrics": metrics_log}[where]
    with monkeypatch.context() as patched:

        def fill(site: str, message: Message, reply: Message) -> list[Message]:
            if (message.metadata.message_type, message.metadata.group_id) == ("train", "2"):
                if where == "metrics":
                    patched.setattr(module.MetricsLog, "_write", full)
                else:
                    patched.setattr(module, "write_tensors", full)
            return [reply]

        with pytest.raises(StateError, match="No space left on device") as caught:
            run(config, federation(tmp_path / "b", 2, fill))
    assert "\n" not in str(caught.value)
    if where != "metrics":  # the log itself could not take it
        (end,) = events(config, "end")
        assert end["status"] == "failed" and "No space left" in end["reason"]
        assert "No space left" in (folder_of(config) / "report.html").read_text()
    saved = sorted(p.name for p in (folder_of(config) / "checkpoints").iterdir())
    assert saved[-1] in ("round-000001", "round-000002") and not saved[0].startswith(".")
    assert equal(run(config, federation(tmp_path / "b", 2)), undisturbed)
    assert events(config, "end")[-1]["status"] == "completed"


@pytest.mark.parametrize(("codec_down", "hashes"), [("fp32", 0), ("int8(block=256)", 3)])
def test_a_commit_hashes_what_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec_down: str, hashes: int
) -> None:
    count, hash_of = [0], content_hash

    def counted(state: Any) -> str:
        count[0] += 1
        return hash_of(state)

    monkeypatch.setattr(session, "content_hash", counted)
    config = configured(tmp_path, **{"codec-down": codec_down})
    final = run(config, federation(tmp_path, 2))
    assert count[0] == hashes
    entry = Journal(folder_of(config) / "journal.jsonl").entries()[-1]
    assert entry["hash"] == hash_of(final)


def test_the_end_says_why_and_the_report_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(site: str, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train" and message.metadata.group_id == "2":
            reply.content.config_records["geo"]["round"] = 77
        return [reply]

    config = configured(tmp_path, **{"max-retries": 3, "deadline": 0.2})
    waited: list[int] = []
    monkeypatch.setattr(session.RunSession, "back_off", lambda self, n: waited.append(n))
    with pytest.raises(NotEnoughSites, match=r"in 4 tries \(in quarantine: site-0, site-1\)"):
        run(config, federation(tmp_path, 2, spoil))
    assert waited == [1, 2, 3]
    (end,) = events(config, "end")
    assert end["status"] == "failed" and "round 2" in end["reason"] and "4 tries" in end["reason"]
    page = (folder_of(config) / "report.html").read_text()
    assert "4 tries" in page and "it answers round 77" in page and "quarantined" in page
