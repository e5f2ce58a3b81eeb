"""Who a process is: what a coordinator and a worker compare before they trust each other's rows."""

import hashlib
from pathlib import Path

from ds41jax.checkpoint.safetensors_files import open_checkpoint
from ds41jax.config import ModelConfig

SAMPLED_SUFFIXES = (".gate.bias", ".ffn_norm.weight", ".attn_norm.weight")  # small, unlike weights


def model_revision(path: str | Path, config: ModelConfig) -> str:
    """A digest of a checkpoint: its configuration, every tensor's shape, its small tensors' bytes.

    Hashing hundreds of gigabytes would take longer than loading them; the biases and norms of every
    layer tell checkpoints of one geometry apart.
    """
    files = open_checkpoint(path)
    digest = hashlib.sha256(repr(config).encode())
    for name in sorted(files.tensors):
        digest.update(str(files.tensors[name]).encode() + b"\n")
        if name.endswith(SAMPLED_SUFFIXES):
            digest.update(files.view(name).tobytes())
    return digest.hexdigest()[:32]
