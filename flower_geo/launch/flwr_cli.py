"""Flower's own command line, asked for JSON.

``flwr`` exits 0 also when it failed and says so in its JSON only, and a call
costs a second of a core, so it is called rarely.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_geo.errors import ConfigError, RunFailed
from flower_geo.launch.environment import child_environment, program

__all__ = ["FlwrCli", "NodeStatus", "RunStatus", "SuperLinkUnreachable", "toml_table"]

_TIMEOUT = 120.0
_SETTINGS = "flower-geo-"  # temporary folder of a submission, with the command's pid
_UNREACHABLE = "Connection to the SuperLink is unavailable"


class SuperLinkUnreachable(RunFailed):
    """The SuperLink does not answer."""


@dataclass(frozen=True)
class RunStatus:
    """What the SuperLink says of a run.

    Attributes:
        status: ``pending``, ``starting``, ``running`` or ``finished:<how>``.
        details: reason, where there is one.
    """

    status: str
    details: str

    @property
    def finished(self) -> bool:
        """Whether the run has ended, however."""
        return self.status.startswith("finished")

    @property
    def completed(self) -> bool:
        """Whether it ended well."""
        return self.status == "finished:completed"


@dataclass(frozen=True)
class NodeStatus:
    """What the SuperLink says of a SuperNode."""

    node_id: str
    status: str


def toml_table(values: Mapping[str, Any]) -> str:
    """A flat TOML table; a JSON text, integer or truth value is also one of TOML."""
    lines = []
    for key, value in values.items():
        if isinstance(value, float):
            text = repr(value)  # as TOML, and unlike JSON, Python writes inf
        else:
            text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"{key} = {text}\n")
    return "".join(lines)


class FlwrCli:
    """``flwr`` with one connection.

    Args:
        connection: name of the connection.
        home: folder with the ``config.toml`` that holds it.
    """

    def __init__(self, connection: str, home: Path) -> None:
        self.connection = connection
        self.home = home
        self._running: set[subprocess.Popen[str]] = set()

    def command(self, *arguments: str) -> list[str]:
        """The whole command line."""
        return [program("flwr"), *arguments]

    def environment(self) -> dict[str, str]:
        """What it is run with."""
        return child_environment(home=self.home)

    def _json(self, *arguments: str) -> dict[str, Any]:
        with subprocess.Popen(
            self.command(*arguments, "--format", "json"),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process:
            self._running.add(process)
            try:
                out, err = process.communicate(timeout=_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                out = None
            except BaseException:
                process.kill()
                raise
            finally:
                self._running.discard(process)
        if out is None:
            raise SuperLinkUnreachable(
                f"'flwr {arguments[0]}' gave no answer in {_TIMEOUT:.0f} s; "
                f"look at the SuperLink behind connection '{self.connection}'"
            ) from None
        answer = _first_object(out)
        if answer is not None and answer.get("success"):
            return answer
        message = str((answer or {}).get("error-message") or err or out)
        raise self._error(arguments[0], message)

    def _error(self, what: str, message: str) -> Exception:
        if _UNREACHABLE in message:
            return SuperLinkUnreachable(
                f"the SuperLink of connection '{self.connection}' does not answer; start it, or "
                f"mend its address in {self.home / 'config.toml'}"
            )
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        # flwr puts what it was doing before the reason; the reason comes last
        reason = lines[-1] if lines else "no reason given"
        return RunFailed(f"'flwr {what}' was refused: {reason}")

    def submit(
        self, app: Path, run_config: Mapping[str, Any], federation_config: Mapping[str, Any]
    ) -> str:
        """Start a run; return its id.

        Args:
            app: the app's folder.
            run_config: overrides, kebab-case.
            federation_config: overrides for a simulated federation.

        Raises:
            SuperLinkUnreachable: nobody answers at the connection's address.
            RunFailed: Flower refused the run.
        """
        arguments = ["run", str(app), self.connection]
        # One file of values: the command line's own syntax has no escapes.
        _clear_abandoned()
        with tempfile.TemporaryDirectory(prefix=f"{_SETTINGS}{os.getpid()}-") as folder:
            for name, values in (
                ("run-config", run_config),
                ("federation-config", federation_config),
            ):
                if values:
                    file = Path(folder) / f"{name}.toml"
                    file.write_text(toml_table(values), encoding="utf-8")
                    arguments += [f"--{name}", str(file)]
            answer = self._json(*arguments)
        return str(answer["run-id"])

    def status(self, run_id: str) -> RunStatus:
        """Ask how a run stands.

        Raises:
            SuperLinkUnreachable: nobody answers.
            RunFailed: the SuperLink does not know the run (it was started anew).
        """
        runs: Sequence[Mapping[str, Any]] = self._json(
            "list", self.connection, "--run-id", run_id
        ).get("runs", [])
        if not runs:
            raise RunFailed(f"the SuperLink knows no run {run_id}")
        details = str(runs[0].get("status-details", ""))
        return RunStatus(str(runs[0]["status"]), "" if details == "N/A" else details)

    def nodes(self) -> list[NodeStatus]:
        """SuperNodes the SuperLink knows of."""
        answer = self._json("supernode", "list", self.connection)
        return [NodeStatus(str(n["node-id"]), str(n["status"])) for n in answer.get("nodes", [])]

    def stop(self, run_id: str) -> None:
        """Ask the SuperLink to end a run."""
        self._json("stop", run_id, self.connection)

    def cancel(self) -> None:
        """End the questions that other threads are waiting for."""
        for process in list(self._running):
            process.kill()

    def check_name(self) -> None:
        """Refuse a connection name that would be read as an option."""
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", self.connection):
            raise ConfigError(f"connection name {self.connection!r} has odd characters in it")


def _clear_abandoned() -> None:
    """Remove settings of commands that were killed while they submitted."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SETTINGS}*-*"):
        pid = folder.name.removeprefix(_SETTINGS).partition("-")[0]
        try:
            if not pid.isdigit() or folder.stat().st_uid != os.getuid():
                continue
            os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (OSError, OverflowError):
            continue  # gone meanwhile, or somebody's


def _first_object(text: str) -> dict[str, Any] | None:
    """The JSON object in ``text``, which may have other lines around it."""
    start = text.find("{")
    while start >= 0:
        try:
            value, _ = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            start = text.find("{", start + 1)
            continue
        return value if isinstance(value, dict) else None
    return None
