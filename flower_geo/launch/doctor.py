"""The ``doctor`` command: what would keep a run from working here, and what mends it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from rich.table import Table
from rich.text import Text

from flower_geo.config import CommonConfig
from flower_geo.errors import ConfigError, FlowerGeoError, ModelError, StateError
from flower_geo.launch.connections import check_file
from flower_geo.launch.environment import flwr_home, program, state_home
from flower_geo.launch.processes import free_ports, port_is_free
from flower_geo.launch.simulation import healthy
from flower_geo.observe.units import format_bytes, format_count

__all__ = ["Finding", "examine", "satisfies", "table"]

_OURS = "flower-geo"
#: Looked at where flower-geo itself is not installed but on the path.
_NEEDED = {
    "flwr": ">=1.42,<1.43", "torch": ">=2.9,<3", "transformers": ">=5.24,<6",
    "safetensors": ">=0.6", "tokenizers": ">=0.22", "datasets": ">=4.7,<5",
    "numpy": ">=2.1,<3", "pydantic": ">=2.10,<3", "psutil": ">=6", "typer": ">=0.16,<0.21",
}  # fmt: skip
_FLAG = "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"
#: Flower's ports: SuperLink, SuperNode, the SuperLink ``flwr run`` starts by itself.
_SUPERLINK_PORT, _SUPERNODE_PORT, _MANAGED_PORT = 8000, 9094, 39091
#: Room for Ray's object store; it falls back to slow files below this.
_SHARED_MEMORY = 64 * 2**20


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        level: ``ok``; ``warn``: works, with a catch; ``bad``: a run would fail.
        what: what was found.
        remedy: what mends it; empty when nothing needs to be done.
    """

    level: Literal["ok", "warn", "bad"]
    what: str
    remedy: str = ""

    @property
    def blocks(self) -> bool:
        """Whether a run would fail."""
        return self.level == "bad"


def examine(model: str, seq_len: int, batch_size: int, sites: int, run_dir: Path) -> list[Finding]:
    """Look at everything.

    Args:
        model: model of the runs to come.
        seq_len: tokens a sequence.
        batch_size: sequences a step.
        sites: sites that train on this machine at one time.
        run_dir: where run folders are to lie.
    """
    parts: list[Callable[[], Iterator[Finding]]] = [
        _versions, _programs, _flower, _ports,
        lambda: _folders(run_dir),
        lambda: _model(model, seq_len, batch_size, sites, run_dir),
        _hardware,
    ]  # fmt: skip
    return [finding for part in parts for finding in part()]


def table(findings: list[Finding]) -> Table:
    """The findings for people, the bad ones last, where they are seen."""
    shown = Table("", "found", "remedy", box=None, pad_edge=False)
    marks = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "bad": ("BAD", "bold red")}
    for finding in sorted(findings, key=lambda one: list(marks).index(one.level)):
        word, style = marks[finding.level]
        shown.add_row(Text(word, style=style), Text(finding.what), Text(finding.remedy))
    return shown


# -- software ------------------------------------------------------------------


def _versions() -> Iterator[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    yield Finding("ok", f"Python {version}")
    good = []
    for name, wanted in _requirements().items():
        try:
            there = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("bad", f"{name} is not installed", f'pip install "{name}{wanted}"')
            continue
        if satisfies(there, wanted):
            good.append(f"{name} {there}")
        else:
            yield Finding(
                "bad", f"{name} {there}, wanted {wanted}", f'pip install "{name}{wanted}"'
            )
    if good:
        yield Finding("ok", ", ".join(good))
    try:
        yield Finding("ok", f"ray {importlib.metadata.version('ray')} (for simulations)")
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "warn", "ray is not installed: no simulations on this machine",
            'pip install "flower-geo[sim]"; a site or coordinator does not need it',
        )  # fmt: skip


def _requirements() -> dict[str, str]:
    """Names and ranges this package was installed with, extras left out."""
    try:
        texts = importlib.metadata.requires(_OURS) or []
    except importlib.metadata.PackageNotFoundError:
        return _NEEDED
    found = {}
    for text in texts:
        match = re.match(r"([A-Za-z0-9._-]+)\s*([^;\[]*)$", text)
        if match:
            found[match[1]] = match[2].strip()
    return found or _NEEDED


def satisfies(version: str, wanted: str) -> bool:
    """Whether a released version lies in a range such as ``>=1.42,<1.43``."""
    have = _numbers(version)
    compare: dict[str, Callable[[list[int]], bool]] = {
        ">=": lambda bound: have >= bound, "<=": lambda bound: have <= bound,
        "==": lambda bound: have == bound, "!=": lambda bound: have != bound,
        ">": lambda bound: have > bound, "<": lambda bound: have < bound,
    }  # fmt: skip
    for clause in filter(None, (one.strip() for one in wanted.split(","))):
        match = re.match(r"(>=|<=|==|!=|>|<)\s*(.+)", clause)
        if match and not compare[match[1]](_numbers(match[2])):
            return False
    return True


