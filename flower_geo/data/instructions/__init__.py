"""Questions and answers for fine-tuning: read, tokenised by chat template, split, cached.

    tokenizer = load_tokenizer()
    corpus = prepare_instructions("pairs.jsonl", tokenizer, seq_len=256, cache_dir="cache")
    batch = collate(corpus.train[:8], pad_id_of(tokenizer))   # input_ids, labels, attention_mask

`flower_geo.data.instructions.spec` says what a spec may be, and
`flower_geo.data.instructions.forms` what a row may look like.  Importing this
package loads neither torch nor transformers nor datasets.
"""

from __future__ import annotations

from flower_geo.data.instructions.chat import chat_template_of
from flower_geo.data.instructions.collate import collate, pad_id_of
from flower_geo.data.instructions.corpus import (
    IGNORED,
    Answer,
    Example,
    Examples,
    InstructionCorpus,
    Packed,
    Report,
)
from flower_geo.data.instructions.prepare import prepare_instructions
from flower_geo.data.instructions.rows import files_of
from flower_geo.data.instructions.spec import CATEGORIES, instruction_spec, parse_instructions

__all__ = [
    "CATEGORIES",
    "IGNORED",
    "Answer",
    "Example",
    "Examples",
    "InstructionCorpus",
    "Packed",
    "Report",
    "chat_template_of",
    "collate",
    "files_of",
    "instruction_spec",
    "pad_id_of",
    "parse_instructions",
    "prepare_instructions",
]
