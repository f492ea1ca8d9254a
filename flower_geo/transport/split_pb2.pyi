from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Frame(_message.Message):
    __slots__ = ("session", "epoch", "round", "attempt", "number", "step", "micro", "kind", "crc", "hello", "welcome", "head", "chunk", "beat", "refusal", "bye")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MICRO_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CRC_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    epoch: int
    round: int
    attempt: int
    number: int
    step: int
    micro: int
    kind: str
    crc: int
    hello: Hello
    welcome: Welcome
    head: Head
    chunk: Chunk
    beat: Beat
    refusal: Refusal
    bye: Bye
    def __init__(self, session: _Optional[bytes] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., number: _Optional[int] = ..., step: _Optional[int] = ..., micro: _Optional[int] = ..., kind: _Optional[str] = ..., crc: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., head: _Optional[_Union[Head, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "run", "site", "token", "terms", "steps", "patience", "fresh", "done", "also")
    class TermsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ALSO_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run: str
    site: str
    token: str
    terms: _containers.ScalarMap[str, str]
    steps: _containers.RepeatedScalarFieldContainer[int]
    patience: int
    fresh: bool
    done: int
    also: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, protocol: _Optional[int] = ..., run: _Optional[str] = ..., site: _Optional[str] = ..., token: _Optional[str] = ..., terms: _Optional[_Mapping[str, str]] = ..., steps: _Optional[_Iterable[int]] = ..., patience: _Optional[int] = ..., fresh: _Optional[bool] = ..., done: _Optional[int] = ..., also: _Optional[_Iterable[int]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("step", "in_flight", "bytes", "chunk", "done")
    STEP_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    step: int
    in_flight: int
    bytes: int
    chunk: int
    done: int
    def __init__(self, step: _Optional[int] = ..., in_flight: _Optional[int] = ..., bytes: _Optional[int] = ..., chunk: _Optional[int] = ..., done: _Optional[int] = ...) -> None: ...

class Head(_message.Message):
    __slots__ = ("meta", "blobs", "failure")
    META_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    meta: bytes
    blobs: _containers.RepeatedCompositeFieldContainer[Blob]
    failure: Refusal
    def __init__(self, meta: _Optional[bytes] = ..., blobs: _Optional[_Iterable[_Union[Blob, _Mapping]]] = ..., failure: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Blob(_message.Message):
    __slots__ = ("name", "dtype", "shape", "codec", "total")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    codec: str
    total: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., codec: _Optional[str] = ..., total: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("blob", "index", "count", "data")
    BLOB_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    blob: int
    index: int
    count: int
    data: bytes
    def __init__(self, blob: _Optional[int] = ..., index: _Optional[int] = ..., count: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("done",)
    DONE_FIELD_NUMBER: _ClassVar[int]
    done: int
    def __init__(self, done: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("error", "message", "retry", "fault", "terms")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    error: str
    message: str
    retry: bool
    fault: str
    terms: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, error: _Optional[str] = ..., message: _Optional[str] = ..., retry: _Optional[bool] = ..., fault: _Optional[str] = ..., terms: _Optional[_Iterable[str]] = ...) -> None: ...

class Bye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
