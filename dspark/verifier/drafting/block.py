"""A DSpark draft on a rank: context rows for what was committed, one pass over the block, then slot by slot."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dspark.draft.backbone import draft_rotary
from dspark.errors import DraftMismatchError
from dspark.kernels import MAX_TOKENS, block_attention, markov, projection, residual
from dspark.types import TargetOutput
from dspark.verifier.blocks import Chain, Window, feed
from dspark.verifier.calls import Caller, call, named
from dspark.verifier.drafting.drafter import Drafts, Sampler, best_id, gather_logits, gumbel_noise
from dspark.verifier.drafting.weights import DraftWeights
from dspark.verifier.engine import Verifier
from dspark.verifier.plan import PIECE_TOKENS

SPLIT_ROWS, PROGRAMS = 64, 264
"""A part of the context is 64 rows at least; two programs on each of 132 multiprocessors share the parts and heads."""


class BlockDrafter:
    """A ``Drafter`` whose block is the anchor and masks; only the first ``num_drafts`` slots choose a token.

    Keys and values of all positions lie in one memory. An update writes every row of its window, also those of refused
    tokens: they lie behind the committed rows, and nothing reads a row there before it is written again, since a block
    writes its K rows from the length on and reads none behind them, and the next update begins at the length too.
    Raises: DraftMismatchError for a draft of another target, or of blocks that the verifier has no window for.
    """

    def __init__(self, verifier: Verifier, weights: DraftWeights, num_drafts: int) -> None:
        config, device, dtype = weights.config, verifier.weights.device, verifier.weights.norm_D.dtype
        found = (config.vocab_size, config.hidden_size, config.target_layer_ids)
        expected = (verifier.vocab_size, verifier.hidden_size, verifier.target_layer_ids)
        if found != expected:
            names = "vocab_size, hidden_size and target_layer_ids"
            raise DraftMismatchError(f"{names} of the draft are {found}, of the verifier {expected}; make them equal")
        if not 1 <= num_drafts <= config.block_size < MAX_TOKENS:
            most = f"a cycle drafts 1 to block_size tokens, which is at most {MAX_TOKENS - 1}"
            raise DraftMismatchError(f"{most}; found {num_drafts} of block_size {config.block_size}")
        if config.own_tables or not config.sample_from_anchor:
            raise DraftMismatchError(
                "the verifier drafts with the target's tables, from the anchor's own slot on; found own_tables "
                f"{config.own_tables}, sample_from_anchor {config.sample_from_anchor}: give --engine reference"
            )
        if (weights.shard, weights.norm_D.dtype) != (verifier.weights.shard, dtype):
            ours, theirs = f"{weights.norm_D.dtype} of {weights.shard}", f"{dtype} of {verifier.weights.shard}"
            raise DraftMismatchError(f"draft: {ours}, verifier: {theirs}; take part and dtype from the verifier")
        self.verifier, self.weights, self.num_drafts = verifier, weights, num_drafts
        self.has_confidence = weights.confidence is not None
        self._wide = torch.promote_types(dtype, torch.float32)
        num_rows = verifier.buffers.capacity_tokens + MAX_TOKENS
        num_heads = weights.shard.part(config.num_key_value_heads)
        shape = (config.num_hidden_layers, num_heads, num_rows, config.head_dim)
        self.keys_LHJE, self.values_LHJE = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        positions_J = torch.arange(num_rows, device=device)
        angles = draft_rotary(config, positions_J, self._wide)
        self._angles_JE2 = torch.stack(angles, -1)
        self._num_splits = min(-(-num_rows // SPLIT_ROWS), -(-PROGRAMS // num_heads))
        self._ids_K = torch.full((config.block_size,), config.mask_token_id, device=device)
        self._zeros_TD = torch.zeros(MAX_TOKENS, config.hidden_size, dtype=dtype, device=device)
        self._state_1R = torch.zeros(1, config.markov_rank, dtype=dtype, device=device)

    def begin(self, next_ids_N: Tensor, output: TargetOutput) -> None:
        """See ``Drafter``: as ``update``, with products that read the weights once for many rows."""
        start_1 = self._ids_K.new_zeros(1)
        for taps_NLD in torch.split(output.taps_NLD, PIECE_TOKENS):
            zeros_ND = self._zeros_TD.new_zeros(len(taps_NLD), self.verifier.hidden_size)
            self._take_in(taps_NLD, start_1, zeros_ND, _project_many, call)
            start_1 += len(taps_NLD)

    def update(self, window: Window, start_1: Tensor, count_1: Tensor, call: Caller) -> None:
        """See ``Drafter``: the tapped layers become keys and values of every layer."""
        run = named("Context", call, is_chained=self.verifier.is_chained)
        self._take_in(window.taps_TLD, start_1, self._zeros_TD[: len(window.taps_TLD)], projection.project, run)

    def draft(self, sampler: Sampler | None, call: Caller) -> Drafts:
        verifier, run = self.verifier, named("Draft", call, is_chained=self.verifier.is_chained)
        head_VD, counters = verifier.weights.head_VD, verifier.buffers.counters
        call("Draft ids", self._ids_K[:1].copy_, verifier.ids_T[:1])
        hidden_KD = self._read(run)[: self.num_drafts]
        logits_KV = run("head", projection.project, hidden_KD, head_VD, counters, out_dtype=self._wide)
        ids = self._choose(hidden_KD, logits_KV, sampler, run)
        call("Draft ids", torch.cat, ids, out=verifier.ids_T[1 : 1 + self.num_drafts])
        confidence_K, confidence = None, self.weights.confidence
        if confidence is not None:
            before_KR = self.weights.markov.embed(verifier.ids_T[: self.num_drafts])
            confidence_K = call("Draft confidence", confidence, hidden_KD, before_KR)
        if sampler is None:
            return Drafts(None, confidence_K)
        return Drafts(gather_logits(verifier, logits_KV, run), confidence_K)

    def _take_in(
        self, taps_TLD: Tensor, start_1: Tensor, zeros_TD: Tensor, project: Callable[..., Tensor], run: Caller
    ) -> None:
        verifier, weights, counters = self.verifier, self.weights, self.verifier.buffers.counters
        width, eps = weights.fc_DC.shape[1], weights.config.rms_norm_eps
        taps_TC = taps_TLD.flatten(1)[:, weights.shard.rank * width :][:, :width]
        parts_T1D = run("fc", project, taps_TC, weights.fc_DC, counters)[:, None]
        inputs = (parts_T1D, None, zeros_TD, weights.hidden_norm_D, eps)
        _, context_TD = run("sum and norm", verifier.ranks.add_norm, *inputs)
        rows_TC = run("keys and values", project, context_TD, weights.context_CD, counters)
        for layer, layer_rows_TC in enumerate(rows_TC.chunk(len(weights.layers), 1)):
            self._write(layer, layer_rows_TC, start_1, 0, run)

    def _write(self, layer: int, rows_TC: Tensor, start_1: Tensor, num_heads: int, run: Caller) -> Tensor:
        weights, memory = self.weights.layers[layer], (self.keys_LHJE[layer], self.values_LHJE[layer])
        norms = (weights.q_norm_E, weights.k_norm_E, self.weights.config.rms_norm_eps)
        return run("rows", block_attention.write, rows_TC, *norms, self._angles_JE2, start_1, *memory, num_heads)

    def _read(self, run: Caller) -> Tensor:
        """The block through all layers and the final norm."""
        verifier, weights, config = self.verifier, self.weights, self.weights.config
        counters, eps, length_1 = verifier.buffers.counters, config.rms_norm_eps, verifier.buffers.length_1
        add_norm = verifier.ranks.add_norm
        chain = Chain(run, run, verifier.config, verifier.buffers)
        dense, num_heads = verifier.dense[config.block_size], weights.shard.part(config.num_attention_heads)
        norms = [*(layer.input_norm_D for layer in weights.layers), weights.norm_D]
        table_VD = verifier.weights.embedding_VD
        residual_KD, x_KD = run("embedding", residual.embed_norm, self._ids_K, table_VD, norms[0], eps)
        for number, layer in enumerate(weights.layers):
            qkv_KC = run("in-projection", projection.project, x_KD, layer.qkv_CD, counters)
            q_KHE = self._write(number, qkv_KC, length_1, num_heads, run)
            memory = (self.keys_LHJE[number], self.values_LHJE[number], length_1)
            scale = config.head_dim**-0.5
            splits = run("attention", block_attention.attend, q_KHE, *memory, scale, self._num_splits)
            o_KC = run("merge", block_attention.merge, *splits, x_KD.dtype)
            parts_K1D = run("o_proj", projection.project, o_KC, layer.out_DC, counters)[:, None]
            residual_KD, x_KD = run("sum and norm", add_norm, parts_K1D, None, residual_KD, layer.post_norm_D, eps)
            partial = feed(x_KD, None, layer.experts, dense, chain)
            residual_KD, x_KD = run("sum and norm", add_norm, *partial, residual_KD, norms[number + 1], eps)
        return x_KD

    def _choose(self, hidden_KD: Tensor, logits_KV: Tensor, sampler: Sampler | None, run: Caller) -> list[Tensor]:
        """The slots' ids, each biased by the one before; if they are drawn, the bias is added to logits_KV in place."""
        mix, verifier = self.weights.markov, self.verifier
        first_id, counters = verifier.weights.first_id, verifier.buffers.counters
        options: list[dict[str, Any]] = [{} for _ in logits_KV]
        if sampler is not None:
            noise_KV = gumbel_noise((self.num_drafts, verifier.vocab_size), self._wide, sampler.generator, hidden_KD)
            for option, noise_V, logits_V in zip(options, noise_KV, logits_KV, strict=True):
                option |= {"noise_V": noise_V[first_id : first_id + len(logits_V)], "logits_V": logits_V}
                option["inverse_temperature_1"] = sampler.inverse_temperature_1
        ids, state_1R = [verifier.ids_T[:1]], self._state_1R
        is_vanilla = self.weights.config.markov_head_type == "vanilla"
        for slot, logits_V in enumerate(logits_KV):
            mixed_NR = mix.markov_w1.weight
            if not is_vanilla:
                mixed_NR, state_1R = mix.step(mix.embed(ids[-1]), hidden_KD[slot : slot + 1], state_1R)
            row_1 = ids[-1] if is_vanilla else None
            inputs = (logits_V, mixed_NR, row_1, mix.markov_w2.weight, first_id, counters)
            ids.append(best_id(verifier, run("Markov step", markov.step, *inputs, **options[slot]), run))
        return ids[1:]


def _project_many(x_ND: Tensor, weight_CD: Tensor, counters: Tensor) -> Tensor:
    """``projection.project`` of any number of rows."""
    return functional.linear(x_ND, weight_CD)
