"""Codecs on real pseudo-gradients: bits, error and speed, beside other libraries.

    python -m benchmarks.bench_codecs            # some minutes
    python -m benchmarks.bench_codecs --small    # a short form

bitsandbytes, torchao, blosc2, pcodec and pysz are no dependencies.  Rows of those
that cannot be imported are left out: install them into an environment of their
own beside this project and run the module with its interpreter.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.figures import publish, table
from flower_geo.compression import Codec, codec
from flower_geo.compression.parallel import in_order
from flower_geo.data import BatchSource, Cursor, load_tokenizer, prepare
from flower_geo.models import build_model
from flower_geo.site.identity import cache_folder
from flower_geo.training import InnerConfig, InnerLoop

SPECS = (
    "fp32", "bf16", "fp16", "int8(block=256)", "int8(block=256,scale=bf16)",
    "int8(block=256,round=stochastic)", "int4(block=64)", "int4(block=64,scale=bf16)",
    "int2(block=64)", "sign(block=256)", "topk(density=0.03,chunk=4096)|bf16",
    "topk(density=0.03,chunk=4096)|int8(block=256)",
    "topk(density=0.03,chunk=4096)|int4(block=64)",
    "topk(density=0.0156,chunk=4096)|int2(block=64)", "zstd(level=3)",
    "int8(block=256)|zstd(level=3)",
)  # fmt: skip
PEERS = ("bitsandbytes", "torchao", "zstandard", "blosc2", "pcodec", "pysz")
#: Tensors that two threads share.
PARTS = 8


@dataclass(frozen=True)
class Coder:
    """A codec as this benchmark sees it.

    Attributes:
        name: of its row.
        encode: makes whatever ``add`` and ``nbytes`` take.
        add: adds the decoded tensor to another one.
        nbytes: bytes that would be sent.
    """

    name: str
    encode: Callable[[Tensor], Any]
    add: Callable[[Any, Tensor], Any]
    nbytes: Callable[[Any], int] = len


def ours(spec: str) -> Coder:
    """A codec of this project."""
    return Coder(spec, codec(spec).encode, Codec.add_into)


def of_bitsandbytes(library: Any, rms: float) -> list[Coder]:
    """Its blockwise 8-bit code book, and NF4."""
    functional = importlib.import_module("bitsandbytes.functional")

    def add(blob: Any, out: Tensor) -> None:
        out.add_(functional.dequantize_blockwise(*blob).view_as(out))

    def add4(blob: Any, out: Tensor) -> None:
        out.add_(functional.dequantize_4bit(*blob).view_as(out))

    def size(blob: Any) -> int:
        return int(blob[0].nbytes + blob[1].absmax.nbytes)

    return [
        Coder("8 bits, blocks of 256", lambda t: functional.quantize_blockwise(t, blocksize=256),
              add, size),
        Coder("NF4, blocks of 64",
              lambda t: functional.quantize_4bit(t, blocksize=64, quant_type="nf4"), add4, size),
    ]  # fmt: skip


def of_torchao(library: Any, rms: float) -> list[Coder]:
    """Symmetric int8 in groups of 256; a last short group is filled up."""
    core = importlib.import_module("torchao.quantization.quant_primitives")
    group = (1, 256)

    def encode(tensor: Tensor) -> Any:
        rows = tensor.reshape(-1)
        rows = torch.nn.functional.pad(rows, (0, -rows.numel() % 256)).view(-1, 256)
        scale, zero = core.choose_qparams_affine(
            rows, core.MappingType.SYMMETRIC, group, torch.int8
        )
        if zero is None:
            zero = torch.zeros_like(scale, dtype=torch.int32)
        return core.quantize_affine(rows, group, scale, zero, torch.int8), scale, zero

    def add(blob: Any, out: Tensor) -> None:
        codes, scale, zero = blob
        decoded = core.dequantize_affine(codes, group, scale, zero, torch.int8)
        out.view(-1).add_(decoded.view(-1)[: out.numel()])

    return [Coder("int8, groups of 256", encode, add, lambda b: int(b[0].nbytes + b[1].nbytes))]


def of_zstandard(library: Any, rms: float) -> list[Coder]:
    """Plain zstd of the fp32 bytes."""
    return [
        Coder(
            "level 3",
            lambda t: library.ZstdCompressor(level=3).compress(t.numpy().data),
            lambda b, out: _add(np.frombuffer(library.ZstdDecompressor().decompress(b), "f4"), out),
        )
    ]


def of_blosc2(library: Any, rms: float) -> list[Coder]:
    """Byte shuffle and zstd."""
    options = {
        "codec": library.Codec.ZSTD, "clevel": 5, "filters": [library.Filter.SHUFFLE],
        "nthreads": 1, "typesize": 4,
    }  # fmt: skip
    return [
        Coder(
            "shuffle, zstd 5",
            lambda t: library.compress2(t.numpy(), **options),
            lambda b, out: _add(np.frombuffer(library.decompress2(b, nthreads=1), "f4"), out),
        )
    ]


def of_pcodec(library: Any, rms: float) -> list[Coder]:
    """Its default level."""
    alone = importlib.import_module("pcodec.standalone")
    return [
        Coder(
            "default level",
            lambda t: alone.simple_compress(t.reshape(-1).numpy(), library.ChunkConfig()),
            lambda b, out: _add(alone.simple_decompress(b), out),
        )
    ]


def of_pysz(library: Any, rms: float) -> list[Coder]:
    """SZ3 under the absolute bound whose uniform error is as large as that of int8."""
    config = library.szConfig()
    config.errorBoundMode = library.szErrorBoundMode.ABS
    config.absErrorBound = math.sqrt(3) * rms

    def encode(tensor: Tensor) -> Any:
        flat = tensor.reshape(-1).numpy()
        return library.sz.compress(flat, config)[0], flat.shape

    return [
        Coder(
            "SZ3, error as of int8", encode,
            lambda b, out: _add(library.sz.decompress(b[0], np.float32, b[1])[0], out),
            lambda b: int(b[0].nbytes),
        )
    ]  # fmt: skip


def _add(values: Any, out: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # read-only memory, which is only read
        out.view(-1).add_(torch.from_numpy(values))


def peers(rms: float) -> tuple[list[Coder], list[str]]:
    """Codecs of the libraries that are here, and what to say of each library."""
    made, notes = [], []
    for name in PEERS:
        try:
            library = importlib.import_module(name)
        except ImportError:
            notes.append(f"{name} not installed, left out")
            continue
        notes.append(f"{name} {importlib.metadata.version(name)}")
        for each in globals()[f"of_{name}"](library, rms):
            made.append(Coder(f"{name}: {each.name}", each.encode, each.add, each.nbytes))
    return made, notes


def pseudo_gradient(steps: int) -> list[Tensor]:
    """Start minus end of a site's training, tensor by tensor."""
    tokenizer = load_tokenizer()
    corpus = prepare("corpus:sotu", tokenizer, seq_len=128, cache_dir=cache_folder({}))
    model = build_model("gpt2-nano", seed=0, vocab_size=len(tokenizer), max_seq_len=128)
    start = [p.detach().clone() for p in model.parameters()]
    config = InnerConfig(lr=1e-3, warmup_steps=0, total_steps=steps, schedule="constant")
    source = BatchSource(corpus.train, 8, Cursor(len(corpus.train), 0))
    InnerLoop(model, config).run(source.next, steps=steps, position=0, span=steps)
    return [s - p.detach() for s, p in zip(start, model.parameters(), strict=True)]


