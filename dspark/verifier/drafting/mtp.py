"""The target's own multi-token prediction layer as a drafter (NEXTN): one pass of the layer a token."""

import torch
from torch import Tensor
from torch.nn import functional

from dspark.errors import DraftMismatchError
from dspark.kernels import MAX_TOKENS, head, projection, residual
from dspark.types import TargetOutput
from dspark.verifier.blocks import Chain, Window, feed, latent_attention
from dspark.verifier.calls import Caller, named
from dspark.verifier.drafting.drafter import Drafts, Sampler, best_id, gather_logits, gumbel_noise
from dspark.verifier.engine import Verifier
from dspark.verifier.plan import PIECE_TOKENS
from dspark.verifier.reading import read_mtp
from dspark.verifier.weights import MtpWeights

RING = 2 * MAX_TOKENS


class MtpDrafter:
    """A ``Drafter`` that runs the prediction layer once for every draft but the first, and once for an update.

    Row t of the layer, from the target's last hidden state at t and the id at t + 1, speaks of the id at t + 2. So an
    update's row of the last committed token, which the new anchor follows, is the first draft. A further draft takes
    the hidden state of the row before for the target's; its latent row lies from the anchor's position on, where the
    next update writes what the target's own hidden states say.

    hidden_JD holds the rows' hidden states at their positions modulo 32: a window's never take the place of the one
    before it, so a cycle can be run again from the same length. No row behind the committed ones is read before it is
    written again.
    Raises: DraftMismatchError for a layer of another target or rank, or more drafts than a window holds.
    Source: specs/ling-3.0.md section 7; DeepSeek-V3 (arXiv 2412.19437) section 2.2.
    """

    has_confidence = False

    def __init__(self, verifier: Verifier, weights: MtpWeights, num_drafts: int) -> None:
        if (weights.config, weights.shard) != (verifier.config, verifier.weights.shard):
            found = f"found {weights.shard} of the layer, {verifier.weights.shard} of the verifier"
            raise DraftMismatchError(f"layer and verifier must be of one folder and one shard; {found}")
        if not 1 <= num_drafts < MAX_TOKENS:
            raise DraftMismatchError(f"a cycle drafts 1 to {MAX_TOKENS - 1} tokens, found {num_drafts}")
        self.verifier, self.weights, self.num_drafts = verifier, weights, num_drafts
        table_VD, rows_MJC = verifier.weights.embedding_VD, verifier.buffers.rows_MJC
        self._wide = torch.promote_types(table_VD.dtype, torch.float32)
        self.rows_1JC = rows_MJC.new_zeros(1, *rows_MJC.shape[1:])
        self.hidden_JD = table_VD.new_zeros(RING, verifier.hidden_size)
        self._zeros_TD = table_VD.new_zeros(MAX_TOKENS, verifier.hidden_size)
        self._places_T = torch.arange(MAX_TOKENS, device=table_VD.device)

    def begin(self, next_ids_N: Tensor, output: TargetOutput) -> None:
        """See ``Drafter``: the layer over a prompt in the pieces of a prefill."""
        num_rows, verifier = len(next_ids_N), self.verifier
        for start in range(0, num_rows, PIECE_TOKENS):
            rows = slice(start, start + PIECE_TOKENS)
            given = (verifier.embedding_VD[next_ids_N[rows]], output.last_hidden_ND[rows])
            last_ND = read_mtp(self.weights, *given, self.rows_1JC[0], start, verifier.ranks)
        self.hidden_JD[(num_rows - 1) % RING] = last_ND[-1]

    def update(self, window: Window, start_1: Tensor, count_1: Tensor, call: Caller) -> None:
        """See ``Drafter``: the layer over the window, from the target's hidden states."""
        num_tokens = len(window.hidden_TD)
        ids_T = call("Update ids", torch.roll, self.verifier.ids_T[:num_tokens], -1)
        call("Update ids", ids_T.index_copy_, 0, count_1 - 1, self.verifier.ids_T[:1])
        hidden_TD = self._read("Update", ids_T, window.hidden_TD, start_1, call)
        places_T = call("Update places", torch.add, start_1, self._places_T[:num_tokens]).remainder_(RING)
        call("Update hidden", self.hidden_JD.index_copy_, 0, places_T, hidden_TD)

    def draft(self, sampler: Sampler | None, call: Caller) -> Drafts:
        verifier, weights, num_drafts = self.verifier, self.verifier.weights, self.num_drafts
        counters, length_1 = verifier.buffers.counters, verifier.buffers.length_1
        run = named("Draft", call, is_chained=verifier.is_chained)
        lengths_T = call("Draft places", torch.add, length_1, self._places_T)
        hidden_1D = call("Draft hidden", self.hidden_JD.index_select, 0, (length_1 - 1).remainder_(RING))
        noise_KV = None
        if sampler is not None:
            shape = (num_drafts, verifier.vocab_size)
            noise_KV = gumbel_noise(shape, self._wide, sampler.generator, hidden_1D) / sampler.inverse_temperature_1
        ids: list[Tensor] = []
        logits: list[Tensor] = []
        for slot in range(num_drafts):
            if slot:
                hidden_1D = self._read("Draft", ids[-1], hidden_1D, lengths_T[slot - 1 : slot], call)
            if noise_KV is None:
                best = run("head", head.greedy, hidden_1D, weights.head_VD, weights.first_id, counters)
                ids.append(best_id(verifier, best, run))
                continue
            own_1V = run("head", projection.project, hidden_1D, weights.head_VD, counters, out_dtype=self._wide)
            logits.append(gather_logits(verifier, own_1V, run))
            noise_V = noise_KV[slot, : logits[-1].shape[1]]  # of a rank alone its own part only
            ids.append(call("Draft choice", torch.argmax, logits[-1] + noise_V, -1))
        call("Draft ids", torch.cat, ids, out=verifier.ids_T[1 : 1 + num_drafts])
        return Drafts(torch.cat(logits) if logits else None, None)

    def _read(self, kind: str, ids_T: Tensor, hidden_TD: Tensor, length_1: Tensor, call: Caller) -> Tensor:
        """The layer over T rows from position length_1 on, which follow what it has read before them."""
        verifier, weights, layer = self.verifier, self.weights, self.weights.layer
        plain, run = named(kind, call), named(kind, call, is_chained=verifier.is_chained)
        assert layer.latent is not None
        buffers = verifier.buffers._replace(rows_MJC=self.rows_1JC, length_1=length_1)
        chain = Chain(plain, run, verifier.config, buffers)
        add_norm, eps, width = verifier.ranks.add_norm, verifier.config.rms_norm_eps, verifier.hidden_size
        table_VD, zeros_TD = verifier.weights.embedding_VD, self._zeros_TD[: len(ids_T)]
        _, embedded_TD = run("embedding", residual.embed_norm, ids_T, table_VD, weights.enorm_D, eps)
        normed_TD = plain("hidden norm", functional.rms_norm, hidden_TD, (width,), weights.hnorm_D, eps)
        joined_TC = plain("join", torch.cat, (embedded_TD, normed_TD), 1)
        parts_T1D = run("eh_proj", projection.project, joined_TC, weights.eh_DC, buffers.counters)[:, None]
        inputs = (parts_T1D, None, zeros_TD, layer.input_norm_D, eps)
        residual_TD, x_TD = run("eh_proj norm", residual.add_norm, *inputs)
        spoken = latent_attention(x_TD, layer.latent, 0, chain)
        residual_TD, x_TD = run("attention sum and norm", add_norm, *spoken, residual_TD, layer.post_norm_D, eps)
        dense = verifier.dense[len(ids_T)] if layer.router is None else None
        spoken = feed(x_TD, layer.router, layer.experts, dense, chain)
        last_TD: Tensor = run("MoE sum and norm", add_norm, *spoken, residual_TD, weights.norm_D, eps)[1]
        return last_TD
