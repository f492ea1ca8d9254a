"""A sample of what a model writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["sample_text"]

#: Context of models that name no limit of their own.
DEFAULT_CONTEXT = 1024


@torch.no_grad()
def sample_text(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: str,
    max_new_tokens: int = 64,
    seed: int = 0,
    *,
    temperature: float = 0.8,
    top_k: int = 40,
) -> str:
    """Return ``prompt`` and what the model goes on with.

    The same model, prompt and seed give the same text; the global random state
    is neither read nor changed.  The model sees the last tokens that fit its
    context, so a text may be longer than that.  It ends at the end-of-text token
    or after ``max_new_tokens``.

    Args:
        model: the model; its training mode is put back afterwards.
        tokenizer: the tokenizer that belongs to it.
        prompt: may be empty.
        max_new_tokens: longest continuation, in tokens.
        seed: of the draw.
        temperature: divides the logits; 0 takes the likeliest token each time.
        top_k: draw among that many likeliest tokens.
    """
    device = next(model.parameters()).device
    context = getattr(model.config.get_text_config(), "max_position_embeddings", DEFAULT_CONTEXT)
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = list(tokenizer(prompt)["input_ids"]) if prompt else []
    start = 0
    if not ids:
        ids, start = [_first_token(tokenizer)], 1
    training = model.training
    model.train(False)
    try:
        for _ in range(max_new_tokens):
            window = torch.tensor([ids[-context:]], dtype=torch.long, device=device)
            logits = model(input_ids=window, use_cache=False).logits[0, -1].float().cpu()
            token = _draw(logits[: len(tokenizer)], generator, temperature, top_k)
            if token == tokenizer.eos_token_id:
                break
            ids.append(token)
    finally:
        model.train(training)
    return str(tokenizer.decode(ids[start:], skip_special_tokens=True))


def _draw(logits: Tensor, generator: torch.Generator, temperature: float, top_k: int) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    best, tokens = logits.topk(min(top_k, logits.numel()))
    weights = torch.softmax(best / temperature, dim=-1)
    return int(tokens[torch.multinomial(weights, 1, generator=generator)])


def _first_token(tokenizer: Any) -> int:
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(tokenizer, name, None)
        if token is not None:
            return int(token)
    return 0
