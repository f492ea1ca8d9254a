"""Records: keys, schema, plain Flower Arrays, Flower's wire, content hashes."""

from __future__ import annotations

import io
import struct
import zipfile

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from flwr.common.serde import array_record_from_proto, array_record_to_proto
from flwr.proto.recorddict_pb2 import ArrayRecord as ArrayRecordProto
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flower_geo.compression import (
    Codec,
    codec,
    content_hash,
    pack,
    record_blobs,
    record_from_blobs,
    record_nbytes,
    unpack,
    unpack_blobs,
)
from flower_geo.errors import CodecError, CodecSpecError, CorruptPayload, NonFiniteTensor
from tests.compression.blobs import allocating_at_most, forge, noise

STATE: dict[str, Tensor] = {
    "z.weight": noise(40, 50),
    "a.bias": noise(50),
    "m": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "half": noise(30, 30).to(torch.bfloat16),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in STATE.items()}


def npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values, allow_pickle=True)
    return file.getvalue()


def plain(data: bytes) -> ArrayRecord:
    return ArrayRecord({"w": Array("float32", (2,), "numpy.ndarray", data)})


def test_keys_and_order_stay_and_metadata_is_the_originals() -> None:
    record = pack(STATE, codec("int8"))
    assert list(record) == list(STATE) == list(unpack(record, SHAPES))
    for name, array in record.items():
        assert array.stype == "geo/1"
        assert tuple(array.shape) == SHAPES[name]
        assert array.dtype == str(STATE[name].dtype).removeprefix("torch.")
    assert record_nbytes(record) == sum(len(blob) for blob in record_blobs(record).values())


def test_lossless_records_are_lossless() -> None:
    back = unpack(pack(STATE, codec("fp32")), SHAPES)
    for name, tensor in STATE.items():
        assert back[name].dtype == torch.float32
        assert torch.equal(back[name], tensor.float())


def test_an_empty_state_is_an_empty_record() -> None:
    record = pack({}, codec("int8"))
    assert unpack(record) == unpack(record, {}) == {} and record_nbytes(record) == 0


def test_rules_choose_by_key() -> None:
    blobs = record_blobs(pack(STATE, codec("*.bias=bf16; half=fp16; *=int8(block=64)")))
    specs = {name: Codec.inspect(blob).spec for name, blob in blobs.items()}
    assert specs == {
        "z.weight": "int8(block=64)", "a.bias": "bf16", "half": "fp16",
        "m": "fp32", "empty": "fp32",
    }  # fmt: skip
    with pytest.raises(CodecSpecError, match="matches tensor 'm'"):
        pack(STATE, codec("*.*=bf16"))


def test_a_bad_tensor_is_named() -> None:
    with pytest.raises(NonFiniteTensor, match=r"tensor z\.weight holds"):
        pack({**STATE, "z.weight": torch.tensor([float("inf")])}, codec("int8"))
    with pytest.raises(CodecError, match=r"tensor steps is torch\.int64"):
        pack({**STATE, "steps": torch.tensor(3)}, codec("int8"))


@pytest.mark.parametrize("spec", ["fp32", "int8", "topk(density=0.03)|int2"])
def test_flowers_wire_leaves_every_byte(spec: str) -> None:
    record = pack(STATE, codec(spec))
    message = ArrayRecordProto()
    message.ParseFromString(array_record_to_proto(record).SerializeToString())
    over_proto = array_record_from_proto(message)
    contents = {key: each.deflate() for key, each in get_all_nested_objects(record).items()}
    over_objects = inflate_object_from_contents(record.object_id, contents)
    assert isinstance(over_objects, ArrayRecord)
    for back in (over_proto, over_objects):
        assert list(back) == list(record)
        for name, array in record.items():
            found = back[name]
            assert (found.dtype, tuple(found.shape), found.stype, found.data) == (
                array.dtype, tuple(array.shape), array.stype, array.data,
            )  # fmt: skip
        decoded = unpack(back, SHAPES)
        assert content_hash(decoded) == content_hash(unpack(record))


def test_blobs_make_the_same_record_again() -> None:
    record = pack(STATE, codec("int8"))
    again = record_from_blobs(record_blobs(record))
    assert list(again) == list(record)
    for name, array in record.items():
        assert (again[name].dtype, again[name].data) == (array.dtype, array.data)
        assert tuple(again[name].shape) == tuple(array.shape)


