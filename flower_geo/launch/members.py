"""One Flower process of a local cluster: how it is started, found again and stopped."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flower_geo.errors import ConfigError, StateError
from flower_geo.launch import processes
from flower_geo.launch.environment import child_environment, program
from flower_geo.launch.processes import MARK, ProcessRef
from flower_geo.launch.simulation import wait_healthy

__all__ = ["Member", "node_config_text"]

_START_SECONDS = 90.0
_PORT_TRIES = 3
_NODE_ID = re.compile(rb"SuperNode ID:\s*(\d+)")


def node_config_text(values: Mapping[str, Any]) -> str:
    """``values`` as ``flower-supernode --node-config`` reads them.

    Raises:
        ConfigError: a text holds both kinds of quotes or a line break.
    """
    parts = []
    for key, value in values.items():
        if isinstance(value, bool):
            text = "true" if value else "false"
        elif isinstance(value, (int, float)):
            text = repr(value)
        else:
            # TOML's literal strings have no escapes, so a path is kept as it is
            text = str(value)
            quote = "'" if "'" not in text else '"'
            if "\n" in text or quote in text or (quote == '"' and "\\" in text):
                raise ConfigError(
                    f"node-config {key}={text!r} cannot be passed on: "
                    "leave out line breaks and mixed quotes"
                )
            text = f"{quote}{text}{quote}"
        parts.append(f"{key}={text}")
    return " ".join(parts)


@dataclass
class Member:
    """A ``flower-superlink`` or ``flower-supernode`` with its own FLWR_HOME.

    Attributes:
        kind: which of the two.
        name: ``superlink`` or the site's name.
        home: its FLWR_HOME.
        log: file its output is appended to.
        mark: what its descendants carry in their environment.
        env: variables of its environment beside the usual ones.
        superlink: address a SuperNode dials.
        node_config: a SuperNode's node-config.
        port: where its API listens on 127.0.0.1; chosen at the first start.
        process: the process, once started.
        log_offset: size of the log at the newest start.
        arguments: words of its command line beside the usual ones.
        changed: called after a restart.
    """

    kind: Literal["superlink", "supernode"]
    name: str
    home: Path
    log: Path
    mark: str
    env: dict[str, str] = field(default_factory=dict)
    superlink: str = ""
    node_config: dict[str, Any] = field(default_factory=dict)
    port: int = 0
    process: ProcessRef | None = None
    log_offset: int = 0
    arguments: list[str] = field(default_factory=list)
    changed: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    # -- facts -----------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Its process id.

        Raises:
            StateError: it was never started.
        """
        if self.process is None:
            raise StateError(f"{self.name} was never started")
        return self.process.pid

    @property
    def node_id(self) -> str:
        """The SuperNode's id since its newest start; empty until it has one."""
        try:
            with self.log.open("rb") as file:
                file.seek(self.log_offset)
                found = _NODE_ID.findall(file.read())
        except OSError:
            return ""
        return found[-1].decode() if found else ""

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.alive()

    def to_json(self) -> dict[str, Any]:
        """Mapping from which :meth:`from_json` makes it again."""
        return {
            "kind": self.kind, "name": self.name, "home": str(self.home), "log": str(self.log),
            "mark": self.mark, "env": self.env, "superlink": self.superlink,
            "node_config": self.node_config, "port": self.port, "log_offset": self.log_offset,
            "arguments": self.arguments,
            "process": None if self.process is None else self.process.to_json(),
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Member:
        """Reverse of :meth:`to_json`."""
        process = value["process"]
        return cls(
            kind=value["kind"], name=value["name"], home=Path(value["home"]),
            log=Path(value["log"]), mark=value["mark"], env=dict(value["env"]),
            superlink=value["superlink"], node_config=dict(value["node_config"]),
            port=int(value["port"]), log_offset=int(value["log_offset"]),
            arguments=[str(word) for word in value.get("arguments", [])],
            process=None if process is None else ProcessRef.from_json(process),
        )  # fmt: skip

    # -- life ------------------------------------------------------------------

    def start(self, *, tethered: bool = False) -> None:
        """Start the process; :meth:`wait` waits until it serves.

        Args:
            tethered: it ends when this process does (Linux, main thread only).
        """
        self.port = self.port or processes.free_ports(1)[0]
        self.log_offset = self.log.stat().st_size if self.log.exists() else 0
        self.home.mkdir(parents=True, exist_ok=True)
        command = [
            program(f"flower-{self.kind}"), "--insecure", "--host", "127.0.0.1",
            "--port", str(self.port),
        ]  # fmt: skip
        if self.kind == "superlink":
            command.append("--disable-runtime-dependency-installation")
        else:
            command += ["--superlink", self.superlink]
            command += ["--node-config", node_config_text(self.node_config)]
        self.process = processes.start(
            [*command, *self.arguments],
            env=child_environment({**self.env, MARK: self.mark}, home=self.home),
            log=self.log,
            # the kernel ties a child to the thread that made it
            tethered=tethered and threading.current_thread() is threading.main_thread(),
        )

    def wait(self, *, tethered: bool = False) -> None:
        """Wait until a SuperLink serves, or a SuperNode is online.

        A port that another program took meanwhile is changed for another one.

        Raises:
            StateError: it ended or is not ready in time; with the log's last lines.
        """
        for _ in range(_PORT_TRIES):
            if self._ready():
                return
            taken = not self.alive() and not processes.port_is_free(self.port)
            self.kill()
            if not taken:
                break
            self.port = 0
            self.start(tethered=tethered)
        raise StateError(
            f"{self.name} (flower-{self.kind}) did not start; last lines of {self.log}:\n"
            + processes.last_lines(self.log)
        )

    def _ready(self) -> bool:
        assert self.process is not None
        if self.kind == "superlink":
            return wait_healthy(self.process, self.port, _START_SECONDS)
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self.node_id:
                return True
            if not self.process.alive():
                return False
            time.sleep(0.05)
        return False

    def kill(self, *, tree: bool = True) -> None:
        """SIGKILL it, as when its machine is lost.

        Args:
            tree: with all it started; else the one process only, whose children
                end by themselves a moment later.
        """
        if self.process is not None:
            self.process.kill()
        if tree:
            processes.kill_marked(self.mark)

    def terminate(self) -> None:
        """SIGTERM it; a SuperNode then signs off at the SuperLink."""
        if self.process is not None:
            self.process.terminate()

    def restart(self, *, wait: bool = True) -> None:
        """Stop it if it runs, and start it again with the same port, folder and node-config."""
        if self.process is not None:
            processes.stop([self.process], self.mark)
        self.start()
        if wait:
            self.wait()
        self.changed()
