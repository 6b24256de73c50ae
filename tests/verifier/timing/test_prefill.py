"""What a prefill is measured against."""

from pathlib import Path

import torch

from dspark.target.config import load_target_config
from dspark.verifier import Shard
from dspark.verifier.timing import product_flops
from dspark.verifier.weights import allocate

FLASH = Path(__file__).parents[3] / "configs" / "targets" / "ling-3.0-flash"


def test_products_of_a_token_are_those_of_the_published_active_parameters() -> None:
    config = load_target_config(FLASH)
    whole, quarter = (allocate(config, Shard(0, world), torch.bfloat16, "meta") for world in (1, 4))
    active = product_flops(whole) / 2 + whole.head_VD.numel()
    assert 5.05e9 < active < 5.2e9, "5.1 B active, the head's rows among them"
    routers = 2 * 40 * 512 * config.hidden_size
    shared = 2 * 7 * (config.kv_lora_rank + config.qk_rope_head_dim) * config.hidden_size
    assert 4 * product_flops(quarter) == product_flops(whole) + 3 * (routers + shared), "whole on every rank"
