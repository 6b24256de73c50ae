"""Every tensor of a Ling-3.0 checkpoint: name, shape, dtype, and the dimension that tensor parallelism splits."""

from dataclasses import dataclass
from math import prod

import torch

from dspark.target.config import TargetConfig


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint. ``shard_dim`` is None for a tensor that every rank holds whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    shard_dim: int | None = None

    def num_bytes(self, world_size: int = 1) -> int:
        """Bytes that one of ``world_size`` ranks holds."""
        split = 1 if self.shard_dim is None else world_size
        return prod(self.shape) // split * self.dtype.itemsize


@dataclass(frozen=True)
class ParameterCounts:
    """Sizes of the main model and of its MTP layer; ``bytes`` are those of one tensor-parallel rank."""

    main_tensors: int
    mtp_tensors: int
    main_params: int
    mtp_params: int
    main_bytes: int
    mtp_bytes: int


def mtp_prefix(config: TargetConfig) -> str:
    """Start of the names of the MTP layer's tensors: the layer index just past the main model's."""
    return f"model.layers.{config.num_hidden_layers}."


def tensor_shapes(config: TargetConfig) -> dict[str, TensorSpec]:
    """Every tensor that the model's checkpoint must hold, in the order of the network, the MTP layer last.
    Source: specs/ling-3.0.md sections 2 and 10, checked there against the published totals of flash and tiny.
    """
    table = TensorSpec((config.vocab_size, config.hidden_size), shard_dim=0)
    norm = TensorSpec((config.hidden_size,))
    specs = {"model.word_embeddings.weight": table}
    for layer in range(config.num_hidden_layers):
        specs |= _under(f"model.layers.{layer}.", _layer(config, layer))
    specs |= {"model.norm.weight": norm, "lm_head.weight": table}
    if config.num_nextn_predict_layers:
        width = config.hidden_size
        mtp = {f"{name}.weight": norm for name in ("enorm", "hnorm", "final_layernorm")}
        mtp["eh_proj.weight"] = TensorSpec((width, 2 * width))
        specs |= _under(mtp_prefix(config), mtp | _layer(config, config.num_hidden_layers))
    return specs


def parameter_counts(config: TargetConfig, world_size: int = 1) -> ParameterCounts:
    """Tensors, parameters and bytes per rank when ``world_size`` ranks share the model; nothing is allocated.
    Raises: ValueError when the ranks do not divide the attention heads, the vocabulary or a feed-forward width.
    """
    specs = tensor_shapes(config)
    for name, spec in specs.items():
        if spec.shard_dim is not None and spec.shape[spec.shard_dim] % world_size:
            raise ValueError(f"{world_size} ranks do not divide dimension {spec.shard_dim} of {name} {spec.shape}")
    mtp = [spec for name, spec in specs.items() if name.startswith(mtp_prefix(config))]
    mtp_params, mtp_bytes = sum(prod(spec.shape) for spec in mtp), sum(spec.num_bytes(world_size) for spec in mtp)
    return ParameterCounts(
        main_tensors=len(specs) - len(mtp),
        mtp_tensors=len(mtp),
        main_params=sum(prod(spec.shape) for spec in specs.values()) - mtp_params,
        mtp_params=mtp_params,
        main_bytes=sum(spec.num_bytes(world_size) for spec in specs.values()) - mtp_bytes,
        mtp_bytes=mtp_bytes,
    )


def _layer(config: TargetConfig, layer: int) -> dict[str, TensorSpec]:
    norm = TensorSpec((config.hidden_size,))
    attention = _latent_attention(config) if config.is_latent(layer) else _linear_attention(config)
    mlp = _experts(config) if config.is_moe(layer) else _swiglu(config.hidden_size, config.intermediate_size)
    return (
        {"input_layernorm.weight": norm, "post_attention_layernorm.weight": norm}
        | _under("attention.", attention)
        | _under("mlp.", mlp)
    )


def _linear_attention(config: TargetConfig) -> dict[str, TensorSpec]:
    width, heads = config.hidden_size, config.num_attention_heads
    rows = heads * config.head_dim
    specs = {f"{name}_proj.weight": TensorSpec((rows, width), shard_dim=0) for name in "qkvfg"}
    specs["b_proj.weight"] = TensorSpec((heads, width), shard_dim=0)
    for name in "qkv":
        specs[f"{name}_conv1d.weight"] = TensorSpec((rows, 1, config.short_conv_kernel_size), shard_dim=0)
    specs["A_log"] = TensorSpec((heads,), torch.float32, shard_dim=0)
    specs["dt_bias"] = TensorSpec((rows,), torch.float32, shard_dim=0)
    specs["o_norm.weight"] = TensorSpec((config.head_dim,))
    specs["o_proj.weight"] = TensorSpec((width, rows), shard_dim=1)
    return specs


def _latent_attention(config: TargetConfig) -> dict[str, TensorSpec]:
    width, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    query_rows = heads * config.qk_head_dim
    specs = {}
    if config.q_lora_rank is None:
        specs["q_proj.weight"] = TensorSpec((query_rows, width), shard_dim=0)
    else:
        specs["q_a_proj.weight"] = TensorSpec((config.q_lora_rank, width))
        specs["q_a_layernorm.weight"] = TensorSpec((config.q_lora_rank,))
        specs["q_b_proj.weight"] = TensorSpec((query_rows, config.q_lora_rank), shard_dim=0)
    specs["kv_a_proj_with_mqa.weight"] = TensorSpec((latent + config.qk_rope_head_dim, width))
    specs["kv_a_layernorm.weight"] = TensorSpec((latent,))
    key_value_rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
    specs["kv_b_proj.weight"] = TensorSpec((key_value_rows, latent), shard_dim=0)
    specs["g_proj.weight"] = TensorSpec((heads, width), shard_dim=0)
    specs["dense.weight"] = TensorSpec((width, heads * config.v_head_dim), shard_dim=1)
    return specs


def _experts(config: TargetConfig) -> dict[str, TensorSpec]:
    width = config.hidden_size
    specs = {
        "gate.weight": TensorSpec((config.num_experts, width)),
        "gate.expert_bias": TensorSpec((config.num_experts,), torch.float32),
    }
    expert = _swiglu(width, config.moe_intermediate_size)
    for index in range(config.num_experts):
        specs |= _under(f"experts.{index}.", expert)
    return specs | _under("shared_experts.", _swiglu(width, config.shared_intermediate_size))


def _swiglu(width: int, intermediate: int) -> dict[str, TensorSpec]:
    rows = TensorSpec((intermediate, width), shard_dim=0)
    return {
        "gate_proj.weight": rows,
        "up_proj.weight": rows,
        "down_proj.weight": TensorSpec((width, intermediate), shard_dim=1),
    }


def _under(prefix: str, specs: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {prefix + name: spec for name, spec in specs.items()}
