"""The ServerApp at work in a run folder: is there one, and how to end one that lost its run."""

from __future__ import annotations

from pathlib import Path

import psutil

from flower_geo.launch.processes import ProcessRef, wait_gone

__all__ = ["end_server", "server_at_work"]

_GRACE = 10.0  # seconds for a last write


def server_at_work(folder: Path) -> ProcessRef | None:
    """The living ServerApp that a run folder's ``server.pid`` names, on this machine."""
    try:
        server = ProcessRef.of(int((folder / "server.pid").read_text().split()[0]))
    except (OSError, ValueError, IndexError):
        return None
    return server if _is_server(server) else None


def end_server(folder: Path | None, server: ProcessRef | None = None) -> None:
    """End a ServerApp whose run the SuperLink has given up, if it still lives here.

    It may be stopped, or cut off from a SuperLink that forgot it; either way it
    holds the run folder, and the next life of the server could not begin.

    Args:
        folder: the run's folder, if it is here.
        server: the ServerApp, where it is known already.
    """
    if server is None or not server.alive():
        server = None if folder is None else server_at_work(folder)
    if server is None or not _is_server(server):
        return
    try:
        server.terminate()
        if not wait_gone([server], _GRACE):
            server.kill()
    except psutil.AccessDenied:
        return  # another user's: its own limits must end it


def _is_server(server: ProcessRef) -> bool:
    process = server.process()
    try:
        return process is not None and "flwr-" in " ".join(process.cmdline())
    except psutil.Error:
        return False
