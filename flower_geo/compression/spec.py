"""Spec strings: the one way to name a codec.

    spec   = chain | rules
    chain  = stage { "|" stage }
    stage  = name [ "(" key "=" value { "," key "=" value } ")" ]
             a selection (topk, randk), a value codec, a packer (zstd): at most one
             of each, in this order; without a value codec, fp32
    rules  = rule { ";" rule }          rule = pattern { "," pattern } "=" chain

A rule's patterns are shell patterns over tensor names; the first rule with a
match holds, and a tensor no rule matches is an error.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from flower_geo.compression.codec import Codec
from flower_geo.compression.floats import BF16, FP16, FP32, Zero
from flower_geo.compression.integers import Int, Int2
from flower_geo.compression.lossless import Packer, Zstd
from flower_geo.compression.randk import Drawn, RandK
from flower_geo.compression.sign import Sign
from flower_geo.compression.sparsify import Selection, TopK
from flower_geo.config import nearest
from flower_geo.errors import CodecSpecError

__all__ = ["AnyCodec", "Rules", "chain", "codec", "register"]

Maker = Callable[..., Any]


@dataclass(frozen=True)
class _Stage:
    make: Maker
    keys: dict[str, Callable[[str], Any]]
    defaults: dict[str, Any]


_STAGES: dict[str, _Stage] = {}
_STAGE = re.compile(r"([A-Za-z][A-Za-z0-9_]*)(?:\(([^()]*)\))?")
#: Kinds of stages in the order of a chain.
_KINDS = ("selection", "value codec", "packer")
#: Longest chain, so that it fits a blob's header, and longest set of rules.
MAX_CHAIN, MAX_RULES = 200, 100_000


def register(name: str, make: Maker, keys: dict[str, Any], **defaults: Any) -> None:
    """Add a stage: a value codec, a selection that comes before one, or a packer after it.

    What ``make`` returns has the members of ``floats.ValueCodec``,
    ``sparsify.Selection`` (or ``randk.Drawn``) or ``lossless.Packer``.  Both ends
    of a connection must register it; a blob names its codec.

    Args:
        name: lower-case name.
        make: called with the parsed keys; returns the stage.
        keys: key -> function that reads its text, ``ValueError`` when it cannot.
        defaults: values of keys that may be left out.

    Raises:
        CodecSpecError: no spec could ever name it.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise CodecSpecError(f"codec name {name!r} is not lower-case letters, digits and '_'")
    _STAGES[name] = _Stage(make, keys, defaults)
    chain.cache_clear()


def _integer(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError(f"must be from {low} to {high}")
        return value

    return read


def _share(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and 0 < value <= 1):
        raise ValueError("must be above 0 and at most 1")
    return value


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"must be {' or '.join(words)}")
        return text

    return read


def _yes(text: str) -> bool:
    return _one_of("true", "false")(text) == "true"


@dataclass(frozen=True)
class Rules:
    """Codecs by tensor name; encodes like a single codec.

    Attributes:
        rules: (patterns, codec) in order.
    """

    rules: tuple[tuple[tuple[str, ...], Codec], ...]

    @property
    def spec(self) -> str:
        """The canonical spec string."""
        return "; ".join(f"{','.join(patterns)}={codec.spec}" for patterns, codec in self.rules)

    @property
    def lossless(self) -> bool:
        """Whether every rule's codec is."""
        return all(codec.lossless for _, codec in self.rules)

    def for_tensor(self, name: str) -> Codec:
        """The codec of the first rule that matches ``name``.

        Raises:
            CodecSpecError: none does.
        """
        for patterns, found in self.rules:
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                return found
        raise CodecSpecError(
            f"no codec rule matches tensor {name!r}; end the rules with '*=...', as in '*=fp32'"
        )

    def encode(self, tensor: Tensor, name: str = "") -> bytes:
        """Encode with the codec for ``name``; see ``Codec.encode``."""
        return self.for_tensor(name).encode(tensor, name)


AnyCodec = Codec | Rules


def codec(spec: str) -> AnyCodec:
    """Read a spec string.

    Raises:
        CodecSpecError: it cannot be read; the message names the nearest codec.
    """
    text = spec.strip()
    if len(text) > MAX_RULES:
        raise CodecSpecError(f"codec {text[:40]!r}... is too long: {len(text)} characters")
    if "=" not in re.sub(r"\([^()]*\)", "", text):
        return chain(text)
    rules = []
    for rule in (part.strip() for part in text.split(";")):
        names, _, found = (part.strip() for part in rule.partition("="))
        if not names or not found or re.search(r"[()|]", names):
            raise CodecSpecError(f"codec rule {rule[:99]!r} is not of the form 'pattern=codec'")
        patterns = tuple(part.strip() for part in names.split(","))
        if not all(patterns):
            raise CodecSpecError(f"codec rule {rule[:99]!r} has an empty pattern")
        rules.append((patterns, chain(found)))
    return Rules(tuple(rules))


