"""Where every checkpoint tensor goes in a rank's weights, and filling them from a folder or from a seed."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf, log
from pathlib import Path
from typing import TypeVar

import torch

from dspark.target.checkpoint.shapes import mtp_prefix, tensor_shapes
from dspark.target.checkpoint.weights import Checkpoint
from dspark.target.config import TargetConfig, load_target_config
from dspark.verifier.weights import (
    Dtypes,
    LatentWeights,
    LayerWeights,
    LinearWeights,
    MtpWeights,
    Shard,
    VerifierWeights,
    allocate,
    allocate_mtp,
    tensors_of,
)

WeightsT = TypeVar("WeightsT", VerifierWeights, MtpWeights)


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor's slice and the memory that it fills, a view into the rank's weights. ``is_whole``: the rank
    takes all although the shape table splits it. ``select`` takes a part of the slice (keys or values of kv_b).
    """

    name: str
    place: torch.Tensor
    is_whole: bool = False
    select: Callable[[torch.Tensor], torch.Tensor] | None = None


def pieces(weights: VerifierWeights) -> Iterator[Piece]:
    """Every slice that the rank holds, in the order of the network. The MTP layer is not part of the verifier."""
    yield Piece("model.word_embeddings.weight", weights.embedding_VD, is_whole=True)
    num_linear = 0
    for index, layer in enumerate(weights.layers):
        linear: Iterable[Piece] = ()
        if layer.latent is None:
            assert weights.linear is not None
            linear = _linear(f"model.layers.{index}.attention.", weights.linear, num_linear)
            num_linear += 1
        yield from _layer(f"model.layers.{index}.", layer, weights.config, linear)
    yield Piece("model.norm.weight", weights.norm_D)
    yield Piece("lm_head.weight", weights.head_VD)


def mtp_pieces(weights: MtpWeights) -> Iterator[Piece]:
    """Every slice of the prediction layer that the rank holds."""
    prefix = mtp_prefix(weights.config)
    yield Piece(f"{prefix}enorm.weight", weights.enorm_D)
    yield Piece(f"{prefix}hnorm.weight", weights.hnorm_D)
    yield Piece(f"{prefix}eh_proj.weight", weights.eh_DC)
    yield from _layer(prefix, weights.layer, weights.config)
    yield Piece(f"{prefix}final_layernorm.weight", weights.norm_D)


def load_weights(
    folder: Path | str, shard: Shard, dtype: Dtypes, device: torch.device | str = "cpu"
) -> VerifierWeights:
    """Read a rank's slices, one checkpoint tensor after the other, from a Hugging Face folder.
    Raises: ConfigError and CheckpointError as the folder deserves, before anything is allocated.
    """
    return _load(folder, lambda config: allocate(config, shard, dtype, device), pieces)


def load_mtp(folder: Path | str, shard: Shard, dtype: Dtypes, device: torch.device | str = "cpu") -> MtpWeights:
    """``load_weights`` for the prediction layer. Raises: ConfigError also when the target has none."""
    return _load(folder, lambda config: allocate_mtp(config, shard, dtype, device), mtp_pieces)


@torch.no_grad()
def random_weights(
    config: TargetConfig, shard: Shard, dtype: Dtypes, seed: int = 0, device: torch.device | str = "cpu"
) -> VerifierWeights:
    """Weights drawn on the device, for measuring without a checkpoint; each rank draws its own.

    Matrices are normal with deviation 1/sqrt(whole fan-in), so activations stay near 1; those that write to the
    residual stream are smaller by sqrt(2 layers), so that the stream keeps near a token's own embedding and different
    tokens choose experts almost independently. Decay rates as in ``LingModel.initialise``.
    """
    weights = allocate(config, shard, dtype, device)
    generator, ends = _draw(weights, seed)
    weights.embedding_VD.mul_(config.hidden_size**0.5)
    if weights.linear is not None:
        linear = weights.linear
        linear.norm_LF.fill_(1)
        linear.out_LDC.mul_(ends)
        linear.a_log_LH.uniform_(1, 2, generator=generator).log_()
        rates = linear.dt_bias_LHE.uniform_(log(0.001), 0, generator=generator).exp_()
        rates.div_(-config.kda_lower_bound).logit_()
    return weights


@torch.no_grad()
def random_mtp(
    config: TargetConfig, shard: Shard, dtype: Dtypes, seed: int = 0, device: torch.device | str = "cpu"
) -> MtpWeights:
    """``random_weights`` for the prediction layer. Raises: ConfigError when the target has none."""
    weights = allocate_mtp(config, shard, dtype, device)
    _draw(weights, seed)
    return weights


def _draw(weights: VerifierWeights | MtpWeights, seed: int) -> tuple[torch.Generator, float]:
    """Draw all that any layer has; returns the generator, and the factor of what writes to the residual stream."""
    shard, layers = weights.shard, _numbered_layers(weights)
    generator = torch.Generator(weights.norm_D.device).manual_seed(seed * 1009 + shard.rank)
    for tensor in tensors_of(weights):
        if tensor.dim() == 1:
            tensor.fill_(1)
        else:
            tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)
    ends = float((2 * len(layers) * shard.world_size) ** -0.5)
    for _, layer in layers:
        layer.experts.down_XDI.mul_(ends)
        if layer.router is not None:
            layer.router.bias_X.zero_()
        if layer.latent is not None:
            layer.latent.out_DC.mul_(ends)
    _set_limits(weights)
    return generator, ends


