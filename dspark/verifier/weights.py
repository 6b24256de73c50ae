"""A rank's weights as the kernels take them: fused projections, stacked experts, linear attention stacked over layers.

Shape letters beside those of ``dspark.types``: C rows of a fused projection or columns of a latent, F width of a value,
J taps of the short convolution, I inner width of an expert; L counts linear attention layers here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch

from dspark.errors import ConfigError
from dspark.target.config import TargetConfig

DIVIDED = ("num_attention_heads", "vocab_size", "intermediate_size", "moe_intermediate_size")


class Shard(NamedTuple):
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
    """A dtype alone is that of everything, of gates and head too."""
    return dtype if isinstance(dtype, Precision) else Precision(dtype)


class LinearWeights(NamedTuple):
    """All linear attention layers. The rows of in_LCD are q | k | v | f | g | b, those of conv_LCJ q | k | v."""

    in_LCD: torch.Tensor
    conv_LCJ: torch.Tensor
    a_log_LH: torch.Tensor
    dt_bias_LHE: torch.Tensor
    norm_LF: torch.Tensor
    out_LDC: torch.Tensor


class LatentWeights(NamedTuple):
    """One latent attention layer. The rows of in_CD are q (or q_a) | kv_a | g; q_norm and q_b are None without q_a."""

    in_CD: torch.Tensor
    q_norm_C: torch.Tensor | None
    q_b_CQ: torch.Tensor | None
    kv_norm_C: torch.Tensor
    keys_HEC: torch.Tensor
    values_HFC: torch.Tensor
    out_DC: torch.Tensor


class ExpertWeights(NamedTuple):
    """Experts of one layer, the shared one last: gate rows then up rows, and each one's SwiGLU limit (inf: none)."""

    gate_up_XCD: torch.Tensor
    down_XDI: torch.Tensor
    limits_X: torch.Tensor


class RouterWeights(NamedTuple):
    """The router of one layer, the same on every rank."""

    gate_XD: torch.Tensor
    bias_X: torch.Tensor


class LayerWeights(NamedTuple):
    """One layer; ``latent`` is None in a linear attention layer, ``router`` where a dense MLP is the only expert."""

    input_norm_D: torch.Tensor
    latent: LatentWeights | None
    post_norm_D: torch.Tensor
    router: RouterWeights | None
    experts: ExpertWeights


class VerifierWeights(NamedTuple):
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


class MtpWeights(NamedTuple):
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


Fill = Callable[[torch.Tensor, Iterable[str]], None]
"""Gives a tensor its numbers; the names are those of the checkpoint whose slices, one after another, it holds."""


def allocate(
    config: TargetConfig, shard: Shard, dtype: Dtypes, device: torch.device | str = "cpu", fill: Fill = lambda *_: None
) -> VerifierWeights:
    """A rank's weights, each filled as it is made; without ``fill`` their memory is undefined, but for the experts'
    limits. On the meta device only shapes. Raises: ConfigError as ``Shard.check``.
    """
    shard.check(config)
    make, width = _Maker(config, shard, precision_of(dtype), device, fill), config.hidden_size
    linear = [layer for layer in range(config.num_hidden_layers) if not config.is_latent(layer)]
    return VerifierWeights(
        config,
        shard,
        embedding_VD=make(["model.word_embeddings.weight"], config.vocab_size, width),
        linear=_linear(make, linear) if linear else None,
        layers=tuple(_layer(make, layer) for layer in range(config.num_hidden_layers)),
        norm_D=make(["model.norm.weight"], width),
        head_VD=make(["lm_head.weight"], shard.part(config.vocab_size), width, dtype=make.precision.of("head")),
    )


def allocate_mtp(
    config: TargetConfig, shard: Shard, dtype: Dtypes, device: torch.device | str = "cpu", fill: Fill = lambda *_: None
) -> MtpWeights:
    """``allocate`` for the prediction layer. Raises: ConfigError also when the target has none."""
    shard.check(config)
    if not config.num_nextn_predict_layers:
        raise ConfigError("this target has no prediction layer (num_nextn_predict_layers is 0), so it cannot draft")
    make, width = _Maker(config, shard, precision_of(dtype), device, fill), config.hidden_size
    layer = config.num_hidden_layers  # the one just past the main model's
    return MtpWeights(
        config,
        shard,
        enorm_D=make([f"model.layers.{layer}.enorm.weight"], width),
        hnorm_D=make([f"model.layers.{layer}.hnorm.weight"], width),
        eh_DC=make([f"model.layers.{layer}.eh_proj.weight"], width, 2 * width),
        layer=_layer(make, layer),
        norm_D=make([f"model.layers.{layer}.final_layernorm.weight"], width),
    )


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """Every tensor of nested weights, or arguments, once."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)


def num_bytes(weights: VerifierWeights | MtpWeights) -> int:
    """What one rank's weights take."""
    return sum(tensor.nbytes for tensor in tensors_of(weights))


