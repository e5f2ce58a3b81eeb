"""Frames: known bytes, an independent encoder, and a decoder that takes nothing else."""

import ctypes
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds41jax.fabric.library import Geometry, native

D, E, K, ROWS = 64, 16, 2, 8
PLACEMENT, REQUEST, EXECUTOR = 0x1122334455667788, 0x0102030405060708, 18
REQUEST_HEADER, DESCRIPTOR, ROUTE = "<8sHHIQQIIIHHIIIQQQIII", "<QHHQQIII", "<IIf"
RESPONSE_HEADER = "<8sHHIQQIIHHQQQIIIQII"
STRIDE = D + D // 32
CHECKSUM, OWNERS = 1, 1 << 18
# Fields of the headers, in order, by the places that `struct.unpack` gives them.
REQUEST_FIELDS = 19


class Rows(ctypes.Structure):
    """`ds41jax::Rows`."""

    _fields_ = (
        *(("layer", ctypes.c_uint32), ("rows", ctypes.c_uint32), ("source", ctypes.c_uint16)),
        *((n, ctypes.c_void_p) for n in ("codes", "scales", "ids", "weights", "owners")),
    )


def geometry(groups: int = 1) -> Geometry:
    return Geometry(
        hidden=D,
        experts=E,
        choices=K,
        groups=groups,
        first_layer=3,
        last_layer=10,
        capacity=ROWS,
        placement=PLACEMENT,
    )


