"""The ``leak-check`` command: what a site's activations tell of its text."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_geo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor

    from flower_geo.models.leak import Leak

__all__ = ["LeakOptions", "LeakReport", "check_leak", "leak_rows", "risk", "write_report"]

#: Heads of the columns of ``leak_rows``.
HEADS = ("layers at the site", "noise", "nearest", "dictionary", "linear", "replay", "best")

#: Public text for the linear map: tokens at least, and tokens a unit of width.
_PUBLIC, _PUBLIC_BY_WIDTH = 4096, 16


@dataclass(frozen=True)
class LeakOptions:
    """What is to be measured.

    Attributes:
        model: named shape (random weights), folder, GGUF file or hub name.
        data: spec of the site's text.
        cuts: numbers of bottom layers.
        noises: sigmas, relative to each token's RMS.
        codec: spec of the codec for activations.
        adapter: folder with the site's adapter; "" = none.
        knows_adapter: whether the attacker has it too.
        tokenizer: "" = the model's, builtin for a named shape.
        public: spec of the attacker's text; "" = a shipped corpus that is not the site's.
        tokens: how many tokens to attack, about.
        length: tokens a row.
        replay: whether to replay candidates in context.
        candidates: how many at each place.
        seed: of noise, and of a named shape's weights.
    """

    model: str
    data: str
    cuts: Sequence[int] = (1,)
    noises: Sequence[float] = (0.0,)
    codec: str = "fp32"
    adapter: str = ""
    knows_adapter: bool = False
    tokenizer: str = ""
    public: str = ""
    tokens: int = 256
    length: int = 32
    replay: bool = True
    candidates: int = 4096
    seed: int = 0


@dataclass(frozen=True)
class LeakReport:
    """What came of it.

    Attributes:
        options: as given.
        codec: the codec's full spec.
        vocabulary: tokens to guess among.
        guess: share recovered by always naming the commonest token of the public text.
        random_weights: whether the model was never trained.
        leaks: a row a cut and noise level.
    """

    options: LeakOptions
    codec: str
    vocabulary: int
    guess: float
    random_weights: bool
    leaks: list[Leak]


def check_leak(options: LeakOptions) -> LeakReport:
    """Load model and text, attack, and report.

    Raises:
        FlowerGeoError: model, adapter, text, codec, a cut or a noise level is not usable.
    """
    from flower_geo.compression import codec as read_codec
    from flower_geo.data import CORPORA, load_tokenizer
    from flower_geo.models import MODELS, build_model, check_vocab
    from flower_geo.models.adapter_choice import adapter_tokenizer
    from flower_geo.models.adapter_import import load_adapter
    from flower_geo.models.build import model_config
    from flower_geo.models.leak import Attack, measure_leak
    from flower_geo.models.split import Cut, check_cut
    from flower_geo.models.split.noise import check_sigma

    if options.length < 2 or options.tokens < options.length:
        raise ConfigError(
            f"{options.tokens} tokens in rows of {options.length} cannot be attacked; "
            "use rows of 2 or more, and at least one whole row"
        )
    chosen = read_codec(options.codec)
    config = model_config(options.model)
    for cut in options.cuts:
        check_cut(config, Cut(cut))
    for sigma in options.noises:
        check_sigma(sigma)
    named = options.model in MODELS
    tokenizer = adapter_tokenizer(
        options.model, options.tokenizer or ("builtin" if named else "model"), load_tokenizer
    )
    plain = build_model(
        options.model, seed=options.seed, vocab_size=len(tokenizer) if named else None,
        max_seq_len=options.length,
    )  # fmt: skip
    check_vocab(plain, tokenizer)
    model: Any = load_adapter(plain, options.adapter) if options.adapter else plain
    other = next(name for name in CORPORA if f"corpus:{name}" not in options.data)
    width = int(plain.config.hidden_size)
    seen = max(_PUBLIC, _PUBLIC_BY_WIDTH * width)
    ids = _text(options.data, tokenizer, options.length, options.tokens)
    public = _text(options.public or f"corpus:{other}", tokenizer, options.length, seen)
    attack = Attack(public, options.replay, options.candidates, options.knows_adapter)
    leaks = measure_leak(
        model, ids, options.cuts, options.noises, coded=_through(chosen), attack=attack,
        seed=options.seed,
    )  # fmt: skip
    guess = float((ids == public.flatten().mode().values).double().mean())
    return LeakReport(
        options, chosen.spec, int(plain.config.vocab_size), guess, named, leaks
    )  # fmt: skip


def _through(codec: Any) -> Callable[[Tensor], Tensor]:
    """What a receiver decodes, a row at a time as if each were a micro-batch of one."""
    import torch

    def coded(hidden: Tensor) -> Tensor:
        rows = [
            codec.decode(codec.encode(row[None], "activations"), shape=(1, *row.shape))
            for row in hidden
        ]
        return torch.cat(rows).to(hidden.device)

    return coded


def _text(data: str, tokenizer: Any, length: int, tokens: int) -> Tensor:
    """About ``tokens`` ids [rows, length], from rows evenly spread over the training text."""
    from flower_geo.data import prepare

    with tempfile.TemporaryDirectory(prefix="flower-geo-leak-") as cache:
        split = prepare(data, tokenizer, seq_len=length, cache_dir=cache).train
        if not len(split):
            raise DataError(f"{data} has no row of {length} tokens; give more text")
        count = min(len(split), max(1, tokens // length))
        return split.batch([number * len(split) // count for number in range(count)])


def leak_rows(report: LeakReport) -> list[tuple[str, ...]]:
    """The rows of the table, under ``HEADS``: shares in percent."""
    return [
        (
            str(leak.cut), f"{leak.noise:g}",
            *("–" if share is None else f"{100 * share:.1f} %" for share in (
                leak.nearest, leak.dictionary, leak.linear, leak.replay, leak.best
            )),
        )
        for leak in report.leaks
    ]  # fmt: skip


def risk(report: LeakReport) -> str:
    """One line in plain words: how bad it is."""
    worst = max(report.leaks, key=lambda leak: leak.best)
    least = min(report.leaks, key=lambda leak: leak.best)

    def place(leak: Leak) -> str:
        return f"cut {leak.cut} and noise {leak.noise:g}"

    line = (
        f"Risk: whoever sees these activations reads {_words(worst.best, report.guess)} "
        f"({100 * worst.best:.0f} % of the tokens at {place(worst)}"
    )
    if least is not worst:
        line += f"; at best {100 * least.best:.0f} %, at {place(least)}"
    line += f"; guessing the commonest token gives {100 * report.guess:.0f} %)"
    line += (
        ". Treat the cloud as if it were given the text."
        if worst.best >= 0.5
        else ". Better attacks exist: this is no promise."
    )
    tried = report.options.candidates
    if report.options.replay and tried < report.vocabulary:
        line += (
            f" The replay tried {tried:,} of {report.vocabulary:,} tokens at each place; "
            "one with more time tries all and reads more."
        )
    return line


def _words(share: float, guess: float) -> str:
    if share >= 0.9:
        return "the text"
    if share >= 0.5:
        return "most of the text"
    return "parts of the text" if share > 2 * guess + 0.05 else "hardly more than a guess"


def write_report(report: LeakReport, file: Path) -> None:
    """Write the figures as JSON.

    Raises:
        StateError: the file cannot be written.
    """
    from flower_geo.durable import write_json

    values = {
        **asdict(report),
        "leaks": [{**asdict(leak), "best": leak.best} for leak in report.leaks],
        "risk": risk(report),
    }
    write_json(file, json.loads(json.dumps(values)))