class _Maker(NamedTuple):
    """Makes a tensor of a rank's weights from the names of what it holds and its shape."""

    config: TargetConfig
    shard: Shard
    precision: Precision
    device: torch.device | str
    fill: Fill

    def __call__(self, names: Iterable[str], *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype or self.precision.working, device=self.device)
        self.fill(tensor, names)
        return tensor


def _linear(make: _Maker, layers: Sequence[int]) -> LinearWeights:
    config, num_layers, width = make.config, len(layers), make.config.hidden_size
    heads, head_width = make.shard.part(config.num_attention_heads), config.head_dim
    rows, wide = heads * head_width, torch.promote_types(make.precision.working, torch.float32)
    taps = config.short_conv_kernel_size

    def of(*names: str) -> Iterator[str]:
        return (f"model.layers.{layer}.attention.{name}" for layer in layers for name in names)

    return LinearWeights(
        in_LCD=make(of(*(f"{name}_proj.weight" for name in "qkvfgb")), num_layers, 5 * rows + heads, width),
        conv_LCJ=make(of(*(f"{name}_conv1d.weight" for name in "qkv")), num_layers, 3 * rows, taps),
        a_log_LH=make(of("A_log"), num_layers, heads, dtype=wide),
        dt_bias_LHE=make(of("dt_bias"), num_layers, heads, head_width, dtype=wide),
        norm_LF=make(of("o_norm.weight"), num_layers, head_width),
        out_LDC=make(of("o_proj.weight"), num_layers, width, rows),
    )


def _latent(make: _Maker, prefix: str) -> LatentWeights:
    config = make.config
    width, latent, rank = config.hidden_size, config.kv_lora_rank, config.q_lora_rank
    heads, nope, value = make.shard.part(config.num_attention_heads), config.qk_nope_head_dim, config.v_head_dim
    queries, first = heads * config.qk_head_dim, "q_proj" if rank is None else "q_a_proj"
    names = (f"{prefix}{name}.weight" for name in (first, "kv_a_proj_with_mqa", "g_proj"))
    in_CD = make(names, (rank or queries) + latent + config.qk_rope_head_dim + heads, width)
    q_norm_C = None if rank is None else make([f"{prefix}q_a_layernorm.weight"], rank)
    q_b_CQ = None if rank is None else make([f"{prefix}q_b_proj.weight"], queries, rank)
    kv_norm_C = make([f"{prefix}kv_a_layernorm.weight"], latent)
    kv_HGC = make([f"{prefix}kv_b_proj.weight"], heads, nope + value, latent)
    keys_HEC, values_HFC = (part.contiguous() for part in torch.split(kv_HGC, [nope, value], 1))
    out_DC = make([f"{prefix}dense.weight"], width, heads * value)
    return LatentWeights(in_CD, q_norm_C, q_b_CQ, kv_norm_C, keys_HEC, values_HFC, out_DC)


def _layer(make: _Maker, layer: int) -> LayerWeights:
    config, width, prefix = make.config, make.config.hidden_size, f"model.layers.{layer}."
    input_norm_D = make([f"{prefix}input_layernorm.weight"], width)
    latent = _latent(make, f"{prefix}attention.") if config.is_latent(layer) else None
    post_norm_D = make([f"{prefix}post_attention_layernorm.weight"], width)
    mlp, router, inner = f"{prefix}mlp.", None, make.shard.part(config.intermediate_size)
    experts, limits = [mlp], [inf]  # a dense MLP is one expert without a limit
    if config.is_moe(layer):
        num_experts, inner = config.num_experts, make.shard.part(config.moe_intermediate_size)
        gate_XD = make([f"{mlp}gate.weight"], num_experts, width, dtype=make.precision.of("router"))
        router = RouterWeights(gate_XD, make([f"{mlp}gate.expert_bias"], num_experts, dtype=torch.float32))
        experts = [*(f"{mlp}experts.{expert}." for expert in range(num_experts)), f"{mlp}shared_experts."]
        limits = [config.routed_limit(layer) or inf] * num_experts + [config.shared_limit(layer) or inf]
    halves = (f"{expert}{half}_proj.weight" for expert in experts for half in ("gate", "up"))
    gate_up_XCD = make(halves, len(experts), 2 * inner, width)
    down_XDI = make((f"{expert}down_proj.weight" for expert in experts), len(experts), width, inner)
    limits_X = torch.tensor(limits, device=make.device)
    return LayerWeights(input_norm_D, latent, post_norm_D, router, ExpertWeights(gate_up_XCD, down_XDI, limits_X))
