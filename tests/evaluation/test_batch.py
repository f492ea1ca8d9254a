from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from flower_geo.errors import DataError
from flower_geo.evaluation.batch import counted, counted_logits, model_inputs
from tests.training.conftest import VOCAB, adapted, labelled, small, unlabelled, untied

CPU = torch.device("cpu")


def capped() -> Any:
    """A model that caps its logits after the head."""
    torch.manual_seed(0)
    values: dict[str, Any] = {"attn_implementation": "eager"}
    return Gemma2ForCausalLM(Gemma2Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, final_logit_softcapping=0.1,
        **values,
    ))  # fmt: skip


class Headless(nn.Module):
    """A model whose head cannot be found."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, **values: Any) -> Any:
        return self.inner(**values)


MODELS = {
    "gpt2": lambda: small(),
    "llama": lambda: small("llama-nano"),
    "adapter": lambda: adapted(small("llama-nano")),
    "saved head": lambda: adapted(untied(), modules_to_save=["lm_head"]),
    "adapted head": lambda: adapted(untied(), target_modules=["q_proj", "lm_head"]),
    "capped": capped,
    "headless": Headless,
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradient_are_the_models_own_where_labels_count(name: str) -> None:
    model, batch = MODELS[name]().eval(), labelled(3, rows=3)()
    places = counted(batch)
    logits, targets = counted_logits(model, batch, places, CPU)
    loss: Any = nn.functional.cross_entropy(logits, targets)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    output = model(**batch, use_cache=False)
    keep = batch["labels"][:, 1:] != -100
    assert len(places) == int(keep.sum()) == len(logits) > 3
    torch.testing.assert_close(logits, output.logits[:, :-1][keep], rtol=1e-5, atol=1e-6)
    assert torch.equal(targets, batch["labels"][:, 1:][keep])
    torch.testing.assert_close(loss, output.loss)
    output.loss.backward()
    for parameter, tensor in model.named_parameters():
        if tensor.grad is not None:
            torch.testing.assert_close(grads[parameter], tensor.grad, rtol=1e-4, atol=1e-6)


def test_the_head_works_on_what_counts_only_and_is_left_as_it_was() -> None:
    model, batch = small(), labelled()()
    seen: list[torch.Size] = []
    hook = model.lm_head.register_forward_hook(lambda m, a, output: seen.append(output.shape))
    places = counted(batch)
    counted_logits(model, batch, places, CPU)
    hook.remove()
    assert seen == [(1, len(places), VOCAB)]
    assert not model.lm_head._forward_pre_hooks
    assert model(input_ids=batch["input_ids"]).logits.shape == (2, 8, VOCAB)


@pytest.mark.parametrize("spec", ["gpt2-nano", "llama-nano"])
def test_packed_texts_do_not_see_each_other(spec: str) -> None:
    model = small(spec).eval()
    one, two = torch.arange(1, 6), torch.arange(20, 27)
    ids = torch.cat([one, two])[None]
    labels = ids.clone()
    labels[0, len(one)] = -100  # the first token of a text follows from nothing
    packed = {
        "input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids),
        "position_ids": torch.cat([torch.arange(5), torch.arange(7)])[None],
    }  # fmt: skip
    together, _ = counted_logits(model, packed, counted(packed), CPU)
    apart = [
        model(input_ids=text[None]).logits[0, :-1] for text in (one, two)
    ]  # fmt: skip
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-5, atol=1e-6)


def test_the_mask_goes_along_only_where_it_matters() -> None:
    batch = labelled()()
    assert set(model_inputs(batch, CPU)) == {"input_ids"}
    left = {name: tensor.flip(1) for name, tensor in batch.items()}
    assert set(model_inputs(left, CPU)) == {"input_ids", "attention_mask"}
    assert set(model_inputs(left | {"position_ids": left["input_ids"]}, CPU)) == {
        "input_ids", "position_ids"
    }  # fmt: skip


def test_the_first_label_of_a_row_never_counts() -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 3]])
    labels = torch.tensor([[5, -100, 7], [8, 9, -100]])
    places = counted({"input_ids": ids, "labels": labels})
    assert places.where.tolist() == [1, 3] and places.targets.tolist() == [7, 9]
    assert len(counted(unlabelled({"input_ids": ids, "labels": labels}))) == 0


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": torch.ones(2, 3)},
        {"labels": torch.ones(2, 3)},
        {"input_ids": torch.ones(2, 3), "labels": torch.ones(2, 4)},
        {"input_ids": torch.ones(3), "labels": torch.ones(3)},
    ],
)
def test_what_is_no_batch_is_refused(batch: dict[str, Tensor]) -> None:
    with pytest.raises(DataError, match="input_ids and labels of one shape") as caught:
        counted(batch)
    assert "\n" not in str(caught.value)
