"""Where a site's worker process is found, and whether one lives.

    <state-dir>/<run-name>-<uid>/<site>/
      worker.log
      worker/{lock,socket}     while a worker lives

The lock's file names the worker's pid; the lock itself is the kernel's, so what
a killed worker leaves behind locks nothing.  Imports no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import flower_geo
from flower_geo.errors import StateError
from flower_geo.messages import Request
from flower_geo.site.identity import site_name, state_folder

__all__ = ["BUSY", "MODULE", "Place", "life_stamp"]

#: What a worker's command line names.
MODULE = "flower_geo.site.worker"
#: Exit code of a worker that finds another one at its place.
BUSY = 75
#: A socket's path may have this many bytes (108 with its end on Linux, 104 elsewhere).
_MAX_PATH = 100
_DESCRIPTORS = Path("/proc/self/fd")
#: Environment variables that a running process cannot take up, by their beginnings.
_LASTING = (
    "CUDA", "NVIDIA", "HIP_", "OMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH", "HF_",
    "TRANSFORMERS", "FLOWER_GEO_CACHE", "FLOWER_GEO_STATE", "XDG_", "PYTHONPATH", "TMPDIR",
)  # fmt: skip


def life_stamp() -> str:
    """Hash of what a process started from here has for life: code, folder, environment.

    A worker with another stamp would compute something else than a new one.
    """
    env = {key: value for key, value in os.environ.items() if key.startswith(_LASTING)}
    # What users register with the package is not seen here: a worker knows the package only.
    facts = [flower_geo.__version__, flower_geo.__file__, sys.executable, os.getcwd(), env]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Place:
    """The state folder of one site in one run, as far as its worker goes."""

    folder: Path

    @classmethod
    def of(cls, request: Request, node_config: Mapping[str, Any]) -> Place:
        """The place of the site that a request is for."""
        run = f"{request.run_name}-{request.run_uid}"
        return cls(state_folder(node_config) / run / site_name(node_config))

    @property
    def home(self) -> Path:
        """Folder of socket and lock."""
        return self.folder / "worker"

    @property
    def lock(self) -> Path:
        """File of the worker's lock."""
        return self.home / "lock"

    @property
    def log(self) -> Path:
        """Output of the workers."""
        return self.folder / "worker.log"

    def make(self) -> None:
        """Make the folders, for this user only.

        Raises:
            StateError: they cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            self.home.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StateError(
                f"cannot use {self.folder}: {error.strerror or error}; choose a state-dir that "
                "can be written"
            ) from error

    @contextmanager
    def address(self) -> Iterator[str]:
        """The socket's path, short enough for the kernel.

        A deep folder is named by an open descriptor, where the system can.

        Raises:
            StateError: it cannot.
            OSError: the folder is not there.
        """
        whole = str(self.home / "socket")
        if len(os.fsencode(whole)) <= _MAX_PATH:
            yield whole
            return
        if not _DESCRIPTORS.is_dir():
            raise StateError(
                f"{whole} is too long for a socket; choose a shorter state-dir, or set "
                'node-config worker="in-process"'
            )
        handle = os.open(self.home, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield f"{_DESCRIPTORS}/{handle}/socket"
        finally:
            os.close(handle)

    def connect(self) -> socket.socket | None:
        """A connection to the living worker, or None when nobody listens."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with self.address() as path:
                sock.connect(path)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            sock.close()
            return None
        except OSError as error:
            sock.close()
            raise StateError(
                f"cannot reach {self.home / 'socket'}: {error.strerror or error}; set node-config "
                'worker="in-process"'
            ) from error
        except BaseException:
            sock.close()
            raise
        return sock

    def owner(self) -> int | None:
        """Pid of the worker that holds the lock; 0 where it has not said yet; None without one."""
        try:
            handle = os.open(self.lock, os.O_RDWR)
        except OSError:
            return None
        try:
            # Shared, so that two who look at once do not take each other for a worker.
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            text = os.read(handle, 32).decode(errors="replace").strip()
            return int(text) if text.isdecimal() else 0
        except OSError:
            return None
        finally:
            os.close(handle)

    def process(self) -> psutil.Process | None:
        """The living worker, where it runs on this machine."""
        pid = self.owner()
        if not pid:
            return None
        try:
            found = psutil.Process(pid)
            # A pid may mean another process here: the worker may live in a container.
            return found if MODULE in found.cmdline() else None
        except psutil.Error:
            return None
