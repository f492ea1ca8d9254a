"""Text for training: corpora, tokenizer, packing, and a cursor that resumes.

    tokenizer = load_tokenizer()
    corpus = prepare("corpus:sotu", tokenizer, seq_len=128, cache_dir="cache")
    batches = BatchSource(corpus.train, 8, Cursor(len(corpus.train), seed=0))
    ids = batches.next()                     # LongTensor [8, 128]

`flower_geo.data.spec` says what a data spec may be.  Importing this package
loads neither torch nor transformers nor datasets.
"""

from __future__ import annotations

from flower_geo.data.corpus import PackedCorpus, Split
from flower_geo.data.cursor import BatchSource, Cursor
from flower_geo.data.packing import prepare
from flower_geo.data.spec import CORPORA, data_spec
from flower_geo.data.tokenizer import load_tokenizer, tokenizer_hash

__all__ = [
    "CORPORA",
    "BatchSource",
    "Cursor",
    "PackedCorpus",
    "Split",
    "data_spec",
    "load_tokenizer",
    "prepare",
    "tokenizer_hash",
]