# --- schema ----------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [unpack, unpack_blobs])
def test_a_schema_that_differs_is_refused_with_names(read) -> None:
    record = pack(STATE, codec("int8"))
    with pytest.raises(CorruptPayload, match=r"1 missing, 0 unknown \(lacks more\)"):
        read(record, {**SHAPES, "more": (3,)})
    with pytest.raises(CorruptPayload, match=r"0 missing, 1 unknown \(has m\)"):
        read(record, {name: shape for name, shape in SHAPES.items() if name != "m"})
    with pytest.raises(CorruptPayload, match=r"2 missing, 2 unknown \(lacks x, lacks y, has"):
        two = {name: shape for name, shape in SHAPES.items() if name not in ("m", "half")}
        read(record, {**two, "x": (), "y": ()})
    with pytest.raises(CorruptPayload, match=r"a\.bias.*shape \[50\], not \[51\]"):
        read(record, {**SHAPES, "a.bias": (51,)})
    with pytest.raises(CorruptPayload, match=r"0 unknown"):
        read(ArrayRecord(), SHAPES)


@pytest.mark.parametrize("read", [unpack, unpack_blobs])
def test_a_damaged_blob_is_named(read) -> None:
    blobs = record_blobs(pack(STATE, codec("int8")))
    record = pack(STATE, codec("int8"))
    for bad in (b"", blobs["z.weight"][:-1], forge("int8(block=256)", (40, 50), b"")):
        record["z.weight"] = Array("float32", (40, 50), "geo/1", bad)
        with pytest.raises(CorruptPayload, match=r"^tensor z\.weight"):
            read(record, SHAPES)


def test_blobs_are_handed_on_unchanged_after_a_check() -> None:
    record = pack(STATE, codec("int8"))
    assert unpack_blobs(record, SHAPES) == record_blobs(record)
    state = {name: tensor.float() for name, tensor in STATE.items()}
    blobs = unpack_blobs(ArrayRecord(dict(state)), SHAPES)
    for name, tensor in state.items():
        assert Codec.inspect(blobs[name]).spec == "fp32"
        assert torch.equal(Codec.decode(blobs[name]), tensor)


# --- plain Flower Arrays ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", "<f2", "longdouble"])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 0, 3)])
def test_plain_arrays_are_taken(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.asarray(np.random.default_rng(0).standard_normal(shape)).astype(dtype)
    for each in (values, np.array(values, order="F")):
        record = ArrayRecord({"w": Array("float32", shape, "numpy.ndarray", npy(each))})
        back = unpack(record, {"w": shape})["w"]
        assert back.dtype == torch.float32 and back.shape == shape and back.is_contiguous()
        assert np.array_equal(back.numpy(), values.astype(np.float32))
        back += 1  # memory of its own
        assert np.array_equal(unpack(record)["w"].numpy(), values.astype(np.float32))


def test_flowers_own_records_are_taken() -> None:
    state = {"a": noise(3, 4), "b": torch.tensor(1.5)}
    for name, tensor in unpack(ArrayRecord(dict(state)), {"a": (3, 4), "b": ()}).items():
        assert torch.equal(tensor, state[name])
    mixed = pack(state, codec("fp32"))
    mixed["a"] = Array(state["a"].numpy())
    assert torch.equal(unpack(mixed)["a"], state["a"])


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (np.array([1, np.nan]), "NaN, infinity"),
        (np.array([1, np.nan], dtype=np.float32), "NaN, infinity"),
        (np.array([1, -np.inf]), "NaN, infinity"),
        (np.array([1, 1e300]), "beyond fp32"),
        (np.array([1, 2]), "int64"),
        (np.array([True, False]), "bool"),
        (np.array([1j, 2]), "complex128"),
        (np.array(["a", "b"]), "<U1"),
        (np.array([None, 1.0], dtype=object), "object"),
        (np.zeros(2, dtype=[("x", "f4")]), r"\('x', '<f4'\)"),
        (np.zeros(3), r"float64\[3\], not float\[2\]"),
        (np.zeros((2, 1)), r"float64\[2, 1\], not float\[2\]"),
    ],
)
def test_plain_arrays_of_another_kind_are_refused(values: np.ndarray, told: str) -> None:
    for read in (unpack, unpack_blobs):
        with pytest.raises(CorruptPayload, match=f"^tensor w .*{told}"):
            read(plain(npy(values)), {"w": (2,)})


