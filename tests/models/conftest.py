"""A tokenizer without a file, and models small enough to build in every test."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NAMED = ["gpt2-nano", "llama-nano"]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """256 bytes and an end-of-text token: 257 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|end|>": 0} | {letter: index + 1 for index, letter in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    build: Any = PreTrainedTokenizerFast
    return build(
        tokenizer_object=inner, eos_token="<|end|>", bos_token="<|end|>", pad_token="<|end|>"
    )
