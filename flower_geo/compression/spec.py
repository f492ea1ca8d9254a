"""Spec strings: the one way to name a codec.

    spec   = chain | rules
    chain  = stage { "|" stage }
    stage  = name [ "(" key "=" value { "," key "=" value } ")" ]
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
from flower_geo.compression.quantize import BF16, FP16, FP32, Int, Int2, ValueCodec
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


def register(name: str, make: Maker, keys: dict[str, Any], **defaults: Any) -> None:
    """Add a stage: a value codec, or a selection that comes before one.

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
    if not re.search(r"=(?![^(]*\))", text):
        return chain(text)
    rules = []
    for rule in (part.strip() for part in text.split(";")):
        match = re.fullmatch(r"([^=()|]+?)\s*=\s*(.+)", rule)
        if not match:
            raise CodecSpecError(f"codec rule {rule!r} is not of the form 'pattern=codec'")
        patterns = tuple(part.strip() for part in match[1].split(","))
        if not all(patterns):
            raise CodecSpecError(f"codec rule {rule!r} has an empty pattern")
        rules.append((patterns, chain(match[2].strip())))
    return Rules(tuple(rules))


@lru_cache(maxsize=256)
def chain(spec: str) -> Codec:
    """Read a chain of stages.

    Raises:
        CodecSpecError: a stage is not known, ill-formed, or in a wrong place.
    """
    if not spec.isascii() or len(spec) > 200:
        raise CodecSpecError(f"codec {spec[:40]!r} is no codec spec: it is too long or not ASCII")
    stages = [_stage(part.strip(), spec) for part in spec.split("|")]
    sparse = stages[0] if isinstance(stages[0], Selection) else None
    rest = stages[1:] if sparse is not None else stages
    values: ValueCodec = rest[0] if rest else FP32()
    if len(rest) > 1 or isinstance(values, Selection):
        raise CodecSpecError(
            f"codec {spec!r}: a chain is a selection (topk), then one value codec, as in "
            "'topk(density=0.03,chunk=4096)|int8(block=256)'"
        )
    return Codec(values, sparse)


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
register("fp32", FP32, {})
register("bf16", BF16, {})
register("fp16", FP16, {})
register("int8", lambda block: Int(8, block), _BLOCK, block=256)
register("int4", lambda block: Int(4, block), _BLOCK, block=64)
register("int2", Int2, _BLOCK, block=64)
register("topk", TopK, {"density": _share, "chunk": _integer(16, 1 << 24)}, chunk=4096)
