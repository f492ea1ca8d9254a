"""A real deployment on this machine: one SuperLink, N SuperNodes, free loopback ports.

The processes are detached and outlive the command that started them; a file
says which they are.  Everything lies in one folder::

    <state home>/clusters/<name>/
      cluster.json       processes, ports, the connection
      logs/*.log
      superlink/         its FLWR_HOME
      site-0/flwr        a SuperNode's FLWR_HOME
      site-0/state       what the site keeps over runs
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flower_geo.config import check_name
from flower_geo.errors import ConfigError, FlowerGeoError, StateError
from flower_geo.launch import environment, processes
from flower_geo.launch.connections import add_connection, locked, remove_connection, replace_text
from flower_geo.launch.flwr_cli import FlwrCli
from flower_geo.launch.members import Member

__all__ = ["LocalCluster", "MemberStatus"]


@dataclass(frozen=True)
class MemberStatus:
    """A line of the status table.

    Attributes:
        name: ``superlink`` or a site's name.
        pid: process id.
        port: loopback port of its API.
        running: whether the process lives.
        node_id: the SuperNode's id.
        online: what the SuperLink says of the node; empty for itself.
    """

    name: str
    pid: int
    port: int
    running: bool
    node_id: str
    online: str


class LocalCluster:
    """See the module text; in a ``with`` block it is up, and ends with this process.

    Args:
        sites: SuperNodes.
        name: of the cluster and of the connection ``flwr run APP <name>`` uses.
        folder: instead of the usual one.
        node_config: node-config of all sites, over the usual keys
            (``partition-id``, ``num-partitions``, ``site``, ``state-dir``).
        site_config: by site number, over that.
        env: environment variables of all processes.
        flwr_home: folder of the Flower configuration that gets the connection;
            the user's own by default.
        database: the SuperLink keeps its memory in a file, and over a restart.

    Attributes:
        superlink: the SuperLink, a :class:`Member`.
        supernodes: the SuperNodes, by site number.
    """

    def __init__(
        self,
        sites: int = 2,
        *,
        name: str = "geo",
        folder: Path | None = None,
        node_config: Mapping[str, Any] | None = None,
        site_config: Mapping[int, Mapping[str, Any]] | None = None,
        env: Mapping[str, str] | None = None,
        flwr_home: Path | None = None,
        database: bool = False,
    ) -> None:
        if sites < 1:
            raise ConfigError(f"--sites {sites}: a cluster has at least one site")
        beyond = [index for index in site_config or {} if not 0 <= index < sites]
        if beyond:
            raise ConfigError(f"--site-config {beyond[0]}: sites are numbered 0 to {sites - 1}")
        self.connection = check_name(name, "cluster name")
        self.folder = folder or _usual_folder(name)
        self.flwr_home = flwr_home or environment.flwr_home()
        extra, mark, logs = dict(env or {}), processes.new_mark(), self.folder / "logs"
        memory = self.folder / "superlink" / "state.db"  # goes with its FLWR_HOME
        self.superlink = Member(
            "superlink", "superlink", self.folder / "superlink", logs / "superlink.log",
            f"{mark}-superlink", extra,
            arguments=["--database", str(memory)] if database else [],
        )  # fmt: skip
        self.supernodes = []
        for index in range(sites):
            own = self.folder / f"site-{index}"
            values = {
                "partition-id": index, "num-partitions": sites, "site": f"site-{index}",
                "state-dir": str(own / "state"),
                **(node_config or {}), **(site_config or {}).get(index, {}),
            }  # fmt: skip
            self.supernodes.append(
                Member(
                    "supernode", f"site-{index}", own / "flwr", logs / f"site-{index}.log",
                    f"{mark}-site-{index}", extra, node_config=values,
                )
            )  # fmt: skip
        self._own()

    # -- facts -----------------------------------------------------------------

    @property
    def address(self) -> str:
        """``host:port`` of the SuperLink."""
        return f"127.0.0.1:{self.superlink.port}"

    @property
    def members(self) -> list[Member]:
        """SuperLink and SuperNodes."""
        return [self.superlink, *self.supernodes]

    @property
    def cli(self) -> FlwrCli:
        """``flwr`` with this cluster's connection."""
        return FlwrCli(self.connection, self.flwr_home)

    @classmethod
    def load(cls, name: str = "geo", *, folder: Path | None = None) -> LocalCluster:
        """The cluster of that name as its file describes it.

        Raises:
            ConfigError: there is none.
            StateError: its file cannot be read.
        """
        folder = folder or _usual_folder(check_name(name, "cluster name"))
        file = folder / "cluster.json"
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            members = [Member.from_json(value) for value in stored["members"]]
            cluster = cls(
                len(members) - 1, name=name, folder=folder, flwr_home=Path(stored["flwr_home"])
            )
        except FileNotFoundError:
            raise ConfigError(
                f"no cluster '{name}' is up ({folder}); start it with: "
                f"flower-geo cluster up --name {name}"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateError(
                f"{file} cannot be read ({error}); stop its processes by hand and remove it"
            ) from error
        cluster.superlink, *cluster.supernodes = members
        cluster._own()
        return cluster

    def _own(self) -> None:
        """Have the file follow when a member is started anew."""
        for member in self.members:
            member.changed = self._store

    def status(self) -> list[MemberStatus]:
        """How all members do; asks the SuperLink where it lives."""
        online = {}
        if self.superlink.alive():
            try:
                online = {node.node_id: node.status for node in self.cli.nodes()}
            except FlowerGeoError as error:
                online = {"": str(error)}
        return [
            MemberStatus(
                member.name, member.process.pid if member.process else 0, member.port,
                member.alive(), member.node_id,
                "" if member.kind == "superlink"
                else online.get(member.node_id, online.get("", "unknown")),
            )
            for member in self.members
        ]  # fmt: skip

    # -- life ------------------------------------------------------------------

    def up(self, *, tethered: bool = False) -> Self:
        """Start everything and wait until all sites are online.

        Args:
            tethered: all ends when this process does.

        Raises:
            ConfigError: a cluster of that name is up, or its connection's name
                is taken.
            StateError: a process did not start; nothing is left behind.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(
                f"cannot make {self.folder}: {error.strerror or error}; "
                "set FLOWER_GEO_HOME to a folder that can be written"
            ) from error
        with locked(self.folder):
            self._clear_old()
            try:
                self.superlink.start(tethered=tethered)
                self.superlink.wait(tethered=tethered)
                for node in self.supernodes:
                    node.superlink = self.address
                    node.start(tethered=tethered)
                for node in self.supernodes:
                    node.wait(tethered=tethered)
                self._store()
                add_connection(self.flwr_home, self.connection, self.address)
            except BaseException:
                self._stop()
                (self.folder / "cluster.json").unlink(missing_ok=True)
                raise
        return self

    def _clear_old(self) -> None:
        """Clear away what a cluster of this name left, unless it lives."""
        if not (self.folder / "cluster.json").exists():
            return
        old = LocalCluster.load(self.connection, folder=self.folder)
        if any(member.alive() for member in old.members):
            raise ConfigError(
                f"cluster '{self.connection}' is up already; use it, or end it with: "
                f"flower-geo cluster down --name {self.connection}"
            )
        old._end()

    def _store(self) -> None:
        stored = {
            "name": self.connection, "address": self.address, "flwr_home": str(self.flwr_home),
            "members": [member.to_json() for member in self.members],
        }  # fmt: skip
        replace_text(self.folder / "cluster.json", json.dumps(stored, indent=1) + "\n", mode=0o600)

    def down(self, *, purge: bool = False) -> None:
        """Stop this cluster's processes, and those only, and remove its connection.

        Args:
            purge: remove the folder with logs and the sites' state as well;
                else those stay, so that a run can go on after the next ``up``.
        """
        if not self.folder.exists():
            return
        with locked(self.folder):
            self._end()
        if purge:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self) -> None:
        self._stop()
        remove_connection(self.flwr_home, self.connection, self.address)
        (self.folder / "cluster.json").unlink(missing_ok=True)
        for member in self.members:
            shutil.rmtree(member.home, ignore_errors=True)

    def _stop(self) -> None:
        """Everything dies at once: nobody is to be told, the SuperLink goes too."""
        for member in self.members:
            if member.process is not None:
                member.process.terminate()
        processes.wait_gone([m.process for m in self.members if m.process is not None], 1.5)
        for member in self.members:
            member.kill()

    def __enter__(self) -> Self:
        return self.up(tethered=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()


def _usual_folder(name: str) -> Path:
    return environment.state_home() / "clusters" / name
