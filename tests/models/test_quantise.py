from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from flower_geo.errors import ModelError
from flower_geo.models import (
    AdapterSpec,
    adapter_state,
    attach,
    build_model,
    export_adapter,
    export_merged,
    factors_of,
    fold,
    load_base,
)


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


@pytest.mark.parametrize(
    ("name", "fold_into"),
    [("llama-nano", "model.layers.0.mlp.up_proj"), ("gpt2-nano", "transformer.h.0.mlp.c_fc")],
)
@pytest.mark.parametrize("width", ["int8", "int4"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_quantised_base_trains_an_adapter_and_takes_no_fold(
    width: Any, name: str, fold_into: str, tmp_path: Path, tokenizer: Any
) -> None:
    pytest.importorskip("bitsandbytes")
    model: Any = load_base(name, seed=0, vocab_size=257, quantise=width)
    plain: Any = build_model(name, seed=0, vocab_size=257)
    ids = torch.arange(16, device=model.device)[None]
    far = model.eval()(input_ids=ids).logits.cpu() - plain.eval()(input_ids=ids.cpu()).logits
    # NF4 moves a random weight by about a tenth, and four layers add up: far from
    # the 1.4 that unrelated logits would give
    assert far.norm() < (0.1 if width == "int8" else 0.4) * plain(input_ids=ids.cpu()).logits.norm()
    attached: Any = attach(model.train(), AdapterSpec(rank=2), 0)
    attached(input_ids=ids, labels=ids).loss.backward()
    grads = [p.grad for p in attached.parameters() if p.requires_grad]
    assert all(grad is not None and grad.isfinite().all() for grad in grads)
    with pytest.raises(ModelError, match="quantised weight"):
        fold(attached, {fold_into: (torch.ones(8, 1), torch.ones(1, 8))})
    state = adapter_state(attached)
    folds = {fold_into: tuple(torch.ones_like(f) for f in factors_of(state)[0][fold_into])}
    export_adapter(attached, state, tokenizer, tmp_path / "a", {}, folds)  # type: ignore[arg-type]
    assert not (tmp_path / "a" / "merged").exists()
    with pytest.raises(ModelError, match="quantised weight"):
        export_merged(attached, state, tokenizer, tmp_path / "m")
    assert not (tmp_path / "m").exists()