def quality(coder: Coder, tensors: Sequence[Tensor]) -> tuple[float, float]:
    """Bits a value and relative L2 error over all tensors of the update."""
    nbytes, lost, norm, count = 0, 0.0, 0.0, 0
    for tensor in tensors:
        blob, decoded = coder.encode(tensor), torch.zeros_like(tensor)
        coder.add(blob, decoded)
        nbytes += coder.nbytes(blob)
        lost += float((tensor - decoded).double().square().sum())
        norm += float(tensor.double().square().sum())
        count += tensor.numel()
    return 8 * nbytes / count, math.sqrt(lost / norm)


@dataclass
class Speed:
    """Best seconds of several turns, in which all codecs take turns with memcpy."""

    encode: float = math.inf
    add: float = math.inf


def _seconds(work: Callable[[Any], Any], items: Iterable[Any], threads: int) -> tuple[float, Any]:
    # Of the processor with one thread, which other programs disturb less.
    clock = time.process_time if threads == 1 else time.perf_counter
    began = clock()
    done = list(in_order(work, items, threads))
    return clock() - began, done


def speeds(
    coders: Sequence[Coder], values: Tensor, threads: int, turns: int
) -> tuple[float, dict[str, Speed]]:
    """Seconds of memcpy and of each codec; with one thread the tensor is one piece."""
    split = values.numel() if threads == 1 else -(-values.numel() // PARTS)
    parts = torch.split(values, split)
    copies = torch.split(torch.empty_like(values), split)
    outs = torch.split(torch.zeros_like(values), split)
    memcpy, found = math.inf, {coder.name: Speed() for coder in coders}
    for _ in range(turns):
        for coder in coders:
            pairs = list(zip(copies, parts, strict=True))
            spent, _ = _seconds(lambda pair: pair[0].copy_(pair[1]), pairs, threads)
            memcpy, best = min(memcpy, spent), found[coder.name]
            spent, blobs = _seconds(coder.encode, parts, threads)
            best.encode = min(best.encode, spent)
            work = [partial(coder.add, blob, out) for blob, out in zip(blobs, outs, strict=True)]
            spent, _ = _seconds(lambda add: add(), work, threads)
            best.add = min(best.add, spent)
    return memcpy, found


def main(small: bool) -> dict[str, Any]:
    """Measure and publish."""
    logging.disable(logging.WARNING)  # what other libraries say about this machine
    torch.set_num_threads(1)
    update = pseudo_gradient(20 if small else 200)
    every = torch.cat([tensor.reshape(-1) for tensor in update])
    own = [ours(spec) for spec in SPECS]
    error = quality(ours("int8(block=256)"), update)[1]
    others, notes = peers(error * float(every.square().mean().sqrt()))
    coders = own + others
    count, large, turns = (1 << 20, 1 << 22, 2) if small else (1 << 24, 100_000_000, 5)

    def tiled(length: int) -> Tensor:
        return every.repeat(-(-length // every.numel()))[:length]

    values, rows, figures = tiled(count), [], {}
    runs = [speeds(coders, values, threads, turns) for threads in (1, 2)]
    for coder in coders:
        bits, lost = quality(coder, update)
        one, two = (found[coder.name] for _, found in runs)
        rate = 4 * count / 1e9
        rows.append([
            f"`{coder.name}`" if coder in own else coder.name, bits, lost,
            rate / one.encode, runs[0][0] / one.encode, rate / one.add, runs[0][0] / one.add,
            rate / two.encode, runs[1][0] / two.encode, rate / two.add, runs[1][0] / two.add,
        ])  # fmt: skip
        figures[coder.name] = rows[-1][1:]
    headings = ["codec", "bits a value", "relative error"]
    for much in ("1 thread", "2 threads"):
        for what in ("encode", "add"):
            headings += [f"{what} GB/s, {much}", "of memcpy"]
    # The shortest names of the same kind: 8 bits under a scale every 256 values.
    rivals = [ours("int8(block=256)"), ours("int8(block=256,scale=bf16)")]
    rivals += [c for c in others if c.name.startswith(("bitsandbytes: 8", "torchao"))]
    rivals += [ours("topk(density=0.03,chunk=4096)|int8(block=256)")]
    values, wide = tiled(large), []
    for threads in (1, 2):
        memcpy, found = speeds(rivals, values, threads, turns)
        rate = 4 * large / 1e9
        wide.append([threads, "memcpy", rate / memcpy, 1.0, rate / memcpy, 1.0])
        for coder in rivals:
            best = found[coder.name]
            wide.append([
                threads, coder.name, rate / best.encode, memcpy / best.encode,
                rate / best.add, memcpy / best.add,
            ])  # fmt: skip
    text = (
        f"The update (start minus end) of gpt2-nano after {20 if small else 200} steps on a "
        f"built-in corpus, {every.numel() / 1e6:.1f} M values, tensor by tensor for bits and "
        f"error. For speed it is repeated to {count / 2**20:.0f} M values: one tensor with one "
        f"thread, {PARTS} with two. GB/s are of dense fp32, best of {turns} turns; add decodes "
        "and adds to an fp32 tensor. Seconds are of the processor with one thread, of the clock "
        "with two. The ratio is to `copy_` of the same tensor with as many threads, in turn with "
        f"the codec.\n\n{table(headings, rows)}\n\n"
        f"{large / 1e6:.0f} M values, 8 bits:\n\n"
        + table(["threads", "codec", "encode GB/s", "of memcpy", "add GB/s", "of memcpy"], wide)
        + f"\n\nOther libraries: {', '.join(notes)}."
    )
    record = {"codecs": figures, "large": wide, "notes": notes}
    publish("codecs", "Codecs", text, record)
    return record


if __name__ == "__main__":
    main("--small" in sys.argv)
