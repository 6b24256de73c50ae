"""What a rank needs of its device, known before anything is allocated: the GPU's kind, and how many bytes."""

import os
from typing import NamedTuple

import torch

from dspark.errors import ConfigError
from dspark.kernels import MAX_TOKENS
from dspark.target.config import TargetConfig
from dspark.verifier.blocks import num_splits
from dspark.verifier.buffers import allocate_buffers
from dspark.verifier.weights import Dtypes, Shard, allocate, allocate_mtp, num_bytes

GRAPH_RESERVE_BYTES = 1 << 30
"""On a GPU, for the context, compiled kernels and captured graphs."""
PIECE_TOKENS = 8192
"""Tokens of one pass of a prefill, and of one pass through a layer's experts: their weights are read once."""
LOGIT_ROWS = 512
"""Rows of full-vocabulary logits that whoever reads packs is expected to ask for at once."""


class Plan(NamedTuple):
    """Bytes on one rank: weights; recurrent states and conv history; latent rows; intermediates of a pass."""

    weight_bytes: int
    state_bytes: int
    cache_bytes: int
    scratch_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self)

    def check(self, free_bytes: int, place: str) -> None:
        """Raises: ConfigError when the rank does not fit in ``free_bytes``."""
        if self.total_bytes > free_bytes:
            parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in self.parts().items())
            raise ConfigError(
                f"{place} has {free_bytes / 1e9:.2f} GB free, one rank needs {self.total_bytes / 1e9:.2f} GB "
                f"({parts}); use more ranks or a shorter context"
            )

    def parts(self) -> dict[str, int]:
        """The bytes by name."""
        return dict(zip(("weights", "states", "latent cache", "scratch"), self, strict=True))


def make_plan(
    config: TargetConfig, shard: Shard, capacity_tokens: int, dtype: Dtypes, device: torch.device | str = "cpu",
    has_mtp: bool = False,
) -> Plan:  # fmt: skip
    """The plan of one rank with room for ``capacity_tokens``, and its prediction layer; allocates nothing.
    Raises: ConfigError as ``Shard`` and ``allocate_buffers``.
    """
    weights = allocate(config, shard, dtype, "meta")
    mtp_bytes = num_bytes(allocate_mtp(config, shard, dtype, "meta")) if has_mtp else 0
    dtype = weights.dtype
    buffers = allocate_buffers(config, shard, capacity_tokens, dtype, "meta")
    tokens, heads = MAX_TOKENS, shard.part(config.num_attention_heads)
    in_rows = 0 if weights.linear is None else weights.linear.in_LCD.shape[0] * weights.linear.in_LCD.shape[1]
    pairs = tokens * (config.num_experts_per_tok + 1)
    splits = num_splits(buffers.rows_MJC.shape[1], heads)
    context_bytes = splits * tokens * heads * (config.kv_lora_rank * dtype.itemsize + 4)
    residual_bytes = 2 * config.num_hidden_layers * tokens * config.hidden_size * dtype.itemsize
    pair_bytes = 2 * pairs * (config.hidden_size + config.moe_intermediate_size) * dtype.itemsize
    logits_bytes = tokens * config.vocab_size * 4
    window_bytes = 2 * (2 * in_rows * tokens * dtype.itemsize + context_bytes + residual_bytes + pair_bytes)
    window_bytes += logits_bytes + buffers.counters.nbytes
    piece = min(capacity_tokens, PIECE_TOKENS)
    piece_bytes = reading_bytes(config, shard, piece, dtype, start=capacity_tokens - piece)
    is_gpu = torch.device(device).type == "cuda"
    return Plan(
        weight_bytes=num_bytes(weights) + mtp_bytes,
        state_bytes=buffers.state_LHEF.nbytes + buffers.history_LWC.nbytes,
        cache_bytes=buffers.rows_MJC.nbytes + has_mtp * buffers.rows_MJC[0].nbytes + buffers.angles_JE2.nbytes,
        scratch_bytes=window_bytes + piece_bytes + is_gpu * GRAPH_RESERVE_BYTES,
    )


def make_reading_plan(
    config: TargetConfig, shard: Shard, num_tokens: int, dtype: Dtypes, device: torch.device | str, num_taps: int
) -> Plan:
    """The plan of one rank that reads packs of ``num_tokens`` and keeps nothing of them; allocates nothing.
    ``LOGIT_ROWS`` logits are there three times: a rank's own, all ranks', in order. Raises: ConfigError as ``Shard``.
    """
    weights = allocate(config, shard, dtype, "meta")
    scratch_bytes = reading_bytes(config, shard, num_tokens, weights.dtype, num_taps)
    scratch_bytes += 3 * LOGIT_ROWS * config.vocab_size * 4
    scratch_bytes += (torch.device(device).type == "cuda") * GRAPH_RESERVE_BYTES
    return Plan(num_bytes(weights), 0, 0, scratch_bytes)


def reading_bytes(
    config: TargetConfig, shard: Shard, num_tokens: int, dtype: torch.dtype, num_taps: int = 0, start: int = 0
) -> int:
    """Bytes of the intermediates of a pass over ``num_tokens`` after ``start``: stream, taps and the widest blocks."""
    heads, width, size = shard.part(config.num_attention_heads), config.hidden_size, dtype.itemsize
    inner = heads * config.head_dim
    stream = (6 + 2 * num_taps) * width * size + 4 * width
    linear = 6 * inner * size + inner * (8 * size + 4 * 4)  # in-projection, tiles of the chunks
    dense = 4 * shard.part(config.intermediate_size) * size
    latent = heads * 6 * config.qk_head_dim * size
    pick = (width + shard.part(config.moe_intermediate_size)) * size + 32
    experts = (config.num_experts_per_tok + 1) * pick + 8 * config.num_experts
    attended = (num_tokens + start) * latent + num_tokens * max(linear, dense)
    return num_tokens * stream + max(attended, min(num_tokens, PIECE_TOKENS) * experts)


def free_bytes(device: torch.device | str) -> int:
    """What the device can still give: of a GPU also what torch keeps unused; otherwise the machine's memory."""
    if torch.device(device).type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_device(device: torch.device) -> None:
    """Raises: ConfigError for a GPU that is not there, or that the kernels were not made for."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("the verifier was asked onto a GPU, and torch finds none on this machine; use device cpu")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) not in {(9, 0), (10, 0), (10, 3)}:
        found = torch.cuda.get_device_name(device)
        need = "the verifier's kernels need compute capability 9.0 or 10.0 and its shared memory"
        raise ConfigError(f"{need}, found {found}; dspark eval takes --engine reference")
