"""Filling a rank's weights from a folder or from a seed."""

from collections.abc import Iterable
from functools import partial
from math import log
from pathlib import Path

import torch

from dspark.model_folder import Checkpoint
from dspark.target.config import TargetConfig
from dspark.target.loading import open_ling
from dspark.verifier.weights import Dtypes, LayerWeights, MtpWeights, Shard, VerifierWeights, allocate, allocate_mtp

_ROWS = "q_proj k_proj v_proj f_proj g_proj b_proj q_conv1d k_conv1d v_conv1d A_log dt_bias "
_ROWS += "q_b_proj kv_b_proj gate_proj up_proj lm_head"
SPLIT_DIM = dict.fromkeys(_ROWS.split(), 0) | dict.fromkeys(("o_proj", "dense", "down_proj"), 1)
"""The dimension of which a rank takes its part; every rank takes all of the other tensors."""


def load_weights(
    folder: Path | str, shard: Shard, dtype: Dtypes, device: torch.device | str = "cpu"
) -> VerifierWeights:
    """Read a rank's slices, one checkpoint tensor after the other, from a Hugging Face folder.
    Raises: ConfigError and CheckpointError as the folder deserves, before anything is allocated.
    """
    config, checkpoint = open_ling(folder)
    return allocate(config, shard, dtype, device, partial(_read, checkpoint, shard))


def load_mtp(folder: Path | str, shard: Shard, dtype: Dtypes, device: torch.device | str = "cpu") -> MtpWeights:
    """``load_weights`` for the prediction layer. Raises: ConfigError also when the target has none."""
    config, checkpoint = open_ling(folder)
    return allocate_mtp(config, shard, dtype, device, partial(_read, checkpoint, shard))


def random_weights(
    config: TargetConfig, shard: Shard, dtype: Dtypes, seed: int = 0, device: torch.device | str = "cpu"
) -> VerifierWeights:
    """Weights drawn on the device, for measuring without a checkpoint; each rank draws its own.

    Matrices are normal with deviation 1/sqrt(whole fan-in), so activations stay near 1; those that write to the
    residual stream are smaller by sqrt(2 layers), so that the stream keeps near a token's own embedding and different
    tokens choose experts almost independently. Decay rates spread evenly in the
    logarithm from 0.001 to 1 a token.
    """
    generator = _generator(shard, seed, device)
    weights = allocate(config, shard, dtype, device, partial(_draw, generator))
    weights.embedding_VD.mul_(config.hidden_size**0.5)
    ends = _quieten(weights.layers, shard)
    if weights.linear is not None:
        linear = weights.linear
        linear.norm_LF.fill_(1)
        linear.out_LDC.mul_(ends)
        linear.a_log_LH.uniform_(1, 2, generator=generator).log_()
        rates = linear.dt_bias_LHE.uniform_(log(0.001), 0, generator=generator).exp_()
        rates.div_(-config.kda_lower_bound).logit_()
    return weights


def random_mtp(
    config: TargetConfig, shard: Shard, dtype: Dtypes, seed: int = 0, device: torch.device | str = "cpu"
) -> MtpWeights:
    """``random_weights`` for the prediction layer. Raises: ConfigError when the target has none."""
    weights = allocate_mtp(config, shard, dtype, device, partial(_draw, _generator(shard, seed, device)))
    _quieten((weights.layer,), shard)
    return weights


def _generator(shard: Shard, seed: int, device: torch.device | str) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed * 1009 + shard.rank)


def _draw(generator: torch.Generator, tensor: torch.Tensor, _: Iterable[str]) -> None:
    if tensor.dim() == 1:
        tensor.fill_(1)
    else:
        tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)


def _quieten(layers: tuple[LayerWeights, ...], shard: Shard) -> float:
    """Make what writes to the residual stream smaller. Returns: the factor."""
    ends = float((2 * len(layers) * shard.world_size) ** -0.5)
    for layer in layers:
        layer.experts.down_XDI.mul_(ends)
        if layer.router is not None:
            layer.router.bias_X.zero_()
        if layer.latent is not None:
            layer.latent.out_DC.mul_(ends)
    return ends


def _read(checkpoint: Checkpoint, shard: Shard, tensor: torch.Tensor, names: Iterable[str]) -> None:
    flat, begin = tensor.view(-1), 0
    for name in names:
        dim = None if shard.world_size == 1 else SPLIT_DIM.get(name.removesuffix(".weight").rpartition(".")[2])
        part = checkpoint.get(name) if dim is None else checkpoint.get_slice(name, dim, *shard)
        flat[begin : begin + part.numel()].copy_(part.flatten())
        begin += part.numel()
    assert begin == len(flat)
