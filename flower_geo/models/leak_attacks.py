"""The attacks of ``flower_geo.models.leak``, one function each.

All take what arrived, ``sent`` [levels, rows, n, d] with a level of noise each, and
give the best tokens of each place, [levels * rows * n, k], the likeliest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flower_geo.models.leak_match import Ridge, pieces, top_matches
from flower_geo.models.split.cut import layout_of
from flower_geo.models.split.noise import noised
from flower_geo.models.split.part import SplitPart

__all__ = ["Coded", "activations", "dictionary", "linear", "nearest", "replay", "unlike"]

#: Tokens run through a bottom part at once, and those of one place tried at once.
RUN, TRIED = 4096, 512
#: (token, place) pairs in the dictionary of a model with learned positions, about.
ENTRIES = 2**18
#: Tokens whose mean activation stands for the whole vocabulary's.
SAMPLE = 256
#: Variance, against the mean square, that rounding makes where nothing else does.
ROUNDING = 1e-12
#: Public tokens by which noise and codec are measured.
MEASURED = 256
#: Share of a guess that does not believe in the language model.
DOUBT = 0.1

#: What a codec makes of activations on their way.
Coded = Callable[[Tensor], Tensor]


def activations(bottom: SplitPart, ids: Tensor) -> Tensor:
    """What a site computes of ids [rows, n]: [rows, n, d], fp32, a few rows at a time."""
    at_once = max(1, RUN // ids.shape[1])
    return torch.cat([bottom.run(rows).float() for rows in pieces(ids, at_once)])


def nearest(table: Tensor, sent: Tensor, count: int) -> Tensor:
    """Tokens whose embeddings, rows of ``table``, are nearest by cosine."""
    return top_matches(sent.flatten(0, -2), pieces(table), count)


def linear(
    bottom: SplitPart, table: Tensor, sent: Tensor, noises: Sequence[float], coded: Coded,
    public: Tensor, draws: Sequence[torch.Generator], count: int,
) -> Tensor:  # fmt: skip
    """The same behind a linear map, fitted at each level on public text [rows, n]."""
    public = public.to(sent.device)
    maps = [Ridge(sent.shape[-1]) for _ in noises]
    for rows in pieces(public, max(1, RUN // public.shape[1])):
        hidden = activations(bottom, rows)
        for fitted, sigma, generator in zip(maps, noises, draws, strict=True):
            seen = coded(noised(hidden, sigma, generator))
            fitted.add(seen.flatten(0, -2), table[rows.flatten()])
    return torch.cat(
        [
            top_matches(fitted.map(level.flatten(0, -2)).to(sent.device), pieces(table), count)
            for fitted, level in zip(maps, sent, strict=True)
        ]
    )


def dictionary(bottom: SplitPart, sent: Tensor, public: Tensor, count: int) -> Tensor:
    """Tokens whose own activations behind a public context are nearest by cosine.

    With learned positions the entries are made at some places of the text, about
    evenly spread, and stand for those nearby; else at the first and at one other.
    What all tokens have in common at a place is taken off, and what a text's context
    adds on average: it says nothing of the token and would outweigh what does.

    Args:
        bottom: the attacker's.
        sent: what arrived.
        public: text [rows', n'], n' at least n: its first row is the context, and all of
            it shows what context adds.
        count: tokens to name.
    """
    levels, rows, length, width = sent.shape
    config = _config(bottom.model)
    everyone = torch.arange(int(config.vocab_size), device=sent.device)
    sample = everyone[:: max(1, len(everyone) // SAMPLE)]

    def entries(tokens: Tensor, place: int) -> Tensor:
        return _behind(bottom, public[:1, :place], tokens[None])[0]

    learned = layout_of(config).positions is not None
    places = min(length, max(2, ENTRIES // len(everyone)) if learned else 2)
    made_at = {place: own for own, near in _anchors(length, places) for place in near}
    needed = range(length) if learned else sorted({*made_at.values()})
    means = {place: entries(sample, place).mean(0) for place in needed}
    common = torch.stack([means[p if learned else made_at[p]] for p in range(length)])
    shown = public[: max(1, MEASURED // length), :length]
    anchor = made_at[length // 2]
    own = (entries(shown.flatten(), anchor) - means[anchor]).view(*shown.shape, width)
    adds = (activations(bottom, shown) - common - own)[:, 1:].mean((0, 1)).nan_to_num()
    centred = sent - common
    centred[:, :, 1:] -= adds
    best = torch.empty(levels, rows, length, min(count, len(everyone)), dtype=torch.long)
    best = best.to(sent.device)
    for anchor, near in _anchors(length, places):
        table = (entries(piece, anchor) - means[anchor] for piece in pieces(everyone))
        chosen = top_matches(centred[:, :, near].reshape(-1, width), table, count)
        best[:, :, near] = chosen.view(levels, rows, len(near), -1)
    return best.flatten(0, -2)


def unlike(
    bottom: SplitPart, noises: Sequence[float], coded: Coded, public: Tensor,
    draws: Sequence[torch.Generator],
) -> Tensor:  # fmt: skip
    """What noise and codec change at each level: variances [levels, d], row RMS = 1."""
    hidden = activations(bottom, public[: max(1, MEASURED // public.shape[1])])
    size = hidden.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
    changes = [
        (coded(noised(hidden, sigma, generator)) - hidden) / size
        for sigma, generator in zip(noises, draws, strict=True)
    ]
    return torch.stack([change.square().mean((0, 1)) + ROUNDING for change in changes])


def replay(
    bottom: SplitPart, whole: Any, sent: Tensor, variances: Tensor, candidates: Tensor | None
) -> Tensor:
    """Tokens recovered from the left, out of candidates [levels * rows * n, k]; None = all.

    A token's likelihood is that of a Gaussian between its activation behind what is
    recovered already and the one that arrived, with ``variances`` as ``unlike`` gives
    them; its prior is what the public model ``whole`` expects there, which also adds
    a third as many candidates.
    """
    length, width = sent.shape[-2:]
    vocabulary = int(_config(bottom.model).vocab_size)
    seen = sent.reshape(-1, length, width)
    spread = variances.repeat_interleave(sent.shape[1], 0)
    size = seen.square().mean(-1) / (1 + spread.mean(1, keepdim=True))
    known = torch.zeros(len(seen), 0, dtype=torch.long, device=sent.device)
    cache, prior = None, torch.zeros(len(seen), vocabulary, device=sent.device)
    for place in range(length):
        if candidates is None:
            tried = torch.arange(vocabulary, device=sent.device).expand(len(seen), -1)
        else:
            tried = candidates.view(len(seen), length, -1)[:, place]
            expected = prior.topk(min(vocabulary, -(-tried.shape[1] // 3)), dim=1).indices
            tried = torch.cat([tried, expected], 1)
        scale = (2 * spread * size[:, place, None].clamp_min(1e-30)).sqrt()
        score = prior.gather(1, tried) - _distance(bottom, known, tried, seen[:, place], scale)
        chosen = tried.gather(1, score.argmax(1, keepdim=True))
        known = torch.cat([known, chosen], 1)
        if place + 1 < length:
            output = whole(input_ids=chosen, cache=cache, use_cache=True)
            cache = output.cache
            likely = output.logits[:, -1].float().softmax(-1)
            prior = ((1 - DOUBT) * likely + DOUBT / vocabulary).log()
    return known.view(-1, 1)


def _distance(
    bottom: SplitPart, before: Tensor, tried: Tensor, seen: Tensor, scale: Tensor
) -> Tensor:
    """Squared distances [rows, k] of seen [rows, d] to tried [rows, k] behind before [rows, p].

    Each dimension is measured in units of ``scale`` [rows, d].
    """
    at_once = max(1, RUN // (before.shape[1] + min(TRIED, tried.shape[1])))
    found = []
    for start in range(0, len(seen), at_once):
        rows = slice(start, start + at_once)
        far = [
            _behind(bottom, before[rows], some.T)
            .sub_(seen[rows, None]).div_(scale[rows, None]).square_().sum(-1)
            for some in pieces(tried[rows].T, TRIED)
        ]  # fmt: skip
        found.append(torch.cat(far, 1))
    return torch.cat(found)


def _behind(bottom: SplitPart, before: Tensor, tried: Tensor) -> Tensor:
    """Activations [rows, k, d] of each of tried [rows, k] as the next token behind before.

    One forward for all: the mask lets each of them see the text before and itself.
    """
    start, count = before.shape[1], tried.shape[1]
    device = tried.device
    sees = torch.ones(start + count, start + count, dtype=torch.bool, device=device).tril()
    sees[start:, start:] = torch.eye(count, dtype=torch.bool, device=device)
    mask = torch.zeros(sees.shape, device=device).masked_fill(~sees, torch.finfo().min)
    places = torch.arange(start + count, device=device).clamp_max(start)
    ids = torch.cat([before, tried], 1)
    return bottom.run(ids, mask[None, None], places[None])[:, start:].float()


def _anchors(length: int, count: int) -> Iterator[tuple[int, list[int]]]:
    """``count`` places of 0 ... length-1, each with the places it stands for, in order.

    The first stands for itself: no token is before it, and models treat it unlike
    all others (attention sinks).
    """
    yield 0, [0]
    for number in range(count - 1):
        first, end = ((length - 1) * n // (count - 1) + 1 for n in (number, number + 1))
        yield (first + end) // 2, list(range(first, end))


def _config(model: Any) -> Any:
    return model.get_base_model().config if hasattr(model, "get_base_model") else model.config