def _numbers(version: str) -> list[int]:
    numbers = [int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", version)[0])]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def _programs() -> Iterator[Finding]:
    for name in ("flwr", "flower-superlink", "flower-supernode", "flower-superexec"):
        try:
            path = program(name)
        except StateError as error:
            what, _, remedy = str(error).partition("; ")
            yield Finding("bad", what, remedy)
            continue
        if shutil.which(name) != path:
            yield Finding(
                "warn", f"{name} is not this environment's on PATH",
                "flower-geo copes; before starting Flower by hand, activate the environment "
                f"(export PATH={Path(path).parent}:$PATH)",
            )  # fmt: skip
            return
    yield Finding("ok", "Flower's commands are on PATH")


def _flower() -> Iterator[Finding]:
    if os.environ.get(_FLAG) == "1":
        yield Finding("ok", f"{_FLAG}=1")
    else:
        uv = "" if shutil.which("uv") else ", and there is no uv"
        yield Finding(
            "warn", f"{_FLAG} is not set: plain flwr run builds an environment for each run{uv}",
            f"export {_FLAG}=1 before starting Flower by hand (flower-geo sets it itself)",
        )  # fmt: skip
    home = flwr_home()
    try:
        check_file(home)
        yield Finding("ok", f"Flower's configuration in {home}")
    except ConfigError as error:
        what, _, remedy = str(error).partition("; ")
        yield Finding("bad", what, remedy or "set FLWR_HOME to a folder that can be read")
    if healthy(_MANAGED_PORT, timeout=0.5):
        yield Finding(
            "warn", f"a SuperLink of plain 'flwr run' is at work (port {_MANAGED_PORT}); it keeps "
            "the environment it was started with",
            "stop it by its pid after changing the environment (flower-geo run does not use it)",
        )  # fmt: skip
    proxies = [name for name in os.environ if name.lower() in ("http_proxy", "all_proxy")]
    direct = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if proxies and "127.0.0.1" not in direct and direct.strip() != "*":
        yield Finding(
            "warn", f"{proxies[0]} is set and 127.0.0.1 is not excepted",
            "export NO_PROXY=127.0.0.1,localhost before starting Flower by hand",
        )  # fmt: skip


def _ports() -> Iterator[Finding]:
    try:
        free_ports(8)
    except OSError as error:
        yield Finding(
            "bad", f"no free ports on 127.0.0.1: {error.strerror}",
            "allow this user to listen on the loopback",
        )  # fmt: skip
        return
    yield Finding("ok", "free ports on 127.0.0.1")
    for port, name in ((_SUPERLINK_PORT, "superlink"), (_SUPERNODE_PORT, "supernode")):
        if not port_is_free(port):
            yield Finding(
                "warn", f"port {port}, flower-{name}'s usual one, is taken",
                f"start flower-{name} by hand with another --port (flower-geo picks free ones)",
            )  # fmt: skip


# -- machine -------------------------------------------------------------------


def _folders(run_dir: Path) -> Iterator[Finding]:
    for folder, what, remedy in (
        (run_dir.expanduser(), "run-dir", "set run-dir to a folder that can be written"),
        (state_home(), "state folder", "set FLOWER_GEO_HOME to a folder that can be written"),
        (Path(tempfile.gettempdir()), "temporary folder", "set TMPDIR to one that can be written"),
    ):
        there = _nearest_existing(folder)
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
            yield Finding("ok", f"{what} {folder} can be written")
        except OSError as error:
            yield Finding("bad", f"{what} {folder}: {error.strerror or error}", remedy)


def _nearest_existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _model(
    model: str, seq_len: int, batch_size: int, sites: int, run_dir: Path
) -> Iterator[Finding]:
    try:
        from flower_geo.models import memory_estimate

        need = memory_estimate(model, None, seq_len, batch_size)
    except ModelError as error:
        what, _, remedy = str(error).partition("; ")
        yield Finding("bad", what, remedy or "choose a named model or a local folder")
        return
    except (FlowerGeoError, ImportError) as error:
        yield Finding("bad", f"the model cannot be measured: {error}", "mend the installation")
        return
    for file in sorted(Path(model).glob("*.safetensors")):
        if not _whole(file):
            yield Finding("bad", f"{file} is no whole safetensors file", "copy it again")
    name = f"{model} ({format_count(need.parameters)} parameters)"
    wanted = need.server + sites * need.site
    free = psutil.virtual_memory().available
    text = (
        f"memory for {name}: about {format_bytes(need.server)} coordinator + {sites} × "
        f"{format_bytes(need.site)} site, {format_bytes(free)} free"
    )
    if wanted <= 0.9 * free:
        yield Finding("ok", text)
    elif max(need.server, need.site) <= 0.9 * free:
        yield Finding(
            "warn", text, "spread sites over machines, or lower batch-size or seq-len",
        )  # fmt: skip
    else:
        yield Finding("bad", text, "take a smaller model, batch-size or seq-len, or more memory")
    # master, shadow, momentum and deltas of each checkpoint kept and of the one
    # being written, the exported model, and the sites' spooled replies
    keep = int(CommonConfig.model_fields["checkpoint_keep"].default)
    fp32 = 4 * need.parameters
    disk = (keep + 1) * 4 * fp32 + 2 * fp32 + sites * fp32
    free = shutil.disk_usage(_nearest_existing(run_dir.expanduser())).free
    text = f"disk for a run of {model}: about {format_bytes(disk)}, {format_bytes(free)} free"
    if disk <= 0.9 * free:
        yield Finding("ok", text)
    else:
        yield Finding("bad", text, "free space, lower checkpoint-keep, or move run-dir")


def _whole(file: Path) -> bool:
    """Whether a safetensors file has all the bytes its header speaks of."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            return True
    except (OSError, SafetensorError):
        return False


def _hardware() -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        return  # already found missing
    cores = os.cpu_count() or 1
    if torch.cuda.is_available():
        names = ", ".join(
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        )
        yield Finding("ok", f"{cores} CPU cores, GPU: {names}")
    else:
        yield Finding("ok", f"{cores} CPU cores, no GPU")
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free < _SHARED_MEMORY:
        yield Finding(
            "warn", f"/dev/shm has {format_bytes(shutil.disk_usage(shared).free)} free: "
            "simulations are slow", "in a container, start it with --shm-size=1g",
        )  # fmt: skip
