"""RMS normalisation, of every mechanism of the model."""

from ds41jax.kernels.norm import rms_norm

__all__ = ["rms_norm"]