def arrays(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "codes": rng.integers(0, 256, (rows, D), np.uint8),
        "scales": rng.integers(100, 140, (rows, D // 32), np.uint8),
        "ids": np.stack([rng.permutation(E)[:K] for _ in range(rows)]).astype(np.int32),
        "weights": rng.random((rows, K), np.float32),
        "owners": np.arange(E, dtype=np.uint8) % 2,
    }


def encoded(parts: dict[str, np.ndarray], flags: int = 0, groups: int = 1) -> bytes:
    """By the native library."""
    rows = len(parts["ids"])
    given_rows = Rows(5, rows, 1, *(parts[name].ctypes.data for name, _ in Rows._fields_[3:]))
    shape = geometry(groups)
    out = ctypes.create_string_buffer(96 + rows * (40 + 12 * K + STRIDE))
    encode = native().handle.ds41jax_encode_request
    encode.argtypes = (
        *(ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p),
    )
    encode.restype = ctypes.c_size_t
    size = encode(ctypes.byref(shape), REQUEST, flags, ctypes.byref(given_rows), out)
    assert size == len(out)
    return out.raw


def written_out(parts: dict[str, np.ndarray], flags: int = 0, groups: int = 1) -> bytes:
    """The same frame, from the description of the format alone."""
    rows = len(parts["ids"])
    body = b"".join(struct.pack(DESCRIPTOR, r, 1, 0, 0, 0, r * K, K, 0) for r in range(rows))
    for r in range(rows):
        for expert, weight in zip(parts["ids"][r], parts["weights"][r], strict=True):
            owner = 1 << (9 + int(parts["owners"][expert])) if groups > 1 else 0
            body += struct.pack(ROUTE, r, int(expert) | owner, weight)
    for codes, scales in zip(parts["codes"], parts["scales"], strict=True):
        body += codes.tobytes() + scales.tobytes()
    if groups > 1:
        flags |= OWNERS
    fields = [
        *(b"DS41RTE3", 3, 1, 96, REQUEST, PLACEMENT, 5, rows, D, 7, 0, rows * K, rows * 40),
        *(rows * K * 12, rows * STRIDE, len(body), 96 + len(body), flags, STRIDE, 0),
    ]
    if flags & CHECKSUM:
        fields[-1] = zlib.crc32(struct.pack(REQUEST_HEADER, *fields) + body)
    return struct.pack(REQUEST_HEADER, *fields) + body


def refusal(frame: bytes, groups: int = 1) -> str | None:
    """Why a worker refuses a frame, None if it does not."""
    check = native().handle.ds41jax_check_request
    check.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
    check.restype = ctypes.c_char_p
    shape = geometry(groups)
    why = check(ctypes.byref(shape), frame, len(frame))
    return None if why is None else why.decode()


def response(request: bytes, status: int = 0) -> bytes:
    """An answer with zeros for rows."""
    rows = struct.unpack_from("<I", request, 36)[0]
    out = ctypes.create_string_buffer(96 + (0 if status else rows * D * 2))
    encode = native().handle.ds41jax_encode_response
    encode.argtypes = (
        *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint16, ctypes.c_uint64, ctypes.c_void_p),
    )
    encode.restype = None
    shape = geometry()
    encode(ctypes.byref(shape), request, status, EXECUTOR, out)
    return out.raw


def response_refusal(frame: bytes, rows: int = 2, layer: int = 5) -> str | None:
    check = native().handle.ds41jax_check_response
    check.argtypes = (
        *(ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64),
        *(ctypes.c_char_p, ctypes.c_size_t),
    )
    check.restype = ctypes.c_char_p
    shape = geometry()
    why = check(ctypes.byref(shape), REQUEST, layer, rows, EXECUTOR, frame, len(frame))
    return None if why is None else why.decode()


def test_headers_of_known_bytes() -> None:
    header = encoded(arrays(1))[:96]
    assert header.hex() == (
        "4453343152544533" "0300" "0100" "60000000" "0807060504030201" "8877665544332211"
        "05000000" "01000000" "40000000" "0700" "0000" "02000000" "28000000" "18000000"
        "4200000000000000" "8200000000000000" "e200000000000000" "00000000" "42000000" "00000000"
    )  # fmt: skip
    assert response(encoded(arrays(1)))[:96].hex() == (
        "4453343152544533" "0300" "0200" "60000000" "0807060504030201" "8877665544332211"
        "05000000" "01000000" "0100" "0000" "8000000000000000" "8000000000000000"
        "e000000000000000" "00000100" "40000000" "80000000" "1200000000000000" "00000000"
        "00000000"
    )  # fmt: skip


def test_the_official_row_has_the_published_size() -> None:
    assert struct.calcsize(DESCRIPTOR) + 6 * struct.calcsize(ROUTE) + 5120 + 5120 // 32 == 5392
    assert struct.calcsize(REQUEST_HEADER) == struct.calcsize(RESPONSE_HEADER) == 96


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("flags", [0, CHECKSUM])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_an_independent_encoder_agrees(rows: int, flags: int, groups: int) -> None:
    parts = arrays(rows, seed=rows)
    frame = encoded(parts, flags, groups)
    assert frame == written_out(parts, flags, groups)
    assert refusal(frame, groups) is None


WRONG_FIELDS = [  # place in the header, value, part of the reason
    (0, b"DS41RTE2", "no frame of this protocol"),
    (1, 2, "another protocol version"),
    (2, 2, "another kind"),
    (3, 128, "another length"),
    (5, PLACEMENT + 1, "another placement"),
    (6, 2, "not served here"),
    (6, 10, "not served here"),
    (7, 0, "more rows than agreed, or none"),
    (7, ROWS + 1, "more rows than agreed, or none"),
    (7, 0xFFFFFFFF, "more rows than agreed, or none"),
    (8, 2 * D, "rows of another kind"),
    (9, 1, "rows of another kind"),
    (10, 1, "rows of another kind"),
    (11, 0x80000000, "contradict"),
    (12, 0, "contradict"),
    (13, 0xFFFFFFFF, "contradict"),
    (14, 1 << 63, "contradict"),
    (15, 0, "contradict"),
    (16, 1 << 40, "contradict"),
    (17, 1 << 5, "unknown flags"),
    (17, OWNERS, "owners where there are no groups"),
    (17, CHECKSUM, "a wrong checksum"),
    (18, 1, "contradict"),
]


@pytest.mark.parametrize(("place", "value", "reason"), WRONG_FIELDS)
def test_a_wrong_header_is_refused(place: int, value: object, reason: str) -> None:
    frame = encoded(arrays(2))
    fields = list(struct.unpack_from(REQUEST_HEADER, frame))
    assert len(fields) == REQUEST_FIELDS + 1
    fields[place] = value
    assert reason in str(refusal(struct.pack(REQUEST_HEADER, *fields) + frame[96:]))


WRONG_PLACES = [  # offset after the header of a frame of two rows, struct format, value, reason
    (0, "<Q", 1, "row descriptor"),
    (8, "<H", 0, "row descriptor"),
    (8, "<H", 5, "row descriptor"),
    (10, "<H", 1, "row descriptor"),
    (28, "<I", 1, "not contiguous"),
    (32, "<I", K + 1, "not contiguous"),
    (80, "<I", 1, "another row"),
    (84, "<I", E, "does not exist"),
    (84, "<I", 511, "does not exist"),
    (84, "<I", 1 << 9, "exactly one owner"),
    (84, "<I", 1 << 31, "exactly one owner"),
    (88, "<f", float("nan"), "no weight"),
    (88, "<f", float("inf"), "no weight"),
    (88, "<f", -0.5, "no weight"),
]


@pytest.mark.parametrize(("offset", "form", "value", "reason"), WRONG_PLACES)
def test_a_wrong_row_is_refused(offset: int, form: str, value: object, reason: str) -> None:
    frame = bytearray(encoded(arrays(2)))
    struct.pack_into(form, frame, 96 + offset, value)
    assert reason in str(refusal(bytes(frame)))


def test_a_row_chooses_an_expert_once() -> None:
    parts = arrays(2)
    parts["ids"][1] = 7
    assert "chosen twice" in str(refusal(encoded(parts)))


@pytest.mark.parametrize("owner", [0, 3, 4, 1 << 22])
def test_a_route_has_one_owner_where_there_are_groups(owner: int) -> None:
    frame = bytearray(encoded(arrays(2), groups=2))
    assert refusal(bytes(frame), groups=2) is None
    struct.pack_into("<I", frame, 96 + 84, 1 | owner << 9)
    assert "exactly one owner" in str(refusal(bytes(frame), groups=2))


def test_the_checksum_covers_every_byte() -> None:
    frame = encoded(arrays(2), CHECKSUM)
    for place in range(96, len(frame)):
        changed = bytearray(frame)
        changed[place] ^= 0x10
        assert refusal(bytes(changed)) is not None


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=800))
def test_random_bytes_are_no_frame(data: bytes) -> None:
    assert refusal(data) is not None
    assert response_refusal(data) is not None


