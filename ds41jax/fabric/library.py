"""The native library: built once with g++, cached, and what of it Python calls.

UCX is found, in this order: $DS41JAX_UCX (a folder with `lib`, and `include` for building), the
system's, the PyPI wheel `libucx-cu12` or `libucx-cu13`. Only the last lacks InfiniBand and RoCE.
"""

import ctypes
import ctypes.util
import enum
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax
import jaxlib
import numpy as np

from ds41jax.cache_folder import cache_folder

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-w")
BUILD_SECONDS = 300
MESSAGE_BYTES = 2048
ADDRESS_BYTES = 16384
TARGETS = (  # name in programs, platform, symbol
    ("ds41jax_expert_send", "cpu", "Ds41jaxExpertSend"),
    ("ds41jax_expert_wait", "cpu", "Ds41jaxExpertWait"),
    ("ds41jax_expert_receive", "cpu", "Ds41jaxExpertReceive"),
    ("ds41jax_expert_respond", "cpu", "Ds41jaxExpertRespond"),
    ("ds41jax_expert_send", "CUDA", "Ds41jaxCudaSend"),
    ("ds41jax_expert_wait", "CUDA", "Ds41jaxCudaWait"),
    ("ds41jax_expert_receive", "CUDA", "Ds41jaxCudaReceive"),
    ("ds41jax_expert_respond", "CUDA", "Ds41jaxCudaRespond"),
)


class FabricError(RuntimeError):
    """The fabric cannot be built, opened or reached; the message says what to do."""


@dataclass(frozen=True)
class UcxFiles:
    """Where UCX lies: the library to open, and the headers to build against."""

    library: Path
    include: Path