@torch.no_grad()
def _load(
    folder: Path | str, make: Callable[[TargetConfig], WeightsT], places: Callable[[WeightsT], Iterable[Piece]]
) -> WeightsT:
    config, checkpoint = load_target_config(folder), Checkpoint(folder)
    specs = tensor_shapes(config)
    checkpoint.check(specs)
    weights = make(config)
    shard = weights.shard
    for piece in places(weights):
        dim = specs[piece.name].shard_dim
        if piece.is_whole or dim is None or shard.world_size == 1:
            part = checkpoint.get(piece.name)
        else:
            part = checkpoint.get_slice(piece.name, dim, shard.rank, shard.world_size)
        chosen = part if piece.select is None else piece.select(part)
        piece.place.copy_(chosen.reshape(piece.place.shape))
    _set_limits(weights)
    return weights


def _layer(prefix: str, layer: LayerWeights, config: TargetConfig, linear: Iterable[Piece] = ()) -> Iterator[Piece]:
    yield Piece(f"{prefix}input_layernorm.weight", layer.input_norm_D)
    yield from linear if layer.latent is None else _latent(f"{prefix}attention.", layer.latent, config)
    yield Piece(f"{prefix}post_attention_layernorm.weight", layer.post_norm_D)
    yield from _feed(f"{prefix}mlp.", layer)


def _linear(prefix: str, linear: LinearWeights, index: int) -> Iterator[Piece]:
    num_heads = linear.a_log_LH.shape[1]
    rows = linear.out_LDC.shape[2]
    parts = torch.split(linear.in_LCD[index], [*[rows] * 5, num_heads])
    for name, place in zip("qkvfgb", parts, strict=True):
        yield Piece(f"{prefix}{name}_proj.weight", place)
    for name, place in zip("qkv", linear.conv_LCJ[index].chunk(3), strict=True):
        yield Piece(f"{prefix}{name}_conv1d.weight", place)
    yield Piece(f"{prefix}A_log", linear.a_log_LH[index])
    yield Piece(f"{prefix}dt_bias", linear.dt_bias_LHE[index])
    yield Piece(f"{prefix}o_norm.weight", linear.norm_LF[index])
    yield Piece(f"{prefix}o_proj.weight", linear.out_LDC[index])


def _latent(prefix: str, latent: LatentWeights, config: TargetConfig) -> Iterator[Piece]:
    num_heads, nope = latent.keys_HEC.shape[:2]
    shared = config.kv_lora_rank + config.qk_rope_head_dim
    queries, kv_a, gate = torch.split(latent.in_CD, [len(latent.in_CD) - shared - num_heads, shared, num_heads])
    if latent.q_b_CQ is None or latent.q_norm_C is None:
        yield Piece(f"{prefix}q_proj.weight", queries)
    else:
        yield Piece(f"{prefix}q_a_proj.weight", queries)
        yield Piece(f"{prefix}q_a_layernorm.weight", latent.q_norm_C)
        yield Piece(f"{prefix}q_b_proj.weight", latent.q_b_CQ)
    yield Piece(f"{prefix}kv_a_proj_with_mqa.weight", kv_a)
    yield Piece(f"{prefix}kv_a_layernorm.weight", latent.kv_norm_C)
    kv_b = f"{prefix}kv_b_proj.weight"
    yield Piece(kv_b, latent.keys_HEC, select=lambda rows: torch.unflatten(rows, 0, (num_heads, -1))[:, :nope])
    yield Piece(kv_b, latent.values_HFC, select=lambda rows: torch.unflatten(rows, 0, (num_heads, -1))[:, nope:])
    yield Piece(f"{prefix}g_proj.weight", gate)
    yield Piece(f"{prefix}dense.weight", latent.out_DC)


def _feed(prefix: str, layer: LayerWeights) -> Iterator[Piece]:
    experts = layer.experts
    names = [prefix]
    if layer.router is not None:
        yield Piece(f"{prefix}gate.weight", layer.router.gate_XD)
        yield Piece(f"{prefix}gate.expert_bias", layer.router.bias_X)
        names = [f"{prefix}experts.{expert}." for expert in range(len(experts.limits_X) - 1)]
        names.append(f"{prefix}shared_experts.")
    for expert, name in enumerate(names):
        gate, up = experts.gate_up_XCD[expert].chunk(2)
        yield Piece(f"{name}gate_proj.weight", gate)
        yield Piece(f"{name}up_proj.weight", up)
        yield Piece(f"{name}down_proj.weight", experts.down_XDI[expert])


def _set_limits(weights: VerifierWeights | MtpWeights) -> None:
    """A dense MLP has one expert without a limit."""
    config = weights.config
    for index, layer in _numbered_layers(weights):
        layer.experts.limits_X.fill_(inf)
        if layer.router is not None:
            layer.experts.limits_X[:-1] = config.routed_limit(index) or inf
            layer.experts.limits_X[-1] = config.shared_limit(index) or inf


def _numbered_layers(weights: VerifierWeights | MtpWeights) -> list[tuple[int, LayerWeights]]:
    if isinstance(weights, MtpWeights):
        return [(weights.config.num_hidden_layers, weights.layer)]
    return list(enumerate(weights.layers))
