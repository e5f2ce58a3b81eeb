"""Routed experts on other machines: topologies, the exchange inside a step, workers, launch."""
