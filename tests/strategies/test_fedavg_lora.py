"""Federated LoRA: the real strategy over the real site code, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, Message
from torch import Tensor

from flower_geo.aggregation.adapter_parts import folds_in, is_fold, modules_in
from flower_geo.compression import unpack
from flower_geo.config import FedAvgLoRAConfig, parse
from flower_geo.errors import ConfigError, NotEnoughSites
from flower_geo.strategies import FedAvgLoRA, initial_arrays
from tests.federation import MemoryGrid, sites
from tests.strategies.runs import Killed, dying, equal, events

SMALL: dict[str, Any] = {
    "model": "llama-pico", "rounds": 3, "inner-steps": 2, "seq-len": 64, "batch-size": 2,
    "warmup-steps": 1, "eval-tokens": 64, "sample-tokens": 0, "deadline": 5.0,
    "wait-for-sites": 1.0, "eval-every": 0, "inner-lr": 5e-3, "max-retries": 0, "rank": 4,
    "alpha": 8.0, "codec-up": "fp32", "codec-down": "fp32",
}  # fmt: skip
RULES = ("avg", "ffa", "stack", "residual", "svd", "alternate")


def configured(tmp_path: Path, **values: Any) -> FedAvgLoRAConfig:
    return parse(FedAvgLoRAConfig, {**SMALL, "run-dir": str(tmp_path / "runs"), **values})


def run(config: FedAvgLoRAConfig, grid: MemoryGrid) -> dict[str, Tensor]:
    result = FedAvgLoRA(config).start(grid, initial_arrays(config))
    return unpack(result.arrays)


def federation(tmp_path: Path, count: int, tamper: Any = None, **node: Any) -> MemoryGrid:
    return MemoryGrid(sites(count, tmp_path / "state", **node), tamper)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_trains(rule: str, tmp_path: Path) -> None:
    config = configured(tmp_path, aggregation=rule)
    start = unpack(initial_arrays(config))
    end = run(config, federation(tmp_path, 2))
    assert [event["status"] for event in events(config, "end")] == ["completed"]
    assert not equal(start, {k: t for k, t in end.items() if not is_fold(k)})
    a_names = [a for a, _ in modules_in(start).values()]
    if rule == "ffa":
        assert all(torch.equal(start[name], end[name]) for name in a_names)
    assert bool(folds_in(end)) == (rule in ("stack", "residual"))
    losses = [event["loss"] for event in events(config, "eval") if event["site"] == "*"]
    assert losses[-1] < losses[0]
    errors = [event["error"] for event in events(config, "aggregation")]
    assert len(errors) == 3 and (rule == "avg" or rule == "svd" or max(errors) < 1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("codec", ["fp32", "int8(block=64)"])
def test_killed_and_resumed_is_the_undisturbed_run(rule: str, codec: str, tmp_path: Path) -> None:
    wire = {"aggregation": rule, "codec-up": codec, "codec-down": codec}
    config = configured(tmp_path / "whole", **wire)
    whole = run(config, federation(tmp_path / "whole", 2))
    config = configured(tmp_path / "killed", **wire)
    with pytest.raises(Killed):
        run(config, federation(tmp_path / "killed", 2, dying(4)))
    assert equal(run(config, federation(tmp_path / "killed", 2)), whole)


@pytest.mark.parametrize("rule", ["avg", "ffa", "stack", "residual", "svd", "alternate"])
def test_sites_of_different_ranks(rule: str, tmp_path: Path) -> None:
    config = configured(tmp_path, aggregation=rule)
    nodes = sites(3, tmp_path / "state")
    for node, rank in zip(nodes, (1, 2, 4), strict=True):
        node.config["rank"] = rank
    end = run(config, MemoryGrid(nodes))
    start = unpack(initial_arrays(config))
    for a, b in modules_in(start).values():
        assert end[a].shape == start[a].shape and end[b].shape == start[b].shape
    accepted = [e for e in events(config, "site") if e["status"] == "accepted"]
    assert len(accepted) == 9
    sizes = {e["site"]: e["bytes_up"] for e in accepted}
    assert sizes["site-0"] < sizes["site-1"] < sizes["site-2"]


def test_a_site_of_a_higher_rank_is_refused(tmp_path: Path) -> None:
    nodes = sites(1, tmp_path / "state", rank=8)
    with pytest.raises(NotEnoughSites, match="rank=8 is higher than the run's rank=4"):
        run(configured(tmp_path), MemoryGrid(nodes))


def test_one_site_of_its_own_alpha_trains_as_one_of_the_runs(tmp_path: Path) -> None:
    """The wire's scale is the coordinator's, whatever a site's own is."""
    config = configured(tmp_path / "one", aggregation="avg", rounds=1)
    run(config, federation(tmp_path / "one", 1, alpha=8.0))
    config = configured(tmp_path / "two", aggregation="avg", rounds=1)
    mine = run(config, federation(tmp_path / "two", 1, alpha=16.0))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in mine.values())


