"""DiLoCo in one process: what a bad, lost, late or doubled reply costs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from flwr.app import Array, Context, Message, RecordDict
from transformers import AutoModelForCausalLM, AutoTokenizer

from flower_geo.compression import codec, content_hash, pack, record_blobs, unpack
from flower_geo.data import load_tokenizer
from flower_geo.errors import NotEnoughSites
from flower_geo.messages import Reply
from flower_geo.models import snapshot
from flower_geo.resilience import Journal
from tests.federation import MemoryGrid
from tests.strategies.runs import configured, equal, events, federation, run

# -- duplicates, losses, bad replies -------------------------------------------


def test_duplicated_and_reordered_replies_change_nothing(tmp_path: Path) -> None:
    plain = run(configured(tmp_path / "a"), federation(tmp_path / "a", 3))

    def twice(site: str, message: Message, reply: Message) -> list[Message]:
        return [reply, reply]

    grid = federation(tmp_path / "b", 3, twice)
    grid.nodes = dict(reversed(grid.nodes.items()))
    assert equal(run(configured(tmp_path / "b"), grid), plain)


def test_asked_twice_a_site_answers_from_its_cache(tmp_path: Path) -> None:
    config = configured(tmp_path)
    grid = federation(tmp_path, 1)
    answers: list[Message] = []

    def ask_again(site: str, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train":
            node = grid.nodes[message.metadata.dst_node_id]
            context = Context(1, node.node_id, dict(node.config), RecordDict(), {})
            answers.extend([reply, node.app(message, context)])
        return [reply]

    grid.tamper = ask_again
    run(config, grid)
    for first, second in zip(answers[::2], answers[1::2], strict=True):
        one, two = Reply.from_records(first.content), Reply.from_records(second.content)
        assert one.metrics == two.metrics
        assert one.arrays is not None and two.arrays is not None
        assert record_blobs(one.arrays) == record_blobs(two.arrays)


def test_a_lost_reply_rolls_back_and_its_data_is_used_again(tmp_path: Path) -> None:
    def lose_second(site: str, message: Message, reply: Message) -> list[Message]:
        lost = message.metadata.message_type == "train" and message.metadata.group_id == "2"
        return [] if lost and site == "site-1" else [reply]

    config = configured(tmp_path)
    grid = federation(tmp_path, 2, lose_second)
    run(config, grid)
    lines = events(config, "site")
    assert [(e["round"], e["site"]) for e in lines if e["status"] == "missing"] == [(2, "site-1")]
    checkpoint = json.loads(
        (Path(config.run_dir) / "diloco/checkpoints/round-000003/state.json").read_text()
    )
    consumed = {s["name"]: s["consumed"] for s in checkpoint["state"]["sites"]}
    per_round = config.inner_steps * config.batch_size
    assert consumed == {"site-0": 3 * per_round, "site-1": 2 * per_round}


@pytest.mark.parametrize("fault", ["nan", "shape", "missing", "round", "site", "huge", "garbage"])
def test_a_bad_reply_costs_that_reply_only(tmp_path: Path, fault: str) -> None:
    def spoil(site: str, message: Message, reply: Message) -> list[Message]:
        if site != "site-1" or message.metadata.message_type != "train":
            return [reply]
        arrays = reply.content.array_records["arrays"]
        first = next(iter(arrays))
        if fault == "nan":
            arrays[first] = Array(torch.full(arrays[first].shape, float("nan")).numpy())
        elif fault == "shape":
            arrays[first] = pack({"x": torch.zeros(3)}, codec("fp32"))["x"]
        elif fault == "missing":
            del arrays[first]
        elif fault == "round":
            reply.content.config_records["geo"]["round"] = 77
        elif fault == "site":
            reply.content.config_records["geo"]["site"] = "site-0"
        elif fault == "huge":
            reply.content.metric_records["metrics"]["tokens"] = 1e30
        else:
            array = arrays[first]
            array.data = array.data[: len(array.data) // 2]
        return [reply]

    config = configured(tmp_path)
    run(config, federation(tmp_path, 3, spoil))
    lines = events(config, "site")
    refused = {(e["site"], e["status"]) for e in lines if e["status"] != "accepted"}
    assert refused == {("site-1", "refused")}
    assert all(e["reason"] for e in lines if e["status"] == "refused")
    assert [e["accepted"] for e in events(config, "round")] == [2, 2, 2]


def test_an_update_far_larger_than_usual_is_refused(tmp_path: Path) -> None:
    def enlarge(site: str, message: Message, reply: Message) -> list[Message]:
        train = message.metadata.message_type == "train"
        if train and site == "site-1" and message.metadata.group_id == "3":
            state = {k: t * 1000 for k, t in unpack(reply.content.array_records["arrays"]).items()}
            reply.content["arrays"] = pack(state, codec("int8(block=256)"))
        return [reply]

    config = configured(tmp_path)
    run(config, federation(tmp_path, 3, enlarge))
    refused = [e for e in events(config, "site") if e["status"] == "refused"]
    assert [(e["round"], e["site"]) for e in refused] == [(3, "site-1")]
    assert "times the usual" in refused[0]["reason"]


def test_too_few_good_replies_end_the_run_and_keep_what_was_committed(tmp_path: Path) -> None:
    def fall_silent(site: str, message: Message, reply: Message) -> list[Message]:
        train = message.metadata.message_type == "train"
        return [] if train and message.metadata.group_id == "2" and site == "site-1" else [reply]

    config = configured(tmp_path, **{"min-sites": 2, "max-retries": 1})
    with pytest.raises(NotEnoughSites, match=r"round 2.*in 2 tries"):
        run(config, federation(tmp_path, 2, fall_silent))
    assert events(config, "end")[-1]["status"] == "failed"
    grid = federation(tmp_path, 2)
    run(config, grid)
    assert [e["round"] for e in events(config, "round")] == [1, 2, 3]
    # site-0's reply of round 2 was on disk: it is not asked again.
    assert ("site-0", "train", "2") not in grid.served


def test_no_site_at_all(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughSites, match="start flower-supernode"):
        run(configured(tmp_path), MemoryGrid([]))


def test_bad_input_at_a_site_ends_a_run_that_has_not_begun(tmp_path: Path) -> None:
    grid = federation(tmp_path, 2)
    next(iter(grid.nodes.values())).config["data"] = str(tmp_path / "nothing-here")
    with pytest.raises(NotEnoughSites, match="nothing-here"):
        run(configured(tmp_path), grid)


def test_without_strict_start_it_costs_that_site(tmp_path: Path) -> None:
    grid = federation(tmp_path, 2)
    next(iter(grid.nodes.values())).config["data"] = str(tmp_path / "nothing-here")
    config = configured(tmp_path, **{"strict-start": False})
    run(config, grid)
    assert {e["site"] for e in events(config, "site")} == {"site-1"}


def test_another_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("builtin")
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path / "other")
    grid = federation(tmp_path, 2)
    next(iter(grid.nodes.values())).config["tokenizer"] = str(tmp_path / "other")
    with pytest.raises(NotEnoughSites, match=r"site-0 .*tokenizer"):
        run(configured(tmp_path), grid)


def test_a_site_that_lost_its_folder_gets_a_snapshot_and_reads_on(tmp_path: Path) -> None:
    def forget(site: str, message: Message, reply: Message) -> list[Message]:
        if site == "site-1" and message.metadata.message_type == "train":
            if message.metadata.group_id == "1":
                shutil.rmtree(next((tmp_path / "state").glob("diloco-*/site-1")))
        return [reply]

    config = configured(tmp_path)
    run(config, federation(tmp_path, 2, forget))
    assert [e["accepted"] for e in events(config, "round")] == [2, 2, 2]
    state = json.loads(
        (Path(config.run_dir) / "diloco/checkpoints/round-000003/state.json").read_text()
    )
    per_round = config.inner_steps * config.batch_size
    assert {s["consumed"] for s in state["state"]["sites"]} == {3 * per_round}


def test_a_site_may_join_later(tmp_path: Path) -> None:
    grid = federation(tmp_path, 2)
    late = list(grid.nodes.values())[1]
    late.online = False

    def arrive(site: str, message: Message, reply: Message) -> list[Message]:
        late.online = True
        return [reply]

    grid.tamper = arrive
    config = configured(tmp_path, rounds=4)
    run(config, grid)
    assert [e["accepted"] for e in events(config, "round")][-1] == 2
    assert events(config, "round")[0]["accepted"] == 1


def test_round_zero_sends_no_weights(tmp_path: Path) -> None:
    config = configured(tmp_path)
    run(config, federation(tmp_path, 2))
    first, *rest = events(config, "round")
    assert first["bytes_down"] == 0
    assert all(e["bytes_down"] > 0 for e in rest)


def test_journal_names_the_exported_model(tmp_path: Path) -> None:
    config = configured(tmp_path)
    final = run(config, federation(tmp_path, 2))
    folder = Path(config.run_dir) / config.run_name
    assert Journal(folder / "journal.jsonl").entries()[-1]["hash"] == content_hash(final)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    loaded = snapshot(model)
    assert equal(loaded, final)
    assert len(AutoTokenizer.from_pretrained(folder / "model")) == 4096
    assert (folder / "report.html").stat().st_size > 1000


def test_per_site_steps_are_weighted_by_tokens(tmp_path: Path) -> None:
    grid = federation(tmp_path, 2)
    next(iter(grid.nodes.values())).config["inner-steps"] = 1
    config = configured(tmp_path)
    run(config, grid)
    steps = {(e["site"], e["steps"]) for e in events(config, "site")}
    assert steps == {("site-0", 1.0), ("site-1", 2.0)}
    entry = Journal(Path(config.run_dir) / "diloco/journal.jsonl").entries()[-1]
    by_site = {r["site"]: r["weight"] for r in entry["replies"]}
    assert by_site["site-1"] == 2 * by_site["site-0"]
