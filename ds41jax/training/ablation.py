"""The nano geometry without one of its mechanisms, to see what that one is worth."""

import copy
from collections.abc import Mapping
from typing import Any

ABLATIONS = ("engram", "global-attention", "streams")


def ablated(config_json: Mapping[str, Any], without: str | None) -> dict[str, Any]:
    """The configuration without a mechanism, all else equal.

    "engram": no n-gram memory. "global-attention": every layer sees its window alone. "streams":
    one residual stream instead of four.
    """
    config = copy.deepcopy(dict(config_json))
    text = config["text_config"]
    if without == "engram":
        text |= {"engram_layer_ids": [], "engram_num_embeddings": []}
    elif without == "global-attention":
        text["compress_ratios"] = [0] * len(text["compress_ratios"])
        text |= {"kv_source_layer_ids": [], "index_source_layer_ids": []}
        text["candidate_source_layer_id"] = None
    elif without == "streams":
        text["hc_mult"] = 1
    return config
