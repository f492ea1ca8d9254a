"""Where things lie on this machine, and what child processes are told."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from flower_geo.errors import StateError

__all__ = ["child_environment", "flwr_home", "program", "state_home"]

#: Switches every Flower process of ours runs with.  Without the third each one
#: builds an environment of its own with uv before it runs an app.
_ALWAYS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray hides the GPUs of an actor that asked for none only with a warning a process.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONUNBUFFERED": "1",
}

#: SuperExec asks for work this often, in seconds (Flower's default is 1).
_QUICK = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}


def program(name: str) -> str:
    """Path of a command that came with this environment, such as ``flower-superlink``.

    Raises:
        StateError: it is not installed.
    """
    beside = Path(sys.executable).parent / name
    if beside.is_file() and os.access(beside, os.X_OK):
        return str(beside)
    found = shutil.which(name)
    if found is None:
        raise StateError(
            f"command '{name}' is not in {beside.parent} nor on PATH; install flower-geo with "
            'its dependencies (pip install "flower-geo[sim]")'
        )
    return found


def flwr_home(environ: Mapping[str, str] | None = None) -> Path:
    """Folder of the user's Flower configuration: ``$FLWR_HOME``, else ``~/.flwr``."""
    chosen = (os.environ if environ is None else environ).get("FLWR_HOME")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".flwr"


def state_home() -> Path:
    """Folder for what the command keeps: ``$FLOWER_GEO_HOME``, else the user's state folder."""
    chosen = os.environ.get("FLOWER_GEO_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "flower-geo"


def child_environment(
    extra: Mapping[str, str] | None = None, *, home: Path | None = None
) -> dict[str, str]:
    """Environment of a Flower process that the command starts.

    Flower's processes find each other by name on PATH, so the folder of this
    interpreter comes first there even where the environment is not activated.

    Args:
        extra: variables that win over everything else.
        home: the process's ``FLWR_HOME``.
    """
    env = dict(os.environ)
    env.update(_ALWAYS)
    for key, value in _QUICK.items():
        env.setdefault(key, value)
    folder = str(Path(sys.executable).parent)
    parts = [part for part in env.get("PATH", os.defpath).split(os.pathsep) if part != folder]
    env["PATH"] = os.pathsep.join([folder, *parts])
    # a proxy would be asked for the loopback, too
    if any(name.lower() in ("http_proxy", "all_proxy") for name in env):
        direct = env.get("no_proxy") or env.get("NO_PROXY") or ""
        if "127.0.0.1" not in direct and direct.strip() != "*":
            direct = ",".join(filter(None, [direct, "127.0.0.1", "localhost"]))
        env["no_proxy"] = env["NO_PROXY"] = direct
    if home is not None:
        env["FLWR_HOME"] = str(home)
    env.update(extra or {})
    return env
