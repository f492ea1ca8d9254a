"""DiLoCo end to end in one process: the identities, and resuming to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from flwr.app import Message
from torch import Tensor

from flower_geo.compression import unpack
from flower_geo.config import DiLoCoConfig
from flower_geo.data import BatchSource, Cursor, data_spec, load_tokenizer, prepare
from flower_geo.errors import ResumeMismatch
from flower_geo.messages import Reply
from flower_geo.models import build_model, snapshot
from flower_geo.resilience import Journal
from flower_geo.site.identity import cache_folder
from flower_geo.site.state import SiteState
from flower_geo.training import InnerConfig, InnerLoop
from tests.federation import Node
from tests.strategies.runs import PLAIN, Killed, configured, dying, equal, events, federation, run


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
    locals_ = {site: unpack(r.arrays) for site, r in captured.items() if r.arrays is not None}
    weights = {site: reply.metrics["tokens"] for site, reply in captured.items()}
    for name, tensor in federated.items():
        parts = [weights[site] * locals_[site][name].double() for site in locals_]
        mean = torch.stack(parts).sum(0) / sum(weights.values())
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


@pytest.mark.parametrize(
    ("codec_up", "when"),
    [("int8(block=256)", 1), ("int8(block=256)", 4), ("int8(block=256)", 6), ("fp32", 5)],
)
def test_killed_and_resumed_is_the_undisturbed_run(
    tmp_path: Path, codec_up: str, when: int
) -> None:
    values = {"codec-up": codec_up, "codec-down": codec_up, "min-sites": 2}
    undisturbed = run(configured(tmp_path / "a", **values), federation(tmp_path / "a", 2))

    config = configured(tmp_path / "b", **values)
    with pytest.raises(Killed):
        run(config, federation(tmp_path / "b", 2, dying(when)))
    assert equal(run(config, federation(tmp_path / "b", 2)), undisturbed)
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
    with pytest.raises(ResumeMismatch, match="model='gpt2-pico'"):
        run(other, federation(tmp_path, 2))
