"""The recipe of the embedded nano model: the model's own functions under `jax.grad`."""
