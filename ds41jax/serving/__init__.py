"""HTTP over the engine: request types, prompt text, streams, images, statistics, the console.

Nothing here touches a JAX array; the engine is reached through `submit`, `stats` and `healthy`.
"""
