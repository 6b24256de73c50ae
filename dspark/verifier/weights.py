"""A rank's weights as the kernels take them: fused projections, stacked experts, linear attention stacked over layers.

Shape letters beside those of ``dspark.types``: C rows of a fused projection or columns of a latent, F width of a value,
J taps of the short convolution, I inner width of an expert; L counts linear attention layers here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from dspark.errors import ConfigError
from dspark.target.config import TargetConfig

DIVIDED = ("num_attention_heads", "vocab_size", "intermediate_size", "moe_intermediate_size")


@dataclass(frozen=True)
class Shard:
    """Which of ``world_size`` equal parts of the target this process holds."""

    rank: int = 0
    world_size: int = 1

    def part(self, size: int) -> int:
        """A rank's part of a dimension that ``check`` found divisible."""
        return size // self.world_size

    def check(self, config: TargetConfig) -> None:
        """Raises: ConfigError when the ranks do not divide the target, or its shared expert is not like the others."""
        wrong = [f"{name} {getattr(config, name)}" for name in DIVIDED if getattr(config, name) % self.world_size]
        if wrong:
            raise ConfigError(f"{self.world_size} ranks do not divide {', '.join(wrong)}; use fewer ranks")
        shared, inner = config.shared_intermediate_size, config.moe_intermediate_size
        if shared != inner:  # it runs as one more expert
            raise ConfigError(f"the verifier's shared expert must be moe_intermediate_size {inner}, got {shared}")


@dataclass(frozen=True)
class Precision:
    """What weights are kept in: the ``working`` dtype; of router gates ("router") and "head" those named in float32.
    Raises: ConfigError for another name.
    """

    working: torch.dtype
    float32: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if wrong := self.float32 - {"router", "head"}:
            raise ConfigError(
                f"float32: what can be float32 is router and head, got {', '.join(map(repr, sorted(wrong)))}"
            )

    def of(self, part: str) -> torch.dtype:
        """The dtype of "router" or "head"; of a wider working dtype that one."""
        return torch.promote_types(self.working, torch.float32) if part in self.float32 else self.working


Dtypes = torch.dtype | Precision


def precision_of(dtype: Dtypes) -> Precision:
    """A dtype alone is that of everything."""
    return dtype if isinstance(dtype, Precision) else Precision(dtype)


"""One dtype is the working one, of gates and head too."""


@dataclass(frozen=True)
class LinearWeights:
    """All linear attention layers. The rows of in_LCD are q | k | v | f | g | b, those of conv_LCJ q | k | v."""

    in_LCD: torch.Tensor
    conv_LCJ: torch.Tensor
    a_log_LH: torch.Tensor
    dt_bias_LHE: torch.Tensor
    norm_LF: torch.Tensor
    out_LDC: torch.Tensor


@dataclass(frozen=True)
class LatentWeights:
    """One latent attention layer. The rows of in_CD are q (or q_a) | kv_a | g; q_norm and q_b are None without q_a."""

    in_CD: torch.Tensor
    q_norm_C: torch.Tensor | None
    q_b_CQ: torch.Tensor | None
    kv_norm_C: torch.Tensor
    keys_HEC: torch.Tensor
    values_HFC: torch.Tensor
    out_DC: torch.Tensor


@dataclass(frozen=True)
class ExpertWeights:
    """Experts of one layer, the shared one last: gate rows then up rows, and each one's SwiGLU limit (inf: none)."""

    gate_up_XCD: torch.Tensor
    down_XDI: torch.Tensor
    limits_X: torch.Tensor


@dataclass(frozen=True)
class RouterWeights:
    """The router of one layer, the same on every rank."""

    gate_XD: torch.Tensor
    bias_X: torch.Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One layer; ``latent`` is None in a linear attention layer, ``router`` where a dense MLP is the only expert."""

    input_norm_D: torch.Tensor
    latent: LatentWeights | None
    post_norm_D: torch.Tensor
    router: RouterWeights | None
    experts: ExpertWeights


@dataclass(frozen=True)
class VerifierWeights:
    """What one rank holds. The embedding is whole, since a step reads few of its rows; the head is the rank's part."""

    config: TargetConfig
    shard: Shard
    embedding_VD: torch.Tensor
    linear: LinearWeights | None
    layers: tuple[LayerWeights, ...]
    norm_D: torch.Tensor
    head_VD: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_VD.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding_VD.device

    @property
    def first_id(self) -> int:
        """The id of the head's first row on this rank."""
        return self.shard.rank * len(self.head_VD)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in tensors_of(self))


@dataclass(frozen=True)
class MtpWeights:
    """What one rank holds of the target's multi-token prediction layer; embedding and head are the verifier's.
    eh_DC, the embedding's half first, is whole on every rank, as in vLLM and SGLang: its part alone would save a rank
    of four 20 MB of reading, which takes no longer than the sum over ranks that it would need.
    """

    config: TargetConfig
    shard: Shard
    enorm_D: torch.Tensor
    hnorm_D: torch.Tensor
    eh_DC: torch.Tensor
    layer: LayerWeights
    norm_D: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in tensors_of(self))


