"""A Ling-3.0 target's config.json: the values that its computation depends on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, model_validator

from dspark.config import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, validated
from dspark.errors import ConfigError
from dspark.files import read_json

LING_ARCHITECTURE = "BailingMoeV3ForCausalLM"

_ONLY_VALUE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("norm_topk_prob", "moe_router_enable_expert_bias", "rope_interleave"), (True,)),
    **dict.fromkeys(("no_kda_lora", "kda_safe_gate", "linear_silu"), (True,)),
    **dict.fromkeys(("scale_router_input", "use_mla_nope", "use_kda_lora", "mtp_use_kda"), (False, None)),
    **dict.fromkeys(("use_bias", "use_qkv_bias", "use_nGPT", "up_proj_norm", "value_norm"), (False, None)),
    **dict.fromkeys(("score_function", "scoring_func"), ("sigmoid",)),
    "topk_method": ("noaux_tc",),
    "router_dtype": ("fp32", "float32", None),
    "gated_attention_proj_granularity_type": ("head_wise",),
    "hidden_act": ("silu",),
    "tie_word_embeddings": (False,),
    "quantization_config": (None,),
}
"""Keys of which only these values are computed. A missing key means the first one."""


class TargetConfig(BaseModel, frozen=True, extra="ignore"):
    """The architecture of a Ling-3.0 model, under the names of its config.json; keys that compute nothing are left out.
    Source: specs/ling-3.0.md section 1; configuration_bailing_moe_v3.py of inclusionAI/Ling-3.0-flash.
    """

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: Annotated[int, Field(ge=1, le=10_000)]
    num_attention_heads: PositiveInt
    head_dim: PositiveInt
    """Width of a key and of a value of the linear attention."""
    intermediate_size: PositiveInt
    first_k_dense_replace: NonNegativeInt
    moe_intermediate_size: PositiveInt
    moe_shared_expert_intermediate_size: PositiveInt
    num_experts: Annotated[int, Field(ge=1, le=32_766)]
    """Picks are sorted by numbers of 16 bits, in which the shared expert comes last."""
    num_experts_per_tok: PositiveInt
    num_shared_experts: PositiveInt
    n_group: PositiveInt
    topk_group: PositiveInt
    routed_scaling_factor: PositiveFloat
    layer_group_size: PositiveInt
    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    rope_theta: PositiveFloat
    kda_lower_bound: Annotated[float, Field(ge=-5, lt=0)]
    """Lower bound of the log decay; below -5 sixteen tokens would leave float32."""
    short_conv_kernel_size: Annotated[int, Field(ge=2)]
    rms_norm_eps: PositiveFloat
    expert_swiglu_limit_list: tuple[NonNegativeFloat | None, ...] | None = None
    share_expert_swiglu_limit_list: tuple[NonNegativeFloat | None, ...] | None = None
    num_nextn_predict_layers: Annotated[int, Field(ge=0, le=1)] = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        experts, groups, chosen = self.num_experts, self.n_group, self.num_experts_per_tok
        if experts % groups or experts < 2 * groups:
            raise ValueError(f"n_group must divide num_experts {experts} into groups of at least 2, got {groups}")
        if self.topk_group > groups:
            raise ValueError(f"topk_group must be at most n_group {groups}, got {self.topk_group}")
        eligible = self.topk_group * (experts // groups)
        if chosen > eligible:
            raise ValueError(f"num_experts_per_tok must be at most {eligible}, as topk_group implies, got {chosen}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even, got {self.qk_rope_head_dim}")
        return self

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key of the latent attention: the part without positions, then the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared expert."""
        return self.moe_shared_expert_intermediate_size * self.num_shared_experts

    @property
    def router_law(self) -> tuple[int, int, int, float]:
        """See ``kernels.router.Law``."""
        return self.n_group, self.topk_group, self.num_experts_per_tok, self.routed_scaling_factor

    def is_latent(self, layer: int) -> bool:
        """Whether the layer's attention is MLA rather than KDA; the MTP layer (num_hidden_layers) is MLA.
        Source: modeling_bailing_moe_v3.py; layers left over after the last whole group are MLA too.
        """
        whole_groups = self.num_hidden_layers // self.layer_group_size * self.layer_group_size
        return (layer + 1) % self.layer_group_size == 0 or layer >= whole_groups

    def is_moe(self, layer: int) -> bool:
        """Whether the layer's feed-forward block is a mixture of experts; the MTP layer's is."""
        return layer >= self.first_k_dense_replace

    def routed_limit(self, layer: int) -> float | None:
        """SwiGLU limit of the layer's routed experts; None for no clamp (also past the end of the list: MTP)."""
        return _limit(self.expert_swiglu_limit_list, layer)

    def shared_limit(self, layer: int) -> float | None:
        """SwiGLU limit of the layer's shared expert; None for no clamp (also past the end of the list: MTP)."""
        return _limit(self.share_expert_swiglu_limit_list, layer)


def parse_target_config(values: Mapping[str, Any], place: str = "config.json") -> TargetConfig:
    """Check the content of a config.json and keep what computes something.
    Raises: ConfigError naming ``place``, the key, what was found and what is computed here.
    """
    architectures = values.get("architectures")
    if architectures != [LING_ARCHITECTURE]:
        raise ConfigError(f"{place}: architectures must be [{LING_ARCHITECTURE!r}], got {architectures!r}")
    kv_heads = {"num_kv_heads_for_linear_attn": (0, None, values.get("num_attention_heads"))}
    for key, allowed in (kv_heads | _ONLY_VALUE).items():
        if key in values and values[key] not in allowed:
            raise ConfigError(f"{place}: {key} must be {allowed[0]!r}, got {values[key]!r}; no other law is computed")
    scaling = values.get("rope_scaling")
    is_default = isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) == "default"
    if scaling is not None and not is_default:
        raise ConfigError(f"{place}: rope_scaling must be null, got {scaling!r}; YaRN and others are not computed")
    config = validated(TargetConfig, values, place)
    implied = {
        "num_key_value_heads": config.num_attention_heads,
        "qk_head_dim": config.qk_head_dim,
        "rotary_dim": config.qk_rope_head_dim,
    }
    for key, expected in implied.items():
        if values.get(key, expected) != expected:
            raise ConfigError(f"{place}: {key} must be {expected}, as the other keys imply, got {values[key]!r}")
    return config


def read_config_json(folder: Path) -> dict[str, Any]:
    """The content of a model folder's config.json. Raises: ConfigError when the file is absent or not a JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected a model folder in Hugging Face layout")
    return read_json(path)


def load_target_config(folder: Path | str) -> TargetConfig:
    """Read and check the config.json of a Ling-3.0 model folder. Raises: ConfigError."""
    return parse_target_config(read_config_json(Path(folder)), str(Path(folder) / "config.json"))


def _limit(limits: tuple[float | None, ...] | None, layer: int) -> float | None:
    if limits is None or layer >= len(limits):
        return None
    return limits[layer] or None
