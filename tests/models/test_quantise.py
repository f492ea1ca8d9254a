from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from flower_geo.errors import ModelError
from flower_geo.models import AdapterSpec, attach, build_model, fold, load_base


def test_none_is_the_built_model() -> None:
    ours = load_base("gpt2-pico", seed=2, vocab_size=64, max_seq_len=16)
    plain = build_model("gpt2-pico", seed=2, vocab_size=64, max_seq_len=16)
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True)
    )


def test_an_unknown_width_is_refused() -> None:
    wrong: Any = "int3"
    with pytest.raises(ModelError, match="use one of none, int8, int4"):
        load_base("gpt2-pico", seed=0, quantise=wrong)


def test_without_bitsandbytes_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="needs bitsandbytes; run pip install") as error:
        load_base("gpt2-pico", seed=0, quantise="int4")
    assert "\n" not in str(error.value)


def test_where_it_does_not_run_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("bitsandbytes") is not None:
        pytest.skip("bitsandbytes runs here")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ModelError, match=r"cannot hold gpt2-pico in int8 on cpu.*quantise=none"):
        load_base("gpt2-pico", seed=0, vocab_size=64, max_seq_len=16, quantise="int8", device="cpu")


@pytest.mark.parametrize("width", ["int8", "int4"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_quantised_base_trains_an_adapter_and_takes_no_fold(width: Any) -> None:
    pytest.importorskip("bitsandbytes")
    model: Any = load_base("llama-nano", seed=0, vocab_size=64, quantise=width)
    plain: Any = build_model("llama-nano", seed=0, vocab_size=64)
    ids = torch.arange(16, device=model.device)[None]
    far = model.eval()(input_ids=ids).logits.cpu() - plain.eval()(input_ids=ids.cpu()).logits
    assert far.norm() < 0.2 * plain(input_ids=ids.cpu()).logits.norm()
    attached: Any = attach(model.train(), AdapterSpec(rank=2), 0)
    attached(input_ids=ids, labels=ids).loss.backward()
    grads = [p.grad for p in attached.parameters() if p.requires_grad]
    assert all(grad is not None and grad.isfinite().all() for grad in grads)
    with pytest.raises(ModelError, match="quantised weight"):
        fold(attached, {"model.layers.0.mlp.up_proj": (torch.ones(384, 1), torch.ones(1, 128))})