def allocate(config: TargetConfig, shard: Shard, dtype: Dtypes, device: torch.device | str = "cpu") -> VerifierWeights:
    """Undefined memory for a rank's weights; on the meta device only shapes. Raises: ConfigError as ``Shard.check``."""
    shard.check(config)
    precision = precision_of(dtype)
    factory: dict[str, Any] = {"dtype": precision.working, "device": device}
    width, gate = config.hidden_size, precision.of("router")
    linear_layers = [layer for layer in range(config.num_hidden_layers) if not config.is_latent(layer)]
    embedding_VD, norm_D = torch.empty(config.vocab_size, width, **factory), torch.empty(width, **factory)
    linear = _linear(config, shard, len(linear_layers), factory) if linear_layers else None
    layers = tuple(_layer(config, shard, layer, factory, gate) for layer in range(config.num_hidden_layers))
    head_VD = torch.empty(shard.part(config.vocab_size), width, dtype=precision.of("head"), device=device)
    return VerifierWeights(config, shard, embedding_VD, linear, layers, norm_D, head_VD)


def allocate_mtp(config: TargetConfig, shard: Shard, dtype: Dtypes, device: torch.device | str = "cpu") -> MtpWeights:
    """``allocate`` for the prediction layer. Raises: ConfigError also when the target has none."""
    shard.check(config)
    if not config.num_nextn_predict_layers:
        raise ConfigError("this target has no prediction layer (num_nextn_predict_layers is 0), so it cannot draft")
    precision = precision_of(dtype)
    factory: dict[str, Any] = {"dtype": precision.working, "device": device}
    width = config.hidden_size
    enorm_D, hnorm_D, norm_D = (torch.empty(width, **factory) for _ in range(3))
    layer = _layer(config, shard, config.num_hidden_layers, factory, precision.of("router"))
    return MtpWeights(config, shard, enorm_D, hnorm_D, torch.empty(width, 2 * width, **factory), layer, norm_D)


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """Every tensor of nested weights once."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_of(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def _linear(config: TargetConfig, shard: Shard, num_layers: int, factory: dict[str, Any]) -> LinearWeights:
    width, heads, head_width = config.hidden_size, shard.part(config.num_attention_heads), config.head_dim
    rows = heads * head_width
    wide = factory | {"dtype": torch.promote_types(factory["dtype"], torch.float32)}
    return LinearWeights(
        in_LCD=torch.empty(num_layers, 5 * rows + heads, width, **factory),
        conv_LCJ=torch.empty(num_layers, 3 * rows, config.short_conv_kernel_size, **factory),
        a_log_LH=torch.empty(num_layers, heads, **wide),
        dt_bias_LHE=torch.empty(num_layers, heads, head_width, **wide),
        norm_LF=torch.empty(num_layers, head_width, **factory),
        out_LDC=torch.empty(num_layers, width, rows, **factory),
    )


def _latent(config: TargetConfig, shard: Shard, factory: dict[str, Any]) -> LatentWeights:
    width, heads, latent = config.hidden_size, shard.part(config.num_attention_heads), config.kv_lora_rank
    queries, rank = heads * config.qk_head_dim, config.q_lora_rank
    rows = (rank or queries) + latent + config.qk_rope_head_dim + heads
    return LatentWeights(
        in_CD=torch.empty(rows, width, **factory),
        q_norm_C=None if rank is None else torch.empty(rank, **factory),
        q_b_CQ=None if rank is None else torch.empty(queries, rank, **factory),
        kv_norm_C=torch.empty(latent, **factory),
        keys_HEC=torch.empty(heads, config.qk_nope_head_dim, latent, **factory),
        values_HFC=torch.empty(heads, config.v_head_dim, latent, **factory),
        out_DC=torch.empty(width, heads * config.v_head_dim, **factory),
    )


def _layer(config: TargetConfig, shard: Shard, layer: int, factory: dict[str, Any], gate: torch.dtype) -> LayerWeights:
    width, is_moe = config.hidden_size, config.is_moe(layer)
    inner = shard.part(config.moe_intermediate_size if is_moe else config.intermediate_size)
    num_experts = config.num_experts if is_moe else 0
    wide = factory | {"dtype": torch.float32}
    gate_XD = torch.empty(num_experts, width, **factory | {"dtype": gate})
    gate_up_XCD = torch.empty(num_experts + 1, 2 * inner, width, **factory)
    down_XDI = torch.empty(num_experts + 1, width, inner, **factory)
    router = RouterWeights(gate_XD, torch.empty(num_experts, **wide))
    return LayerWeights(
        input_norm_D=torch.empty(width, **factory),
        latent=_latent(config, shard, factory) if config.is_latent(layer) else None,
        post_norm_D=torch.empty(width, **factory),
        router=router if is_moe else None,
        experts=ExpertWeights(gate_up_XCD, down_XDI, torch.empty(num_experts + 1, **wide)),
    )
