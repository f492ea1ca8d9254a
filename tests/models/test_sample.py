from __future__ import annotations

from typing import Any

import torch

from flower_geo.models import build_model, sample_text


def small(spec: str = "gpt2-nano", vocab_size: int = 257) -> Any:
    return build_model(spec, seed=0, vocab_size=vocab_size, max_seq_len=16)


def test_a_seed_is_a_text(tokenizer: Any) -> None:
    model = small()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = sample_text(model, tokenizer, "We the ", 12, seed=4)
    assert one.startswith("We the ") and len(one) > len("We the ")
    assert sample_text(model, tokenizer, "We the ", max_new_tokens=12, seed=4) == one
    assert sample_text(model, tokenizer, "We the ", 12, seed=5) != one
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_prompt_and_text_may_outgrow_the_context(tokenizer: Any) -> None:
    prompt = "four score and seven years ago"
    text = sample_text(small(), tokenizer, prompt, 24, seed=0)
    assert text.startswith(prompt)


def test_an_empty_prompt_begins_at_the_beginning(tokenizer: Any) -> None:
    for spec in ("gpt2-nano", "llama-nano"):
        assert sample_text(small(spec), tokenizer, "", 8, seed=0)
    assert sample_text(small(), tokenizer, "", 0, seed=0) == ""


def test_text_ends_at_the_end_token(tokenizer: Any) -> None:
    model = small()
    with torch.no_grad():
        model.get_input_embeddings().weight[1:].zero_()
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(model.get_input_embeddings().weight[0])
    assert sample_text(model, tokenizer, "so", 50, seed=0, temperature=0) == "so"


def test_spare_rows_are_never_drawn(tokenizer: Any) -> None:
    model = small(vocab_size=300)
    with torch.no_grad():
        model.get_input_embeddings().weight[:257].zero_()
    assert sample_text(model, tokenizer, "", 20, seed=1, top_k=300)
