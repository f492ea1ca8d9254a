"""What holds for every test: a home of its own, no network but the loopback, no hub."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Set before any library is imported: several read these when they are loaded.
SANDBOX = Path(tempfile.mkdtemp(prefix="flower-geo-tests-"))
os.environ.update(
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1",
    FLWR_DISABLE_UPDATE_CHECK="1",
    FLWR_HOME=str(SANDBOX / "flwr"),
    FLWR_TELEMETRY_ENABLED="0",
    HF_DATASETS_OFFLINE="1",
    HF_HOME=str(SANDBOX / "huggingface"),
    HF_HUB_OFFLINE="1",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    RAY_USAGE_STATS_ENABLED="0",
    TOKENIZERS_PARALLELISM="false",
    XDG_CACHE_HOME=str(SANDBOX / "cache"),
    XDG_CONFIG_HOME=str(SANDBOX / "config"),
    XDG_DATA_HOME=str(SANDBOX / "data"),
    XDG_STATE_HOME=str(SANDBOX / "state"),
)

# Examples take as long as they take on a busy machine; in CI they are the same ones each time.
settings.register_profile(
    "local", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_unconfigure() -> None:
    """Remove what libraries wrote into the sandbox."""
    shutil.rmtree(SANDBOX, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu where there is no CUDA device."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _is_loopback(host: object) -> bool:
    if not isinstance(host, str):
        return False
    if host in ("localhost", ""):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that opens a TCP connection to anything but the loopback."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        remote = self.family in (socket.AF_INET, socket.AF_INET6)
        if remote and self.type == socket.SOCK_STREAM:
            assert isinstance(address, tuple)
            if not _is_loopback(address[0]):
                raise RuntimeError(f"a test tried to reach {address[0]}: tests have no network")
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium; skips the test without one, except in CI, where it fails."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    if os.environ.get("CI"):
        pytest.fail("no Chromium found: install it, CI must not skip the browser tests")
    pytest.skip("no Chromium found")
