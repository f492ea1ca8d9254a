"""DiLoCo end to end in one process: the identities, and what survives what."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, Context, Message, RecordDict
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from flower_geo.compression import codec, content_hash, pack, unpack
from flower_geo.config import DiLoCoConfig, parse
from flower_geo.data import BatchSource, Cursor, data_spec, load_tokenizer, prepare
from flower_geo.errors import NotEnoughSites, ResumeMismatch
from flower_geo.messages import Reply
from flower_geo.models import build_model, snapshot
from flower_geo.observe import read_metrics
from flower_geo.resilience import Journal
from flower_geo.site.identity import cache_folder
from flower_geo.site.state import SiteState
from flower_geo.strategies import DiLoCo, initial_arrays
from flower_geo.training import InnerConfig, InnerLoop
from tests.federation import MemoryGrid, Node, Tamper, sites

SMALL: dict[str, Any] = {
    "rounds": 3, "inner-steps": 2, "seq-len": 16, "batch-size": 2, "warmup-steps": 1,
    "eval-tokens": 64, "sample-tokens": 0, "deadline": 1.0, "wait-for-sites": 1.0,
    "eval-every": 0, "inner-lr": 1e-3, "max-retries": 0,
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "codec-up": "fp32", "codec-down": "fp32", "outer-lr": 1.0, "outer-momentum": 0.0,
}  # fmt: skip


def configured(tmp_path: Path, **values: Any) -> DiLoCoConfig:
    return parse(DiLoCoConfig, {**SMALL, "run-dir": str(tmp_path / "runs"), **values})


def federation(tmp_path: Path, count: int, tamper: Tamper | None = None, **node: Any) -> MemoryGrid:
    return MemoryGrid(sites(count, tmp_path / "state", **node), tamper)


def run(config: DiLoCoConfig, grid: MemoryGrid) -> dict[str, Tensor]:
    result = DiLoCo(config).start(grid, initial_arrays(config), num_rounds=config.rounds)
    return unpack(result.arrays)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def events(config: DiLoCoConfig, kind: str) -> list[dict[str, Any]]:
    path = Path(config.run_dir) / config.run_name / "metrics.jsonl"
    return [event for event in read_metrics(path) if event["event"] == kind]


def plain_training(config: DiLoCoConfig, steps: int) -> dict[str, Tensor]:
    """The same steps in one go, without federation."""
    tokenizer = load_tokenizer("builtin")
    model = build_model(
        config.model, seed=config.seed, vocab_size=len(tokenizer), max_seq_len=config.seq_len
    )
    corpus = prepare(
        data_spec("builtin", {}, 0, 1), tokenizer, seq_len=config.seq_len,
        cache_dir=cache_folder({}),
    )  # fmt: skip
    loop = InnerLoop(
        model,
        InnerConfig(
            lr=config.inner_lr, weight_decay=config.weight_decay, clip_norm=config.clip_norm,
            warmup_steps=config.warmup_steps, total_steps=config.total_steps,
            schedule=config.schedule, min_lr_ratio=config.min_lr_ratio,
            optimizer=config.inner_optimizer, precision="fp32",
        ),
    )  # fmt: skip
    source = BatchSource(corpus.train, config.batch_size, Cursor(len(corpus.train), config.seed))
    loop.run(source.next, steps=steps, position=0, span=steps)
    return snapshot(model)


# -- identities ---------------------------------------------------------------


def test_one_site_with_lr_one_is_plain_training_bit_equal(tmp_path: Path) -> None:
    config = configured(tmp_path, **PLAIN)
    federated = run(config, federation(tmp_path, 1))
    assert equal(federated, plain_training(config, config.total_steps))


def test_one_sgd_step_a_round_is_large_batch_sgd(tmp_path: Path) -> None:
    config = configured(
        tmp_path, **PLAIN | {"inner-steps": 1, "inner-optimizer": "sgd", "inner-lr": 0.1,
        "clip-norm": 0.0, "weight-decay": 0.0, "schedule": "constant", "warmup-steps": 0,
        "weight-by": "equal"},
    )  # fmt: skip
    federated = run(config, federation(tmp_path, 2))

    tokenizer = load_tokenizer("builtin")
    model = build_model(
        config.model, seed=config.seed, vocab_size=len(tokenizer), max_seq_len=config.seq_len
    )
    sources = []
    for partition in range(2):
        corpus = prepare(
            data_spec("builtin", {}, partition, 2), tokenizer, seq_len=config.seq_len,
            cache_dir=cache_folder({}),
        )  # fmt: skip
        sources.append(
            BatchSource(corpus.train, config.batch_size, Cursor(len(corpus.train), config.seed))
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(config.rounds):
        optimizer.zero_grad()
        for source in sources:
            batch = source.next()
            (model(input_ids=batch, labels=batch).loss / 2).backward()
        optimizer.step()
    large = snapshot(model)
    for name, tensor in federated.items():
        torch.testing.assert_close(tensor, large[name], rtol=1e-4, atol=2e-6)


def test_no_momentum_and_lr_one_is_the_weighted_mean(tmp_path: Path) -> None:
    config = configured(tmp_path, **PLAIN | {"rounds": 1})
    captured: dict[str, Reply] = {}

    def capture(site: str, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train":
            captured[site] = Reply.from_records(reply.content)
        return [reply]

    federated = run(config, federation(tmp_path, 3, capture))
    locals_ = {site: unpack(reply.arrays) for site, reply in captured.items()}
    weights = {site: reply.metrics["tokens"] for site, reply in captured.items()}
    for name, tensor in federated.items():
        mean = sum(weights[s] * locals_[s][name].double() for s in locals_) / sum(weights.values())
        torch.testing.assert_close(tensor, mean.float(), rtol=2e-7, atol=1e-9)


def test_lossy_codecs_keep_every_bit_of_what_was_given(tmp_path: Path) -> None:
    """Sum of what the server decoded + residual = sum of the site's updates."""
    config = configured(tmp_path, **{"codec-up": "topk(density=0.05,chunk=4096)|int8(block=256)"})
    grid = federation(tmp_path, 1)
    run(config, grid)
    folder = next((tmp_path / "state").glob("diloco-*/site-0"))
    name, uid = folder.parent.name.rsplit("-", 1)
    state = SiteState(tmp_path / "state", name, uid, "site-0")
    last = state.load(config.rounds)
    assert last is not None and last.residual
    assert any(float(t.abs().max()) > 0 for t in last.residual.values())


