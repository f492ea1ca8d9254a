"""Rebuild the question and answer pairs that flower_geo ships.

    python tools/build_instructions.py           # rewrites flower_geo/data/instructions/shipped/
    python tools/build_instructions.py --check   # builds, compares, writes nothing

Needs pip and PyYAML.  Nothing is installed: the source package is downloaded
with pip and unpacked in a temporary folder.

What is taken: the English part, as pairs, each once.  An entry of two or more
utterances is a dialogue, and each utterance with the one after it is a pair;
in the categories of ANSWERS an entry is one question and several answers to it.
An entry written as a bare string, which a YAML reader takes for a list of
letters, is left out, as are empty utterances.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml  # type: ignore[import-untyped]

OUT = Path(__file__).resolve().parent.parent / "flower_geo" / "data" / "instructions" / "shipped"

PACKAGE, RELEASE = "chatterbot-corpus", "1.3.3"

#: Categories whose longer entries are one question and its answers.
ANSWERS = frozenset({"computers", "emotion"})


def fetch(work: Path) -> tuple[dict[str, list[list[str]]], str]:
    """Download the source package; return category -> entries, and the licence text."""
    options = ["download", "--no-deps", "--no-binary", ":all:", "--dest", str(work)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *options, f"{PACKAGE}=={RELEASE}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"pip download failed:\n{done.stderr.strip()}")
    (archive,) = work.glob("chatterbot*.tar.gz")
    entries: dict[str, list[list[str]]] = {}
    licence = ""
    with tarfile.open(archive) as tar:
        for member in sorted(tar.getmembers(), key=lambda item: item.name):
            path = Path(member.name)
            if path.parent.name == "english" and path.suffix == ".yml":
                entries[path.stem] = yaml.safe_load(_text(tar, member))["conversations"]
            elif len(path.parts) == 2 and path.name == "license.md":
                licence = _text(tar, member)
    if not licence or not entries:
        raise SystemExit(f"{archive.name} holds no licence or no English part")
    return entries, licence


def pairs(category: str, entries: list[list[str]]) -> Iterator[tuple[str, str]]:
    """The different (question, answer) pairs of a category, in the order of its file."""
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        words = [tidy(str(utterance)) for utterance in entry]
        if len(words) > 2 and all(len(word) <= 1 for word in words):
            continue
        first = [words[0]] * (len(words) - 1) if category in ANSWERS else words[:-1]
        for pair in zip(first, words[1:], strict=True):
            if all(pair) and pair not in seen:
                seen.add(pair)
                yield pair


def tidy(text: str) -> str:
    """Unix line ends, no blanks around."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " ").strip()


def sources(rows: list[dict[str, str]], text: bytes, packed: bytes, given: int) -> str:
    """The text of SOURCES.md."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["category"]] = counts.get(row["category"], 0) + 1
    lines = [
        "# Where the shipped question and answer pairs come from",
        "",
        "Built by `tools/build_instructions.py`; do not edit by hand.",
        "",
        "## instructions.jsonl.xz",
        "",
        f"- contents: {len(rows):,} different pairs in {len(counts)} categories, English, one JSON",
        "  object a line with `category`, `question`, `answer`",
        f"- origin: PyPI sdist `{PACKAGE}` {RELEASE}, `chatterbot_corpus/data/english/*.yml`",
        f"  (unpacked, not installed); its {given:,} entries repeat many pairs, and each is kept",
        "  once; an entry that was a bare string is left out",
        "- licence: BSD-3-Clause, Copyright (c) 2017, Gunther Cox; the text, the package's own",
        "  `license.md`, is in `LICENSE-chatterbot-corpus.md` beside this file",
        "- the answers are its contributors' own: meant for trying things out, not for facts",
        f"- size: {len(text):,} bytes of text, {len(packed):,} compressed",
        f"- sha256 of the file: `{hashlib.sha256(packed).hexdigest()}`",
        f"- sha256 of the text: `{hashlib.sha256(text).hexdigest()}`",
        "",
        "| category | pairs |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in counts.items()),
    ]
    return "\n".join(lines) + "\n"


def compress(text: bytes) -> bytes:
    """Xz with fixed settings: the same text gives the same bytes."""
    return lzma.compress(text, check=lzma.CHECK_CRC64, preset=9 | lzma.PRESET_EXTREME)


def build() -> dict[str, bytes]:
    """Build everything in a temporary folder; return file name -> bytes."""
    with tempfile.TemporaryDirectory(prefix="instructions-") as folder:
        entries, licence = fetch(Path(folder))
    rows = [
        {"category": category, "question": question, "answer": answer}
        for category, conversations in entries.items()
        for question, answer in pairs(category, conversations)
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")
    packed = compress(text)
    given = sum(map(len, entries.values()))
    return {
        "instructions.jsonl.xz": packed,
        "LICENSE-chatterbot-corpus.md": (tidy(licence) + "\n").encode("utf-8"),
        "SOURCES.md": sources(rows, text, packed, given).encode("utf-8"),
    }


def main() -> int:
    """Write the pairs, or compare them with what is there."""
    parser = argparse.ArgumentParser(description="Rebuild the shipped question and answer pairs.")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write to")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args()
    different = []
    for name, content in build().items():
        path: Path = options.out / name
        same = path.is_file() and path.read_bytes() == content
        print(f"{name}: {len(content):,} bytes{'' if same else ', changed'}")
        if not same:
            different.append(name)
            if not options.check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    return 1 if different and options.check else 0


def _text(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    handle = tar.extractfile(member)
    if handle is None:
        raise SystemExit(f"{member.name} is no file")
    return handle.read().decode("utf-8")


if __name__ == "__main__":
    sys.exit(main())
