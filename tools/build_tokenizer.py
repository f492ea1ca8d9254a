"""Train the tokenizer that flower_geo ships, on the training parts of the shipped corpora.

    python tools/build_tokenizer.py            # rewrites flower_geo/data/tokenizer/
    python tools/build_tokenizer.py --check    # builds, compares, writes nothing

What `prepare` holds out by default (share 0.05, seed 0) is not looked at.  The
result depends on the corpora and the `tokenizers` version only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from flower_geo.data.parts import cut
from flower_geo.data.sources import open_source
from flower_geo.data.spec import CORPORA, parse_spec
from flower_geo.data.split import chosen, part_digest

OUT = Path(__file__).resolve().parent.parent / "flower_geo" / "data" / "tokenizer"
VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"


def training_parts(corpus: str, held_out: float = 0.05, seed: int = 0) -> Iterator[str]:
    """The parts of a shipped corpus that `prepare` trains on by default."""
    parts = [text for _, text in cut(open_source(parse_spec(f"corpus:{corpus}")).events())]
    digests, sizes = zip(*(part_digest(text, seed) for text in parts), strict=True)
    held = chosen(np.array(digests, np.uint64), np.array(sizes, np.int64), held_out)
    return (text for text, out in zip(parts, held, strict=True) if not out)


def build() -> dict[str, str]:
    """Train; return file name -> content."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (text for corpus in CORPORA for text in training_parts(corpus))
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    if size != VOCABULARY:
        raise SystemExit(f"the vocabulary came out with {size} tokens, not {VOCABULARY}")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }


def main() -> int:
    """Write the tokenizer, or compare it with what is there."""
    parser = argparse.ArgumentParser(description="Rebuild the shipped tokenizer.")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write to")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args()
    different = []
    for name, content in build().items():
        path: Path = options.out / name
        same = path.is_file() and path.read_text(encoding="utf-8") == content
        print(f"{name}: {len(content):,} letters{'' if same else ', changed'}")
        if not same:
            different.append(name)
            if not options.check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8")
    return 1 if different and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