def test_another_base_is_refused_by_name(tmp_path: Path) -> None:
    grid = federation(tmp_path, 1, tokenizer=str(tmp_path / "none"))
    with pytest.raises(NotEnoughSites):
        run(configured(tmp_path), grid)


def test_personal_factors_never_leave_the_site(tmp_path: Path) -> None:
    sent: list[set[str]] = []

    def listening(site: str, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train" and reply.has_content():
            sent.append(set(reply.content["arrays"]))
        return [reply]

    config = configured(tmp_path, aggregation="avg", personal="*lora_B*")
    end = run(config, federation(tmp_path, 2, listening))
    assert sent and not any("lora_B" in name for names in sent for name in names)
    start = unpack(initial_arrays(config))
    for a, b in modules_in(start).values():
        assert torch.equal(end[b], start[b]) and not torch.equal(end[a], start[a])


def test_alternate_sends_one_side_a_round(tmp_path: Path) -> None:
    sides: dict[str, set[str]] = {}

    def listening(site: str, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train" and reply.has_content():
            names = set(reply.content["arrays"])
            sides[message.metadata.group_id] = {name.split(".")[-2] for name in names}
        return [reply]

    config = configured(tmp_path, aggregation="alternate")
    run(config, federation(tmp_path, 2, listening))
    assert sides == {"1": {"lora_B"}, "2": {"lora_A"}, "3": {"lora_B"}}


def test_a_nan_factor_costs_that_reply_only(tmp_path: Path) -> None:
    def spoiling(site: str, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train" and site == "site-1":
            arrays: Any = reply.content["arrays"]
            name = next(iter(arrays))
            arrays[name] = Array(torch.full(arrays[name].shape, float("nan")).numpy())
        return [reply]

    config = configured(tmp_path)
    run(config, federation(tmp_path, 2, spoiling))
    refused = [e for e in events(config, "site") if e["status"] == "refused"]
    assert refused and all(e["site"] == "site-1" and "NaN" in e["reason"] for e in refused)


def test_the_model_folder_is_a_peft_adapter(tmp_path: Path) -> None:
    from peft import PeftModel

    from flower_geo.models import build_model

    for rule in ("svd", "stack"):
        config = configured(tmp_path / rule, aggregation=rule, rounds=2)
        weights = run(config, federation(tmp_path / rule, 2))
        strategy = FedAvgLoRA(config)
        live = strategy.model.put(weights).eval()
        base = build_model(
            config.model, seed=0, vocab_size=len(strategy.model.tokenizer), max_seq_len=64
        )
        loaded: Any = PeftModel.from_pretrained(
            base, Path(config.run_dir) / config.run_name / "model"
        )
        ids = torch.arange(2, 40)[None]
        with torch.no_grad():
            torch.testing.assert_close(
                loaded.eval()(input_ids=ids).logits,
                live(input_ids=ids).logits,
                rtol=1e-4,
                atol=1e-4,
            )
        merged = loaded.merge_and_unload()
        assert not any("lora" in name for name, _ in merged.named_parameters())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"aggregation": "svd", "server-optimizer": "adam"}, "goes with aggregation"),
        ({"aggregation": "svd", "personal": "*lora_B*"}, "aggregation='avg'"),
        ({"aggregation": "stack", "quantise": "int4"}, "too few bits"),
        ({"rank-pattern": "q_proj=1.5"}, "whole numbers"),
        ({"alpha-pattern": "q_proj"}, "name=number"),
        ({"aggregation": "mean"}, "aggregation"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_said_at_once(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        configured(tmp_path, **values)


def test_server_optimizers_train(tmp_path: Path) -> None:
    ends = {}
    for kind in ("avg", "momentum", "adam", "yogi"):
        config = configured(
            tmp_path / kind, aggregation="avg",
            **{"server-optimizer": kind, "server-lr": 1.0 if kind in ("avg", "momentum") else 0.01},
        )  # fmt: skip
        ends[kind] = run(config, federation(tmp_path / kind, 2))
    assert not equal(ends["avg"], ends["momentum"]) and not equal(ends["adam"], ends["yogi"])
