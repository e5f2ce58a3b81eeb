"""The GPU's half of an exchange, as far as it can be tested without one: it compiles."""

import pytest

from ds41jax.fabric.cuda import compile_kernels, find_nvrtc
from ds41jax.fabric.library import FabricError


def nvrtc_is_here() -> bool:
    try:
        find_nvrtc()
    except FabricError:
        return False
    return True


@pytest.mark.skipif(not nvrtc_is_here(), reason="NVRTC comes with jax's CUDA extras")
@pytest.mark.parametrize("architecture", ["90", "100", "120"])
def test_the_kernels_compile(architecture: str) -> None:
    assert compile_kernels(architecture).startswith(b"\x7fELF")


@pytest.mark.skipif(nvrtc_is_here(), reason="NVRTC is installed")
def test_without_nvrtc_the_error_says_what_to_install() -> None:
    with pytest.raises(FabricError, match=r"install ds41jax\[cuda12\]"):
        compile_kernels("90")