@settings(max_examples=500, deadline=None)
@given(
    st.integers(1, ROWS),
    st.lists(st.tuples(st.integers(0, 95), st.integers(0, 255)), max_size=4),
    st.integers(-200, 200),
)
def test_mutated_headers(rows: int, changes: list[tuple[int, int]], cut: int) -> None:
    """Only the request id may differ; every other change of header or length is refused."""
    good = encoded(arrays(rows))
    frame = bytearray(good)
    for place, value in changes:
        frame[place] = value
    data = bytes(frame[:cut]) if cut < 0 else bytes(frame) + bytes(cut)
    same = data[:16] == good[:16] and data[24:] == good[24:]
    assert (refusal(data) is None) == same


def test_an_answer_is_taken_only_for_its_request() -> None:
    frame = response(encoded(arrays(2)))
    assert response_refusal(frame) is None
    assert "another request" in str(response_refusal(frame, rows=3))
    assert "another request" in str(response_refusal(frame, layer=6))
    assert "refused" in str(response_refusal(response(encoded(arrays(2)), status=1)))


WRONG_ANSWERS = [
    (4, REQUEST + 1, "another request"),
    (5, 0, "another placement"),
    (8, 7, "rows of another kind"),
    (9, 3, "unknown status"),
    (10, 0, "contradict"),
    (11, 1, "contradict"),
    (12, 96, "contradict"),
    (13, 0, "rows of another kind"),
    (14, 2 * D, "rows of another kind"),
    (15, D, "rows of another kind"),
    (16, EXECUTOR + 1, "another executor"),
    (17, 1, "a wrong checksum"),
    (18, 1, "rows of another kind"),
]


@pytest.mark.parametrize(("place", "value", "reason"), WRONG_ANSWERS)
def test_a_wrong_answer_is_refused(place: int, value: object, reason: str) -> None:
    frame = response(encoded(arrays(2)))
    fields = list(struct.unpack_from(RESPONSE_HEADER, frame))
    fields[place] = value
    assert reason in str(response_refusal(struct.pack(RESPONSE_HEADER, *fields) + frame[96:]))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 95), st.integers(0, 255)), max_size=4),
    st.integers(-200, 200),
)
def test_mutated_answers(changes: list[tuple[int, int]], cut: int) -> None:
    good = response(encoded(arrays(2)))
    frame = bytearray(good)
    for place, value in changes:
        frame[place] = value
    data = bytes(frame[:cut]) if cut < 0 else bytes(frame) + bytes(cut)
    assert (response_refusal(data) is None) == (data == good)
