"""config.json of the published Ling-3.0 models, as shipped in configs/targets, and of 3.1 as far as it is known."""

import json
from pathlib import Path
from typing import Any

TARGETS = Path(__file__).parent.parent / "configs" / "targets"
FLASH: dict[str, Any] = json.loads((TARGETS / "ling-3.0-flash" / "config.json").read_text())
TINY: dict[str, Any] = json.loads((TARGETS / "ling-3.0-tiny" / "config.json").read_text())
FLASH_31: dict[str, Any] = FLASH | {
    "hidden_size": 4096,
    "num_hidden_layers": 72,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "intermediate_size": 10240,
    "first_k_dense_replace": 4,
    "moe_intermediate_size": 1280,
    "moe_shared_expert_intermediate_size": 1280,
    "layer_group_size": 8,
    "expert_swiglu_limit_list": [0] * 65 + [10] * 7,
    "share_expert_swiglu_limit_list": [0] * 64 + [10] * 8,
    "max_position_embeddings": 1048576,
}