# -- resume -------------------------------------------------------------------


class Killed(Exception):
    """Stands for kill -9: nothing of the session's clean end runs."""


def dying(when: int) -> Tamper:
    """Kill the server at its ``when``-th train reply."""
    seen = {"count": 0}

    def tamper(site: str, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train":
            seen["count"] += 1
            if seen["count"] == when:
                raise Killed
        return [reply]

    return tamper


@pytest.mark.parametrize("when", [1, 2, 4, 5, 6])
@pytest.mark.parametrize("codec_up", ["fp32", "int8(block=256)"])
def test_killed_and_resumed_is_the_undisturbed_run(
    tmp_path: Path, when: int, codec_up: str
) -> None:
    values = {"codec-up": codec_up, "codec-down": codec_up, "min-sites": 2}
    undisturbed = run(configured(tmp_path / "a", **values), federation(tmp_path / "a", 2))

    config = configured(tmp_path / "b", **values)
    with pytest.raises(Killed):
        run(config, federation(tmp_path / "b", 2, dying(when)))
    resumed_grid = federation(tmp_path / "b", 2)
    resumed = run(config, resumed_grid)
    assert equal(resumed, undisturbed)
    journal = Journal(Path(config.run_dir) / config.run_name / "journal.jsonl")
    assert [e["round"] for e in journal.entries() if e["what"] == "commit"] == [1, 2, 3]


def test_sites_that_lose_memory_but_keep_their_folder_change_nothing(tmp_path: Path) -> None:
    undisturbed = run(configured(tmp_path / "a"), federation(tmp_path / "a", 2))
    config = configured(tmp_path / "b")
    with pytest.raises(Killed):
        run(config, federation(tmp_path / "b", 2, dying(5)))
    second = federation(tmp_path / "b", 2)
    second.nodes = {
        node.node_id + 1000: Node(node.node_id + 1000, node.config)
        for node in second.nodes.values()
    }
    assert equal(run(config, second), undisturbed)


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    config = configured(tmp_path)
    first = run(config, federation(tmp_path, 2))
    again = federation(tmp_path, 2)
    assert equal(run(config, again), first)
    assert [kind for _, kind, _ in again.served if kind == "train"] == []


def test_more_rounds_may_be_added_but_no_other_model(tmp_path: Path) -> None:
    config = configured(tmp_path)
    run(config, federation(tmp_path, 2))
    longer = configured(tmp_path, rounds=4)
    run(longer, federation(tmp_path, 2))
    assert [e["round"] for e in events(longer, "round")] == [1, 2, 3, 4]
    other = configured(tmp_path, model="llama-nano")
    with pytest.raises(ResumeMismatch, match="model='gpt2-nano'"):
        run(other, federation(tmp_path, 2))


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
        assert {k: a.data for k, a in one.arrays.items()} == {
            k: a.data for k, a in two.arrays.items()
        }


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
        arrays = reply.content["arrays"]
        first = next(iter(arrays))
        if fault == "nan":
            arrays[first] = Array(torch.full(arrays[first].shape, float("nan")).numpy())
        elif fault == "shape":
            arrays[first] = pack({"x": torch.zeros(3)}, codec("fp32"))["x"]
        elif fault == "missing":
            del arrays[first]
        elif fault == "round":
            reply.content["geo"]["round"] = 77
        elif fault == "site":
            reply.content["geo"]["site"] = "site-0"
        elif fault == "huge":
            reply.content["metrics"]["tokens"] = 1e30
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
            state = {k: t * 1000 for k, t in unpack(reply.content["arrays"]).items()}
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
    with pytest.raises(NotEnoughSites, match="round 2.*in 2 tries"):
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
