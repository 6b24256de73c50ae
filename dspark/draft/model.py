"""The draft model: context features, blocks of slots, logits with the Markov bias, confidence."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dspark.config import DraftConfig
from dspark.draft.anchors import block_visibility, gather_positions, slot_positions
from dspark.draft.backbone import DraftLayer, Memory, Rotary
from dspark.draft.confidence import ConfidenceHead
from dspark.draft.markov import MARKOV_HEADS
from dspark.errors import DraftMismatchError
from dspark.layers.rms_norm import RMSNorm
from dspark.layers.rotary import rotary_angles


class DraftOutput(NamedTuple):
    """What the draft says about every slot under teacher forcing.
    Shapes: hidden_BAKD after the final norm; mixed_BAKR, which W2 is applied to; markov_VR, W2; confidence_logits_BAK
    float32 or better, None for a draft without the head. The logits are ``base_logits(hidden) + W2 mixed``: so large
    that whoever needs them makes them piece by piece.
    """

    hidden_BAKD: Tensor
    mixed_BAKR: Tensor
    markov_VR: Tensor
    confidence_logits_BAK: Tensor | None


class DraftModel(nn.Module):
    """A DSpark draft. Parameter names are the checkpoint's; the target's two tables are bound, never saved.
    Source: DSpark (arXiv 2607.05147); DeepSpec, Qwen3 DSpark model (specs/dspark.md 1 and 3.1).
    """

    embedding_VD: Tensor | None
    head_VD: Tensor | None

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        """Whether the layers' activations are computed again in the backward pass instead of kept."""
        width = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.markov_head = MARKOV_HEADS[config.markov_head_type](config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.register_buffer("embedding_VD", None, persistent=False)
        self.register_buffer("head_VD", None, persistent=False)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Matrices from a normal law of deviation 0.02, biases 0, norms 1. The generator is on the weights' device."""
        for parameter in self.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()

    def bind(self, embedding_VD: Tensor, head_VD: Tensor) -> None:
        """Use the target's embedding and head, frozen and uncopied, in their own dtype.
        Raises: DraftMismatchError when a table is not [vocab_size, hidden_size] of this draft.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        for name, table_VD in (("embedding", embedding_VD), ("head", head_VD)):
            if tuple(table_VD.shape) != expected:
                found = f"the target's {name} is {list(table_VD.shape)}"
                raise DraftMismatchError(f"{found}, the draft's must be {list(expected)}; use the draft's own target")
        self.embedding_VD, self.head_VD = embedding_VD.detach(), head_VD.detach()

    def context(self, taps_BTLD: Tensor) -> Tensor:
        """Context features of target states: one per position, shared by all layers. Returns: [B, T, D]."""
        context_BTD: Tensor = self.hidden_norm(self.fc(taps_BTLD.flatten(-2).to(self.fc.weight.dtype)))
        return context_BTD

    def context_keys_values(self, taps_BTLD: Tensor, start: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the context rows at positions start, start + 1, ..., [B, H, T, E], a pair per layer."""
        positions_T = torch.arange(start, start + taps_BTLD.shape[1], device=taps_BTLD.device)
        context_BTD, rotary = self.context(taps_BTLD), self.rotary(positions_T[None])
        return [cast(DraftLayer, layer).self_attn.keys_values(context_BTD, rotary) for layer in self.layers]

    def rotary(self, positions_BT: Tensor) -> Rotary:
        """Cosine and sine of positions, float32 or better whatever the draft's dtype."""
        dtype = torch.promote_types(self.fc.weight.dtype, torch.float32)
        return rotary_angles(positions_BT, self.config.head_dim, self.config.rope_theta, dtype)

    def blocks(
        self, anchor_ids_BA: Tensor, positions_BAK: Tensor, memories: Sequence[Memory], visible_B1NT: Tensor | None
    ) -> Tensor:
        """Run the layers over blocks [anchor, mask, mask, ...]. Returns: [B, A, K, D] after the final norm.
        Shapes: positions_BAK int64 text positions of the slots; one memory a layer; visible_B1NT as from
        ``block_visibility``, or None when each slot may read all that the memories hold.
        """
        assert self.embedding_VD is not None, "bind the target's tables first"
        ids_BAK = torch.full_like(positions_BAK, self.config.mask_token_id)
        ids_BAK[..., 0] = anchor_ids_BA
        hidden_BND = functional.embedding(ids_BAK.flatten(1), self.embedding_VD).to(self.fc.weight.dtype)
        rotary = self.rotary(positions_BAK.flatten(1))
        for layer, memory in zip(self.layers, memories, strict=True):
            given = (hidden_BND, rotary, memory, visible_B1NT)
            if self.activation_checkpointing and torch.is_grad_enabled():
                hidden_BND = checkpoint(layer, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden_BND = layer(*given)
        hidden_BAKD: Tensor = self.norm(hidden_BND).view(*positions_BAK.shape, -1)
        return hidden_BAKD

    def base_logits(self, hidden: Tensor) -> Tensor:
        """The target's head on hidden states, before the Markov bias. Returns: float32 or better [..., V]."""
        assert self.head_VD is not None, "bind the target's tables first"
        logits = functional.linear(hidden.to(self.head_VD.dtype), self.head_VD)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def forward(self, ids_BT: Tensor, taps_BTLD: Tensor, anchors_BA: Tensor, keep_BA: Tensor) -> DraftOutput:
        """Every kept block under teacher forcing: slot j reads the text's token at p + j as its previous token.

        Rows behind a sequence's end must hold finite taps and ids below the vocabulary's size; nothing reads them.
        Shapes: ids_BT int64; taps_BTLD the target's layer outputs at the same positions; anchors_BA int64; keep_BA
        bool, false for padding blocks, whose output is finite and means nothing.
        """
        block_size = self.config.block_size
        positions_BAK = slot_positions(anchors_BA, block_size)
        previous_ids_BAK = gather_positions(ids_BT, positions_BAK)
        rotary = self.rotary(torch.arange(ids_BT.shape[1], device=ids_BT.device)[None])
        context_BTD = self.context(taps_BTLD)
        memories = [context_memory(cast(DraftLayer, layer), context_BTD, rotary) for layer in self.layers]
        visible_B1NT = block_visibility(anchors_BA, keep_BA, ids_BT.shape[1], block_size)
        hidden_BAKD = self.blocks(previous_ids_BAK[..., 0], positions_BAK, memories, visible_B1NT)
        embedded_BAKR = self.markov_head.embed(previous_ids_BAK)
        mixed_BAKR = self.markov_head(embedded_BAKR, hidden_BAKD)
        confidence = None if self.confidence_head is None else self.confidence_head(hidden_BAKD, embedded_BAKR)
        # A view, for FSDP2 puts a hook on every tensor that is returned, and on the weight itself they would pile up.
        markov_VR = self.markov_head.markov_w2.weight
        return DraftOutput(hidden_BAKD, mixed_BAKR, markov_VR.view_as(markov_VR), confidence)


def context_memory(layer: DraftLayer, context_BTD: Tensor, rotary: Rotary) -> Memory:
    """What a layer's blocks read; the context's part is made when it runs: only then FSDP2 has its weights whole."""

    def memory(keys_BHNE: Tensor, values_BHNE: Tensor) -> tuple[Tensor, Tensor]:
        context_keys_BHTE, context_values_BHTE = layer.self_attn.keys_values(context_BTD, rotary)
        return torch.cat([context_keys_BHTE, keys_BHNE], 2), torch.cat([context_values_BHTE, values_BHNE], 2)

    return memory
