"""The exchange's GPU side: its kernels compiled with NVRTC, its mailboxes opened.

NVRTC comes with jax's CUDA extras; without one, or without a GPU, nothing here is reached.
"""

import ctypes
import ctypes.util
import importlib.util
from pathlib import Path

from ds41jax.fabric.library import SOURCES, CoordinatorOptions, FabricError, Library

SOURCE = SOURCES / "exchange.cu"
NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
OPTIONS = ("--std=c++17", "--device-as-default-execution-space")


def find_nvrtc() -> Path | str:
    """NVRTC's library: of the PyPI wheels, or of the system.

    Raises:
      FabricError: if there is none.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    for folder in folders:
        for name in NAMES:
            if found := next(folder.glob(f"*/lib/{name}"), None):
                return found
    for name in NAMES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    raise FabricError(
        "remote experts on a GPU need NVRTC (libnvrtc.so): install ds41jax[cuda12] or [cuda13]"
    )


class _Nvrtc:
    """The few functions of NVRTC that compile one file."""

    def __init__(self, path: Path | str):
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: object) -> int:
        return int(getattr(self._library, name)(*arguments))

    def text(self, program: ctypes.c_void_p, kind: str) -> bytes:
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{kind}Size", program, ctypes.byref(size))
        out = ctypes.create_string_buffer(max(1, size.value))
        self.call(f"nvrtcGet{kind}", program, out)
        return out.raw


def compile_kernels(architecture: str) -> bytes:
    """Machine code of exchange.cu for an architecture such as "90" or "120".

    Raises:
      FabricError: with the compiler's words.
    """
    nvrtc, program = _Nvrtc(find_nvrtc()), ctypes.c_void_p()
    source = SOURCE.read_bytes()
    made = nvrtc.call(
        "nvrtcCreateProgram", ctypes.byref(program), source, b"exchange.cu", 0, None, None
    )
    if made:
        raise FabricError(f"NVRTC does not start: error {made}")
    words = [f"--gpu-architecture=sm_{architecture}", *OPTIONS]
    options = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
    try:
        if nvrtc.call("nvrtcCompileProgram", program, len(words), options):
            log = nvrtc.text(program, "ProgramLog").decode(errors="replace")
            raise FabricError(f"compiling exchange.cu for sm_{architecture} failed:\n{log}")
        return nvrtc.text(program, "CUBIN")
    finally:
        nvrtc.call("nvrtcDestroyProgram", ctypes.byref(program))


def open_mailboxes(
    library: Library, session: int, options: CoordinatorOptions, architecture: str
) -> None:
    """Gives an open coordinator its GPU side. Raises `FabricError` if that fails."""
    image = compile_kernels(architecture)
    library.call("open_mailboxes", session, ctypes.byref(options), image)
