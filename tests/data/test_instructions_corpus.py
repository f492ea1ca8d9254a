from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from flower_geo.data import load_tokenizer
from flower_geo.data.instructions import IGNORED, Example, Examples, Packed, collate, pad_id_of
from flower_geo.data.instructions.corpus import pack
from flower_geo.errors import DataError


def examples(*lengths: int, vocabulary: int = 40) -> Examples:
    """Random ids of the given lengths; all but each first token trained on."""
    torch.manual_seed(3)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.randint(0, vocabulary, (int(offsets[-1]),), dtype=torch.int32)
    trained = torch.ones_like(ids, dtype=torch.uint8)
    trained[offsets[:-1]] = 0
    return Examples(ids, trained, offsets)


def test_examples_are_sequences() -> None:
    some = examples(3, 5, 2)
    assert len(some) == 3 and some.lengths == [3, 5, 2] and some.trained_tokens == 7
    one = some[1]
    assert one.input_ids.dtype == one.labels.dtype == torch.int64
    assert one.position_ids is None and one.labels[0] == IGNORED
    assert torch.equal(one.labels[1:], one.input_ids[1:])
    assert torch.equal(some[-1].input_ids, list(some)[2].input_ids)
    assert [e.input_ids.numel() for e in some[1:]] == [5, 2]
    for wrong in (3, -4):
        with pytest.raises(IndexError):
            some[wrong]
    one.input_ids.fill_(99)
    assert not (some[1].input_ids == 99).any()


def test_pieces_are_disjoint_and_whole() -> None:
    some = examples(*range(2, 9))
    pieces = [some.piece(shard, 3) for shard in range(3)]
    joined = [example.input_ids.tolist() for piece in pieces for example in piece]
    assert joined == [example.input_ids.tolist() for example in some]
    assert sum(piece.trained_tokens for piece in pieces) == some.trained_tokens


def test_every_example_is_packed_once_and_none_too_full() -> None:
    rng = random.Random(5)
    lengths = [rng.randint(1, 64) for _ in range(2000)]
    rows = pack(lengths, 64)
    assert sorted(at for row in rows for at in row) == list(range(2000))
    assert all(sum(lengths[at] for at in row) <= 64 for row in rows)
    assert rows == sorted(sorted(row) for row in rows) == pack(lengths, 64)
    # Best fit decreasing wastes next to nothing on so many examples.
    assert len(rows) <= 1.02 * sum(lengths) / 64 + 1
    assert pack([], 8) == [] and pack([8, 8], 8) == [[0], [1]]


def test_packed_rows_restart_and_count_the_same_labels() -> None:
    some = examples(5, 3, 8, 2)
    rows = Packed(some, 8)
    assert len(rows) == 3 and sorted(rows.lengths) == [2, 8, 8]
    assert rows.trained_tokens == some.trained_tokens
    counted = sum(int((row.labels != IGNORED).sum()) for row in rows)
    assert counted == some.trained_tokens
    first = rows[0]
    assert first.position_ids is not None
    assert first.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert (first.labels == IGNORED).tolist() == [n in (0, 5) for n in range(8)]
    with pytest.raises(IndexError):
        rows[3]
    assert len(rows[:2]) == 2


@pytest.mark.parametrize("pad", [0, 7])
def test_padding_is_known_by_place_and_not_by_id(pad: int) -> None:
    long = Example(torch.tensor([1, pad, 2, pad]), torch.tensor([-100, pad, 2, pad]))
    short = Example(torch.tensor([3, pad]), torch.tensor([-100, pad]))
    batch = collate([long, short], pad)
    assert batch["input_ids"].tolist() == [[1, pad, 2, pad], [3, pad, pad, pad]]
    assert batch["labels"].tolist() == [[-100, pad, 2, pad], [-100, pad, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert {t.dtype for t in batch.values()} == {torch.int64}


def test_a_batch_of_nothing_or_of_two_kinds_is_refused() -> None:
    some = examples(4, 4)
    with pytest.raises(DataError, match="no examples"):
        collate([], 0)
    with pytest.raises(DataError, match="packed and other"):
        collate([some[0], Packed(some, 8)[0]], 0)


def test_the_pad_id_is_the_best_there_is() -> None:
    made = load_tokenizer("builtin")
    assert pad_id_of(made) == made.eos_token_id == made.pad_token_id
    made.pad_token = None
    assert pad_id_of(made) == made.eos_token_id
    made.eos_token = None
    assert pad_id_of(made) == 0


def model(kind: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        gpt2 = GPT2Config(
            vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        small: Any = GPT2LMHeadModel(gpt2)
        return small.eval()
    llama = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    made: Any = LlamaForCausalLM(llama)
    return made.eval()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_packed_conversations_do_not_see_each_other(kind: str) -> None:
    network = model(kind)
    some = examples(5, 3, 7, 4, 6)
    with torch.no_grad():
        apart = collate(list(some), 39)
        alone = network(**apart)
        packed = collate(list(Packed(some, 12)), 39)
        # As `collate` says: without a mask, and without a cache.
        joined = network(**packed, use_cache=False)
    assert packed["input_ids"].shape[0] < len(some)

    def losses(batch: dict[str, torch.Tensor], logits: torch.Tensor) -> list[float]:
        each = torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, 40), batch["labels"][:, 1:].reshape(-1), reduction="none"
        )
        counted = batch["labels"][:, 1:].reshape(-1) != IGNORED
        return sorted(each[counted].tolist())

    assert losses(packed, joined.logits) == pytest.approx(losses(apart, alone.logits), abs=1e-5)
    assert joined.loss.item() == pytest.approx(alone.loss.item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_padding_changes_no_loss(kind: str) -> None:
    network = model(kind)
    some = examples(3, 9)
    with torch.no_grad():
        whole = network(**collate(list(some), 0))
        parts = [network(**collate([example], 0)).loss.item() for example in some]
    assert whole.loss.item() == pytest.approx((parts[0] * 2 + parts[1] * 8) / 10, rel=1e-5)