class Geometry(ctypes.Structure):
    """`ds41jax::Geometry` of native/frames.h."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("hidden", "experts", "choices", "groups")),
        *((name, ctypes.c_uint32) for name in ("first_layer", "last_layer", "capacity")),
        ("placement", ctypes.c_uint64),
    )


class CoordinatorOptions(ctypes.Structure):
    """`ds41jax::CoordinatorOptions` of native/coordinator.h."""

    _fields_ = (
        ("geometry", Geometry),
        ("ranks", ctypes.c_uint32),
        ("executor", ctypes.c_uint32),
        ("balanced", ctypes.c_bool),
        ("checksum", ctypes.c_bool),
        ("deadline_ms", ctypes.c_uint32),
    )


class WorkerOptions(ctypes.Structure):
    """`ds41jax::WorkerOptions` of native/expert_worker.h."""

    _fields_ = (
        ("geometry", Geometry),
        ("group", ctypes.c_uint32),
        ("executor", ctypes.c_uint32),
    )


class Event(enum.IntEnum):
    """`ds41jax::Event` of native/timeline.h: three of a coordinator, two of a worker."""

    SENT = 1
    AWAITED = 2
    SUMMED = 3
    RECEIVED = 4
    ANSWERED = 5


MOMENTS = 4096
MOMENT = np.dtype(  # of native/timeline.h
    [
        ("nanoseconds", np.uint64),
        ("wave", np.uint64),
        ("event", np.uint32),
        ("layer", np.uint32),
        ("rows", np.uint32),
        ("unused", np.uint32),
    ]
)


def _wheels() -> list[Path]:
    found = importlib.util.find_spec("libucx")
    return [Path(p) for p in found.submodule_search_locations or ()] if found else []


def _library_in(folder: Path) -> Path | None:
    places = (folder, folder / "lib", folder / "lib64")
    return next((p / "libucp.so.0" for p in places if (p / "libucp.so.0").exists()), None)


def _system_library() -> Path | None:
    name = ctypes.util.find_library("ucp")
    return Path(name) if name else None


def find_ucx() -> UcxFiles:
    """UCX's library and headers.

    Raises:
      FabricError: saying what is missing and how to get it.
    """
    setting = os.environ.get("DS41JAX_UCX")
    folders = [Path(setting)] if setting else _wheels()
    in_folder = next((f for f in map(_library_in, folders) if f), None)
    if setting and in_folder is None:
        raise FabricError(f"$DS41JAX_UCX is {setting}, which holds no lib/libucp.so.0")
    library = in_folder if setting else _system_library() or in_folder
    includes = [f / "include" for f in (*folders, Path("/usr"), Path("/usr/local"), *_wheels())]
    include = next((i for i in includes if (i / "ucp" / "api" / "ucp.h").exists()), None)
    if library is None or include is None:
        missing = "library (libucp.so.0)" if library is None else "headers (ucp/api/ucp.h)"
        raise FabricError(
            f"remote experts need UCX, and its {missing} was not found: install the distribution's "
            "libucx-dev (with InfiniBand and RoCE), or `pip install 'ds41jax[fabric]'` (TCP and "
            "shared memory only), or set DS41JAX_UCX to UCX's folder"
        )
    return UcxFiles(library, include)


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cc"))


def build(ucx: UcxFiles) -> Path:
    """Path of the compiled library; compiles it in some seconds if the cache has none.

    Raises:
      FabricError: without a compiler, or if it fails.
    """
    compiler = os.environ.get("CXX") or "g++"
    headers = sorted(SOURCES.glob("*.h"))
    key = hashlib.sha256()
    for part in (compiler, *FLAGS, jaxlib.__version__, str(ucx.include), sys.platform):
        key.update(part.encode() + b"\0")
    for source in (*_sources(), *headers, ucx.include / "ucp" / "api" / "ucp_version.h"):
        key.update(source.read_bytes())
    target = cache_folder() / "native" / f"fabric-{key.hexdigest()[:20]}.so"
    if target.exists():
        return target
    if shutil.which(compiler) is None:
        raise FabricError(
            f"remote experts need a C++ compiler once, and {compiler!r} was not found: install "
            "g++, or set CXX"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "fabric.so"
        command = [compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", f"-I{ucx.include}"]
        command += [*map(str, _sources()), "-ldl", "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
        if done.returncode:
            raise FabricError(f"building the fabric failed:\n{done.stderr[-4000:]}")
        made.rename(target)  # whole or not at all, whoever else builds it now
    return target


_POINTER = ctypes.c_char_p
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "open_coordinator": (
        ctypes.c_int,
        (_POINTER, _POINTER, ctypes.c_int, ctypes.c_void_p, _POINTER, ctypes.c_size_t),
    ),
    "open_worker": (
        ctypes.c_int,
        (_POINTER, _POINTER, ctypes.c_int, ctypes.c_void_p, _POINTER, ctypes.c_size_t),
    ),
    "open_mailboxes": (
        ctypes.c_int,
        (ctypes.c_int, ctypes.c_void_p, _POINTER, _POINTER, ctypes.c_size_t),
    ),
    "open_staging": (ctypes.c_int, (ctypes.c_int, ctypes.c_void_p, _POINTER, ctypes.c_size_t)),
    "close_staging": (None, (ctypes.c_int,)),
    "close_mailboxes": (None, (ctypes.c_int,)),
    "close_coordinator": (None, (ctypes.c_int,)),
    "close_worker": (None, (ctypes.c_int,)),
    "address": (ctypes.c_int, (ctypes.c_int, ctypes.c_int, _POINTER, ctypes.c_size_t)),
    "attach": (
        ctypes.c_int,
        (
            *(ctypes.c_int, ctypes.c_uint32, _POINTER, ctypes.c_size_t),
            *(ctypes.c_uint64, _POINTER, ctypes.c_size_t),
        ),
    ),
    "detach": (None, (ctypes.c_int, ctypes.c_uint32, _POINTER)),
    "up": (ctypes.c_int, (ctypes.c_int, ctypes.c_uint32)),
    "fault": (None, (ctypes.c_int, ctypes.c_uint32, _POINTER, ctypes.c_size_t)),
    "down_reason": (None, (ctypes.c_int, ctypes.c_uint32, _POINTER, ctypes.c_size_t)),
    "takeovers": (ctypes.c_uint64, (ctypes.c_int,)),
    "admit": (
        ctypes.c_int,
        (ctypes.c_int, _POINTER, ctypes.c_size_t, ctypes.c_uint64, _POINTER, ctypes.c_size_t),
    ),
    "dismiss": (None, (ctypes.c_int, ctypes.c_int)),
    "timeline": (ctypes.c_size_t, (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)),
    "next_rows": (ctypes.c_uint32, (ctypes.c_int, ctypes.c_uint32)),
    "worker_counts": (
        None,
        (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, _POINTER, ctypes.c_size_t),
    ),
}


class Library:
    """The loaded library; its functions release Python's lock while they run."""

    def __init__(self) -> None:
        self.ucx = find_ucx()
        self.handle = ctypes.CDLL(str(build(self.ucx)))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.handle, f"ds41jax_{name}")
            function.restype, function.argtypes = result, arguments
        for name, platform, symbol in TARGETS:
            handler = jax.ffi.pycapsule(getattr(self.handle, symbol))
            jax.ffi.register_ffi_target(name, handler, platform=platform)

    def call(self, name: str, *arguments: object) -> int:
        """Calls a function that writes why it failed; raises `FabricError` with that."""
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        function = getattr(self.handle, f"ds41jax_{name}")
        result = int(function(*arguments, message, MESSAGE_BYTES))
        if result < 0:
            raise FabricError(message.value.decode(errors="replace"))
        return result

    def text(self, name: str, *arguments: object) -> str:
        """Calls a function that answers with a text."""
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        getattr(self.handle, f"ds41jax_{name}")(*arguments, message, MESSAGE_BYTES)
        return message.value.decode(errors="replace")

    def open_coordinator(
        self, options: CoordinatorOptions, transports: str | None, spin: bool
    ) -> int:
        """A session's place. Raises `FabricError` if UCX does not start."""
        return self._open("open_coordinator", options, transports, spin)

    def open_worker(self, options: WorkerOptions, transports: str | None, spin: bool) -> int:
        """A session's place. Raises `FabricError` if UCX does not start."""
        return self._open("open_worker", options, transports, spin)

    def _open(
        self, name: str, options: ctypes.Structure, transports: str | None, spin: bool
    ) -> int:
        chosen = None if transports is None else transports.encode()
        library = str(self.ucx.library).encode()
        return self.call(name, library, chosen, int(spin), ctypes.byref(options))

    def worker_counts(self, session: int) -> tuple[int, int, str]:
        """Frames answered, frames refused, and why the last one was."""
        counts = (ctypes.c_uint64(), ctypes.c_uint64())
        why = self.text("worker_counts", session, *map(ctypes.byref, counts))
        return counts[0].value, counts[1].value, why

    def timeline(self, session: int, worker: bool) -> np.ndarray:
        """The last moments of a session's exchanges, oldest first: records of `MOMENT`."""
        moments = np.zeros(MOMENTS, MOMENT)
        count = self.handle.ds41jax_timeline(session, int(worker), moments.ctypes.data, MOMENTS)
        return moments[:count]

    def address(self, session: int, worker: bool) -> bytes:
        """The transport's address of a session, for the handshake."""
        out = ctypes.create_string_buffer(ADDRESS_BYTES)
        size = self.handle.ds41jax_address(session, int(worker), out, ADDRESS_BYTES)
        if size < 0:
            raise FabricError("the session is closed, or its transport address is too long")
        return out.raw[:size]


@functools.cache
def native() -> Library:
    """The library, built and loaded on the first call.

    Raises:
      FabricError: if UCX or a compiler is missing.
    """
    return Library()
