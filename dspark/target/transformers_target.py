"""Any other causal language model as a target, computed by transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from dspark.errors import CheckpointError, ConfigError
from dspark.model_folder import Checkpoint
from dspark.types import TargetOutput


@dataclass
class TransformersCache:
    """Keys and values of B sequences, aligned at the right end of the committed columns.
    lengths_B int64 are the committed tokens; columns from ``num_columns`` on are staged.
    """

    layers: DynamicCache
    lengths_B: torch.Tensor
    num_columns: int
    num_staged: int = 0


class TransformersTarget:
    """The ``Target`` protocol around a causal language model whose cache is keys and values only.

    Sequences of different lengths lie left-padded in one cache. Rejected tokens leave it by slicing: the argument of
    transformers' own ``crop`` changed its meaning between versions (specs/dspark.md pitfall 34).
    """

    def __init__(self, model: Any, target_layer_ids: tuple[int, ...]) -> None:
        self.model = model
        self.target_layer_ids = target_layer_ids
        self.vocab_size: int = model.config.vocab_size
        self.hidden_size: int = model.config.hidden_size
        self.num_layers: int = model.config.num_hidden_layers
        self.embedding_VD: torch.Tensor = model.get_input_embeddings().weight
        self.head_VD: torch.Tensor = model.get_output_embeddings().weight
        """The embedding table itself in a tied model."""

    def prefill(self, ids: Sequence[torch.Tensor]) -> tuple[TransformersCache, TargetOutput]:
        device = self.embedding_VD.device
        lengths_B = torch.tensor([len(row) for row in ids], device=device)
        num_columns = int(lengths_B.max())
        padded = [functional.pad(row.to(device), (num_columns - len(row), 0)) for row in ids]
        cache = TransformersCache(DynamicCache(), torch.zeros_like(lengths_B), 0)
        is_token_BT = _is_committed(lengths_B, num_columns)
        output = self._read(torch.stack(padded), is_token_BT, cache)
        cache.lengths_B, cache.num_columns = lengths_B, num_columns
        return cache, output

    def verify(self, ids_BT: torch.Tensor, cache: TransformersCache) -> TargetOutput:
        _keep(cache.layers, slice(0, cache.num_columns))
        is_token_BT = torch.ones(ids_BT.shape, dtype=torch.bool, device=cache.lengths_B.device)
        output = self._read(ids_BT, is_token_BT, cache)
        cache.num_staged = ids_BT.shape[1]
        return output

    def commit(self, cache: TransformersCache, counts_B: torch.Tensor) -> None:
        counts_B = counts_B.to(cache.lengths_B)
        counts, num_sequences = counts_B.tolist(), len(cache.lengths_B)
        if len(counts) != num_sequences or not all(0 <= count <= cache.num_staged for count in counts):
            raise ValueError(f"expected {num_sequences} counts in 0..{cache.num_staged}, got {counts}")
        lengths_B = cache.lengths_B + counts_B
        num_columns = int(lengths_B.max())
        shift_B = cache.num_columns + counts_B - num_columns
        if bool(shift_B.any()):  # otherwise the next verify drops what lies behind the last column
            columns_BC = torch.arange(num_columns, device=shift_B.device) + shift_B[:, None]
            _keep(cache.layers, columns_BC.clamp(min=0))
        cache.lengths_B, cache.num_columns, cache.num_staged = lengths_B, num_columns, 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(hidden, self.head_VD)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _read(self, ids_BT: torch.Tensor, is_token_BT: torch.Tensor, cache: TransformersCache) -> TargetOutput:
        """Append ids to the cache; rows of the output are those where is_token_BT."""
        is_seen_BC = torch.cat([_is_committed(cache.lengths_B, cache.num_columns), is_token_BT], dim=1)
        positions_BT = cache.lengths_B[:, None] + is_token_BT.long().cumsum(dim=1) - 1
        output = self.model.base_model(
            input_ids=ids_BT.to(is_token_BT.device),
            attention_mask=is_seen_BC.long(),
            position_ids=positions_BT.clamp(min=0),
            past_key_values=cache.layers,
            use_cache=True,
            output_hidden_states=bool(self.target_layer_ids),
        )
        last_hidden_ND = output.last_hidden_state[is_token_BT]
        # hidden_states[0] is the embedding, so that layer i's output is entry i + 1
        taps = [output.hidden_states[layer + 1][is_token_BT] for layer in self.target_layer_ids]
        empty_NLD = last_hidden_ND.new_empty(len(last_hidden_ND), 0, self.hidden_size)
        return TargetOutput(torch.stack(taps, dim=1) if taps else empty_NLD, last_hidden_ND)


def load_transformers_target(
    folder: Path, target_layer_ids: tuple[int, ...], dtype: torch.dtype, device: str | torch.device
) -> TransformersTarget:
    """Read a model folder through transformers: safetensors only, no remote code, no network.
    Raises: ConfigError for an unknown architecture, for layers whose state cannot be rolled back, or when the logits
    are not the head on the last hidden state; CheckpointError for missing or damaged weights.
    """
    Checkpoint(folder)  # says what is damaged better than transformers would
    loaded: Any
    try:
        options = {"use_safetensors": True, "local_files_only": True, "output_loading_info": True}
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False, **options)
    except ValueError as error:
        raise ConfigError(f"{folder}: transformers cannot build this architecture: {error}") from error
    model, report = loaded
    for kind in ("missing_keys", "mismatched_keys"):
        if report[kind]:
            names = ", ".join(sorted(map(str, report[kind])))
            raise CheckpointError(f"{folder}: not the weights that its config.json describes: {kind}: {names}")
    layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if not layers <= {DynamicLayer, DynamicSlidingWindowLayer} or getattr(model, "_is_stateful", False):
        memories = ", ".join(sorted(kind.__name__ for kind in layers))
        raise ConfigError(f"{folder}: its layers keep {memories}; only keys and values can be rolled back")
    target = TransformersTarget(model.to(device).eval().requires_grad_(False), target_layer_ids)
    _check_head(target, folder)
    return target


def _check_head(target: TransformersTarget, folder: Path) -> None:
    hidden: list[torch.Tensor] = []
    hook = target.model.base_model.register_forward_hook(lambda *call: hidden.append(call[2].last_hidden_state))
    ids_BT = torch.arange(min(5, target.vocab_size), device=target.embedding_VD.device)[None]
    expected_BTV = target.model(input_ids=ids_BT).logits.float()
    hook.remove()
    if not torch.allclose(target.logits(hidden[0]).float(), expected_BTV, rtol=1e-3, atol=1e-3):
        raise ConfigError(f"{folder}: its logits are not the head on the last hidden state (a bias, scale or soft cap)")


def _is_committed(lengths_B: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Bool [B, num_columns], true in the last lengths_B[b] columns."""
    return torch.arange(num_columns, device=lengths_B.device) >= num_columns - lengths_B[:, None]


def _keep(cache: DynamicCache, columns: slice | torch.Tensor) -> None:
    """Keep these columns of every layer: the same slice of all sequences, or int64 [B, C] of each."""
    for layer in cache.layers:
        for name in ("keys", "values"):
            stored_BHCE = getattr(layer, name)
            if isinstance(columns, slice):
                kept_BHCE = stored_BHCE[:, :, columns]
            else:
                kept_BHCE = stored_BHCE.take_along_dim(columns[:, None, :, None], dim=2)
            setattr(layer, name, kept_BHCE)