def header(text: str, payload: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    raw = text.encode("latin1")
    size = struct.pack("<H" if version == b"\x01\x00" else "<I", len(raw))
    return b"\x93NUMPY" + version + size + raw + payload


def claim(shape: str, descr: str = "<f4", payload: bytes = bytes(8)) -> bytes:
    return header(f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n", payload)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00\xff\xff{",
        npy(np.zeros(2, dtype=np.float32))[:-1],
        npy(np.zeros(2, dtype=np.float32)) + b"\0",
        claim("(3,)"),
        claim("(10000000000,)"),
        claim("(9223372036854775807, 4)"),
        claim("(0, 9223372036854775807, 9223372036854775807)", payload=b""),
        claim("(-2, -1)"),
        claim("(True, 2)", payload=b""),
        claim("2"),
        claim("(2,)", descr="|O"),
        claim("(2,)", descr="V4"),
        claim("(2,)", descr="f9"),
        claim("((2,),)"),
        header("(" * 200 + "\n"),
        header("__import__('os').getpid()\n"),
        header("{}\n"),
        header("[1, 2]\n", version=b"\x02\x00"),
        header(
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n", bytes(8), b"\x03\x00"
        ),
        header("x" * 20000, version=b"\x02\x00"),
    ],
)
def test_hostile_plain_arrays_are_refused_before_anything_is_allocated(data: bytes) -> None:
    for shapes in (None, {"w": (2,)}):
        with (
            pytest.raises(CorruptPayload, match=r"^tensor w ") as caught,
            allocating_at_most(1 << 20),
        ):
            unpack(plain(data), shapes)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_an_archive_is_no_array() -> None:
    file = io.BytesIO()
    np.savez(file, w=np.zeros(2))
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w.npy", bytes(1 << 24))
    for data in (file.getvalue(), bomb.getvalue()):
        with pytest.raises(CorruptPayload, match="tensor w cannot be read"):
            unpack(plain(data))


@pytest.mark.parametrize("stype", ["", "geo/2", "pickle", "x" * 1000])
def test_other_serialisations_are_refused(stype: str) -> None:
    record = ArrayRecord({"w": Array("float32", (2,), stype, npy(np.zeros(2)))})
    with pytest.raises(CorruptPayload, match="tensor w is of the unknown serialisation") as caught:
        unpack(record)
    assert len(str(caught.value)) < 200


@given(data=st.data())
def test_a_changed_plain_array_is_finite_or_refused(data: st.DataObject) -> None:
    raw = bytearray(npy(np.array([1.5, -2.0], dtype=np.float32)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place] = data.draw(st.integers(0, 255))
    with allocating_at_most(1 << 20):
        try:
            back = unpack(plain(bytes(raw)))["w"]
        except CorruptPayload:
            return
    assert bool(torch.isfinite(back).all()) and back.numel() <= 8


# --- hashes ----------------------------------------------------------------------------------


def test_the_hash_is_of_content_not_of_order_or_strides() -> None:
    known = {"b": torch.tensor([1.0, 2.0]), "a": torch.zeros(0)}
    assert content_hash(known) == (
        "ed1b0b16b18841d4333ad38efca09506e413b2e486fd9c4296a730faccc9a3fd"
    )
    assert content_hash(dict(reversed(STATE.items()))) == content_hash(STATE)
    transposed = {"w": noise(4, 5).T}
    assert content_hash(transposed) == content_hash({"w": noise(4, 5).T.contiguous()})
    for odd in (noise(6)[::6], noise(2, 0).T, noise(3, 4)[:, :0], noise(1).expand(1, 1)):
        assert content_hash({"w": odd}) == content_hash(
            {"w": torch.tensor(odd.tolist()).view_as(odd)}
        )
    empty = Codec.decode(codec("fp32").encode(torch.zeros(3, 0)))
    assert content_hash({"w": empty}) == content_hash({"w": torch.zeros(3, 0)})
    assert content_hash({"w": torch.nn.Parameter(noise(3))}) == content_hash({"w": noise(3)})


def test_any_difference_changes_the_hash() -> None:
    states: list[dict[str, Tensor]] = [
        {},
        {"w": torch.zeros(4)},
        {"v": torch.zeros(4)},
        {"w": torch.zeros(2, 2)},
        {"w": torch.zeros(4, dtype=torch.float64)},
        {"w": torch.zeros(4, dtype=torch.int32)},
        {"w": torch.tensor([0.0, 0.0, 0.0, -0.0])},
        {"w": torch.zeros(4), "x": torch.zeros(0)},
        {"w": torch.zeros(2), "x": torch.zeros(2)},
        {"w": torch.tensor(0.0)},
        {"w": torch.zeros(1)},
    ]
    assert len({content_hash(state) for state in states}) == len(states)
