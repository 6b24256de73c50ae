"""What a Ling-3.0 config.json means, and what is refused instead of computed wrongly."""

import json
from pathlib import Path
from typing import Any

import pytest
from published import FLASH, TINY
from tiny import TINY_LING

from dspark.errors import ConfigError
from dspark.target.config import load_target_config, parse_target_config


def test_the_latent_and_dense_layers_are_those_of_the_published_models() -> None:
    flash, tiny = parse_target_config(FLASH), parse_target_config(TINY)
    assert [i for i in range(42) if flash.is_latent(i)] == [5, 11, 17, 23, 29, 35, 41]
    assert [i for i in range(24) if tiny.is_latent(i)] == [3, 7, 11, 15, 19, 23]
    assert [i for i in range(42) if not flash.is_moe(i)] == [0, 1]
    assert [i for i in range(24) if not tiny.is_moe(i)] == [0]
    assert flash.is_latent(42)
    assert flash.is_moe(42)


def test_layers_left_over_after_the_last_group_are_latent(ling_golden: dict[str, Any]) -> None:
    mini = ling_golden["mini_model"]
    config = parse_target_config(mini["config"])
    kinds = ["MLA" if config.is_latent(i) else "KDA" for i in range(config.num_hidden_layers)]
    assert kinds == mini["layer_kinds"]


def test_a_limit_of_zero_or_past_the_end_of_its_list_is_no_clamp() -> None:
    flash, tiny = parse_target_config(FLASH), parse_target_config(TINY)
    assert [flash.routed_limit(i) for i in (0, 34, 35, 41, 42)] == [None, None, 4, 4, None]
    assert [flash.shared_limit(i) for i in (0, 33, 34, 39, 40, 41, 42)] == [None, None, 5, 5, 7, 7, None]
    assert tiny.routed_limit(23) is None
    assert tiny.shared_limit(23) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_kv_heads_for_linear_attn", 1),
        ("norm_topk_prob", False),
        ("score_function", "softmax"),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("moe_router_enable_expert_bias", False),
        ("router_dtype", "bf16"),
        ("scale_router_input", True),
        ("rope_interleave", False),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
        ("rotary_dim", 4),
        ("qk_head_dim", 16),
        ("num_key_value_heads", 1),
        ("gated_attention_proj_granularity_type", "element_wise"),
        ("use_mla_nope", True),
        ("no_kda_lora", False),
        ("use_kda_lora", True),
        ("kda_safe_gate", False),
        ("kda_lower_bound", None),
        ("kda_lower_bound", -6.0),
        ("linear_silu", False),
        ("hidden_act", "gelu"),
        ("use_bias", True),
        ("use_qkv_bias", True),
        ("use_nGPT", True),
        ("up_proj_norm", True),
        ("value_norm", True),
        ("tie_word_embeddings", True),
        ("mtp_use_kda", True),
        ("num_nextn_predict_layers", 2),
        ("quantization_config", {"quant_method": "fp8"}),
        ("n_group", 3),
        ("topk_group", 5),
        ("num_experts_per_tok", 5),
        ("qk_rope_head_dim", 7),
        ("short_conv_kernel_size", 1),
        ("expert_swiglu_limit_list", [-1]),
    ],
)
def test_a_value_that_would_change_the_computation_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^model/config\.json: {key}\b"):
        parse_target_config(TINY_LING | {key: value}, "model/config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_qk_norm", False),
        ("partial_rotary_factor", 1.0),
        ("group_norm_size", 8),
        ("max_window_layers", 1),
        ("attention_dropout", 0.1),
        ("num_kv_heads_for_linear_attn", 2),
        ("rope_scaling", {"rope_type": "default"}),
        ("a_key_of_next_year", 1),
    ],
)
def test_a_key_that_computes_nothing_is_ignored(key: str, value: Any) -> None:
    assert parse_target_config(TINY_LING | {key: value}) == parse_target_config(TINY_LING)


@pytest.mark.parametrize("key", ["kda_lower_bound", "kv_lora_rank", "num_experts", "rope_theta"])
def test_a_missing_key_is_named(key: str) -> None:
    values = {name: value for name, value in TINY_LING.items() if name != key}
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        parse_target_config(values)


def test_another_network_of_the_same_model_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"architectures must be .* got \['BailingMoeV2_5ForCausalLM'\]"):
        parse_target_config(TINY_LING | {"architectures": ["BailingMoeV2_5ForCausalLM"]})


@pytest.mark.parametrize("text", ["{", "[1]", None])
def test_a_config_file_that_is_absent_or_no_object_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: (no such file|not valid JSON|expected a JSON object)"):
        load_target_config(tmp_path)


def test_a_config_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FLASH))
    assert load_target_config(tmp_path) == parse_target_config(FLASH)
