"""Connections in Flower's own configuration file, ``$FLWR_HOME/config.toml``.

The file is the user's: it is edited as text, so that comments and order stay,
checked against what the edit was meant to do, and replaced in one rename.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_geo.errors import ConfigError

__all__ = [
    "Connection",
    "add_connection",
    "check_file",
    "find_connection",
    "locked",
    "remove_connection",
    "replace_text",
]

#: What Flower itself writes where there is no file.
_FIRST = '[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = ":local:"\n'

#: Addresses for which ``flwr run`` starts a SuperLink of its own.
_SIMULATED = (":local:", ":local-in-memory:")


@dataclass(frozen=True)
class Connection:
    """One ``[superlink.<name>]`` table.

    Attributes:
        name: the table's name.
        address: ``host:port``, or one of Flower's words for local simulation.
        insecure: no TLS.
    """

    name: str
    address: str
    insecure: bool = False

    @property
    def simulated(self) -> bool:
        """Whether it stands for a simulation on this machine."""
        return self.address in _SIMULATED

    @property
    def on_this_machine(self) -> bool:
        """Whether the SuperLink is reached over the loopback."""
        host = self.address.rpartition(":")[0].strip("[]")
        if host == "localhost":
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


def _config_file(home: Path) -> Path:
    return home / "config.toml"


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML ({error}); mend it or move it away") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _tables(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = config.get("superlink", {})
    if not isinstance(found, dict):
        return {}
    return {name: table for name, table in found.items() if isinstance(table, dict)}


def find_connection(home: Path, name: str) -> Connection:
    """Look up a connection by name.

    Raises:
        ConfigError: there is none of that name (the message lists those there
            are), or the file cannot be read.
    """
    path = _config_file(home)
    tables = _tables(_parse(_read(path), path))
    if name not in tables:
        known = ", ".join(sorted(tables)) or "none"
        raise ConfigError(
            f"no connection '{name}' in {path} (there: {known}); write a [superlink.{name}] table "
            f"with its address, or start a local one with: flower-geo cluster up --name {name}"
        )
    table = tables[name]
    # A table with options and no address is Flower's old spelling of a simulation.
    address = str(table.get("address", ":local:" if "options" in table else ""))
    return Connection(name, address, bool(table.get("insecure", False)))


def check_file(home: Path) -> None:
    """Check that Flower's configuration can be read, or is not there yet.

    Raises:
        ConfigError: it cannot.
    """
    path = _config_file(home)
    _parse(_read(path), path)


def add_connection(home: Path, name: str, address: str) -> None:
    """Write an insecure (loopback) connection, keeping all else in the file.

    Raises:
        ConfigError: the name is taken by another address, or the file cannot be
            read or written.
    """
    block = f'[superlink.{name}]\naddress = "{address}"\ninsecure = true\n'

    def edit(text: str, config: dict[str, Any], path: Path) -> str:
        there = _tables(config).get(name)
        if there is not None:
            raise ConfigError(
                f"{path} already has a connection '{name}' ({there.get('address')}); remove its "
                f"[superlink.{name}] table or choose another --name"
            )
        text = text or _FIRST
        return text.rstrip("\n") + "\n\n" + block

    _change(home, edit, {name: {"address": address, "insecure": True}}, ())


def remove_connection(home: Path, name: str, address: str) -> bool:
    """Take a connection out again; True when it was there.

    A connection of that name with another address is somebody else's and stays.

    Raises:
        ConfigError: the file cannot be read or written, or spells the table in
            a way that cannot be cut out.
    """
    path = _config_file(home)
    there = _tables(_parse(_read(path), path)).get(name)
    if there is None or there.get("address") != address:
        return False

    def edit(text: str, config: dict[str, Any], path: Path) -> str:
        del config, path
        return _cut(text, name)

    _change(home, edit, {}, (name,))
    return True


def _cut(text: str, name: str) -> str:
    """``text`` without the lines of the table ``[superlink.<name>]``."""
    kept, inside = [], False
    quoted = re.escape(name)
    header = re.compile(rf"""\s*\[\s*superlink\s*\.\s*(?:{quoted}|"{quoted}"|'{quoted}')\s*\]""")
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("["):
            inside = bool(header.match(line))
        if not inside:
            kept.append(line)
    return "".join(kept).rstrip("\n") + "\n"


def _change(
    home: Path,
    edit: Callable[[str, dict[str, Any], Path], str],
    added: dict[str, Any],
    removed: tuple[str, ...],
) -> None:
    """Edit the file under a lock, prove the edit, and put the new file in place."""
    path = _config_file(home)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with locked(home):
            target = Path(os.path.realpath(path))  # a linked file stays a link
            text = _read(target)
            before = _parse(text or _FIRST, path)
            changed = edit(text, _parse(text, path), path)
            wanted = {**before, "superlink": {**before.get("superlink", {}), **added}}
            for name in removed:
                wanted["superlink"].pop(name, None)
            try:
                proved = tomllib.loads(changed) == wanted
            except tomllib.TOMLDecodeError:
                proved = False
            if not proved:
                name = next(iter(added), "") or removed[0]
                raise ConfigError(
                    f"{path} is written in a way that cannot be edited safely; "
                    f"add or remove its [superlink.{name}] table by hand"
                )
            replace_text(target, changed)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder; it leaves no file and dies with its holder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def replace_text(path: Path, text: str, *, mode: int | None = None) -> None:
    """Put a new file in the place of ``path`` in one rename, with the old one's mode."""
    if mode is None:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
