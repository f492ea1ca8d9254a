from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flower_geo.compression import Codec, codec
from flower_geo.compression.measure import DEFAULT_SPECS, measure, measure_file, total
from flower_geo.errors import CodecError, CodecSpecError, ConfigError, DataError, NonFiniteTensor


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {
        "a.weight": torch.randn(64, 100), "a.bias": torch.zeros(64),
        "b.weight": torch.randn(7, 33).to(torch.bfloat16),
    }  # fmt: skip
    save_file(tensors, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def test_a_measurement_is_what_coding_does() -> None:
    torch.manual_seed(1)
    tensor = torch.randn(3000) * 3
    chosen = codec("int4(block=64)")
    found = measure(chosen, tensor, "w")
    blob = chosen.encode(tensor)
    off = Codec.decode(blob) - tensor
    assert (found.spec, found.tensor, found.values) == ("int4(block=64)", "w", 3000)
    assert found.nbytes == len(blob)
    assert found.ratio == pytest.approx(12000 / len(blob))
    assert found.bits == pytest.approx(8 * len(blob) / 3000)
    assert found.relative_error == pytest.approx(float(off.norm() / tensor.norm()), rel=1e-5)
    assert found.worst == pytest.approx(float(off.abs().max()))
    assert 0 < found.encode_speed < 1e7 and 0 < found.decode_speed < 1e7
    assert found.encode_speed == pytest.approx(0.012 / found.encode_seconds)


def test_lossless_is_without_error() -> None:
    found = measure(codec("fp32"), torch.randn(999))
    assert (found.relative_error, found.worst) == (0.0, 0.0)


def test_tensors_of_nothing_and_of_zeros() -> None:
    empty = measure(codec("int8"), torch.zeros(0, 5))
    assert empty.values == 0 and empty.worst == 0.0 and math.isnan(empty.bits)
    assert math.isfinite(empty.ratio)
    zeros = measure(codec("int8"), torch.zeros(4096))
    assert zeros.relative_error == 0.0


def test_the_whole_is_the_sum_of_its_tensors(file: Path) -> None:
    (measured,) = measure_file(file, [codec("int8(block=256)")])
    assert [one.tensor for one in measured] == ["a.bias", "a.weight", "b.weight"]
    whole = total(measured)
    assert whole.values == 64 + 6400 + 231
    assert whole.nbytes == sum(one.nbytes for one in measured)
    assert whole.worst == max(one.worst for one in measured)
    assert whole.error == pytest.approx(sum(one.error for one in measured))
    with pytest.raises(ValueError, match="no measurements"):
        total([])


def test_every_default_codec_works(file: Path) -> None:
    before = torch.get_num_threads()
    found = measure_file(file, [codec(spec) for spec in DEFAULT_SPECS], threads=2)
    assert torch.get_num_threads() == before
    assert [one[0].spec for one in found] == list(DEFAULT_SPECS)


def test_only_some_tensors(file: Path) -> None:
    (measured,) = measure_file(file, [codec("bf16")], only=["a.*", "*.nothing"])
    assert [one.tensor for one in measured] == ["a.bias", "a.weight"]
    with pytest.raises(ConfigError, match=r"no tensor that matches \*\.nothing"):
        measure_file(file, [codec("bf16")], only=["*.nothing"])


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"no tensors here", b"\xff" * 64])
def test_a_file_that_is_none_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"broken\.safetensors is no whole safetensors file") as got:
        measure_file(path, [codec("int8")])
    assert "\n" not in str(got.value)


def test_a_cut_file_is_named(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match="no whole safetensors file"):
        measure_file(file, [codec("int8")])


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="there is no file"):
            measure_file(path, [codec("int8")])


def test_tensors_that_cannot_be_coded_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"steps": torch.arange(3)}, path)
    with pytest.raises(DataError, match=r"steps of .* is int64, not floating point; .*--only"):
        measure_file(path, [codec("int8")])
    save_file({"w": torch.tensor([1.0, float("inf")])}, path)
    with pytest.raises(DataError, match=r"w of .* holds NaN or infinity"):
        measure_file(path, [codec("int8")])
    save_file({}, path)
    with pytest.raises(ConfigError, match="holds no tensors"):
        measure_file(path, [codec("int8")])
    save_file({"w": torch.ones(3)}, path)
    with pytest.raises(CodecSpecError, match=r"x\.safetensors: no codec rule matches tensor 'w'"):
        measure_file(path, [codec("*.bias=bf16")])


def test_one_tensor_that_cannot_be_coded() -> None:
    with pytest.raises(NonFiniteTensor, match="w holds"):
        measure(codec("int8"), torch.tensor([float("nan")]), "w")
    with pytest.raises(CodecError):
        measure(codec("*.x=int8"), torch.ones(2), "w")
