"""The committed stubs are what the compiler makes of the protocol's source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flower_geo.transport import split_pb2 as pb
from flower_geo.transport.channel import METHOD, SERVICE

ROOT = Path(__file__).resolve().parents[2]
STUBS = ("flower_geo/transport/split_pb2.py", "flower_geo/transport/split_pb2.pyi")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What proto/README.md says to run, into another folder."""
    out = tmp_path_factory.mktemp("stubs")
    options = ["-Iflower_geo/transport=proto/flower_geo/v1", f"--python_out={out}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", *options, f"--pyi_out={out}"]
    source = "flower_geo/transport/split.proto"
    done = subprocess.run(
        [*command, source], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("stub", STUBS)
def test_stubs_are_those_of_the_source(made: Path, stub: str) -> None:
    text = (made / stub).read_text(encoding="utf-8")
    assert (ROOT / stub).read_text(encoding="utf-8") == text, (
        f"{stub} is not what the compiler makes of proto/: run the command of proto/README.md"
    )


def test_the_method_is_the_one_of_the_source() -> None:
    service = pb.DESCRIPTOR.services_by_name["Split"]
    assert service.full_name == SERVICE
    assert [method.name for method in service.methods] == [METHOD]
    assert service.methods[0].client_streaming
    assert service.methods[0].server_streaming