@lru_cache(maxsize=256)
def chain(spec: str) -> Codec:
    """Read a chain of stages.

    Raises:
        CodecSpecError: a stage is not known, ill-formed, or in a wrong place.
    """
    if not spec.isascii() or len(spec) > MAX_CHAIN:
        raise CodecSpecError(f"codec {spec[:40]!r} is no codec spec: it is too long or not ASCII")
    texts = [part.strip() for part in spec.split("|")]
    stages = [_stage(text, spec) for text in texts]
    kinds = [_kind(stage, text) for stage, text in zip(stages, texts, strict=True)]
    for kind, name in enumerate(_KINDS):
        if kinds.count(kind) > 1:
            two = " and ".join(
                text for text, found in zip(texts, kinds, strict=True) if found == kind
            )
            raise CodecSpecError(
                f"codec {spec[:99]!r}: {two[:99]} are each a {name}; a chain has at most one "
                "selection, one value codec and one packer"
            )
    if kinds != sorted(kinds):
        right = "|".join(text for _, text in sorted(zip(kinds, texts, strict=True)))
        raise CodecSpecError(
            f"codec {spec!r}: a selection comes first, a packer last: the right order is {right!r}"
        )
    by_kind = dict(zip(kinds, stages, strict=True))
    made = Codec(by_kind.get(1, FP32()), by_kind.get(0), by_kind.get(2))
    if not made.spec.isascii() or len(made.spec) > MAX_CHAIN:
        raise CodecSpecError(f"codec {spec[:40]!r}... is too long when its defaults are written")
    return made


def _kind(stage: Any, text: str) -> int:
    """Index into ``_KINDS``."""
    if isinstance(stage, Selection | Drawn):
        return 0
    if isinstance(stage, Packer):
        return 2
    if all(hasattr(stage, member) for member in ("spec", "lossless", "size", "encode", "pieces")):
        return 1
    raise CodecSpecError(
        f"codec {text!r}: what was registered for it is no stage of a chain; "
        "it needs the members of ValueCodec, Selection, Drawn or Packer"
    )


def _stage(text: str, spec: str) -> Any:
    match = _STAGE.fullmatch(text)
    if not match:
        raise CodecSpecError(
            f"codec {spec!r}: {text!r} is not of the form name or name(key=value,...)"
        )
    name, inside = match[1], match[2] or ""
    known = _STAGES.get(name)
    if known is None:
        raise CodecSpecError(
            f"codec {name!r} is not known{nearest(name.lower(), _STAGES)} "
            f"(known: {', '.join(sorted(_STAGES))})"
        )
    given: dict[str, Any] = {}
    for piece in (part.strip() for part in inside.split(",") if part.strip()):
        key, _, value = piece.partition("=")
        key = key.strip()
        if key not in known.keys:
            raise CodecSpecError(
                f"codec {spec!r}: {name} has no {key!r}{nearest(key, known.keys)} "
                f"(keys: {', '.join(known.keys) or 'none'})"
            )
        if key in given:
            raise CodecSpecError(f"codec {spec!r}: {name} {key}= is given twice")
        try:
            given[key] = known.keys[key](value.strip())
        except ValueError as error:
            raise CodecSpecError(f"codec {spec!r}: {name} {key}={value!r}: {error}") from None
    values = {**known.defaults, **given}
    missing = [key for key in known.keys if key not in values]
    if missing:
        raise CodecSpecError(f"codec {spec!r}: {name} needs {missing[0]}=")
    return known.make(**values)


_BLOCK = {"block": _integer(8, 1 << 20)}
register("zero", Zero, {})
register("fp32", FP32, {})
register("bf16", BF16, {})
register("fp16", FP16, {})
_INT_KEYS = {
    **_BLOCK, "round": _one_of("nearest", "stochastic"), "seed": _integer(0, 2**64 - 1),
    "scale": _one_of("fp32", "bf16"),
}  # fmt: skip
_INT = {"round": "nearest", "seed": 0, "scale": "fp32"}
register("int8", lambda **keys: Int(8, **keys), _INT_KEYS, block=256, **_INT)
register("int4", lambda **keys: Int(4, **keys), _INT_KEYS, block=64, **_INT)
register("int2", Int2, _BLOCK, block=64)
register("sign", Sign, {**_BLOCK, "scale": _one_of("bf16", "fp32")}, block=256, scale="bf16")
register(
    "topk",
    TopK,
    {"density": _share, "chunk": _integer(16, 1 << 24), "index": _one_of("auto", "bitmap")},
    chunk=4096,
    index="auto",
)
register(
    "randk",
    RandK,
    {"density": _share, "seed": _integer(0, 2**63 - 1), "scale": _yes},
    seed=0,
    scale=False,
)
register("zstd", Zstd, {"level": _integer(1, 19)}, level=3)
