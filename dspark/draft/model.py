"""The draft model: context features, blocks of slots, logits with the Markov bias, confidence."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dspark.config import DraftConfig
from dspark.draft.anchors import gather_positions, slot_positions
from dspark.draft.backbone import Anchored, DraftLayer, Memory, Rotary, draft_rotary
from dspark.draft.confidence import ConfidenceHead
from dspark.draft.markov import MARKOV_HEADS
from dspark.errors import DraftMismatchError
from dspark.layers.rms_norm import RMSNorm


class DraftOutput(NamedTuple):
    """What the draft says about every slot under teacher forcing.
    Shapes: hidden_AKD after the final norm; mixed_AKR, which W2 is applied to; markov_VR, W2; confidence_logits_AK
    float32 or better, None for a draft without the head. The logits are ``base_logits(hidden) + W2 mixed``: so large
    that whoever needs them makes them piece by piece.
    """

    hidden_AKD: Tensor
    mixed_AKR: Tensor
    markov_VR: Tensor
    confidence_logits_AK: Tensor | None


SAME_GRAPHS: dict[str, Any] = {"deterministic": True}
"""Options of ``torch.compile``: no choice among kernels by their time, which differs from one process to another."""


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

    def compile_layers(self) -> None:
        """From now on run every layer, and the confidence head, as one graph of fused kernels each.

        A graph is made when its inputs are first seen and serves any length; the sizes first seen decide in which
        order it adds. ``torch.compiler.set_stance("force_eager")`` leaves graphs out.
        """
        torch.fx.experimental._config.use_duck_shape = False  # sizes that happen to be equal are not one size
        torch._dynamo.config.optimize_ddp = False  # it would cut every layer for the sake of the exchange
        torch._dynamo.config.recompile_limit = 64  # past it layers would run plainly, and round in another way
        for module in (*self.layers, self.confidence_head):
            if module is not None:
                module.forward = torch.compile(module.forward, dynamic=True, options=SAME_GRAPHS)

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

    def context(self, taps_TLD: Tensor) -> Tensor:
        """Context features of target states: one per position, shared by all layers. Returns: [T, D]."""
        context_TD: Tensor = self.hidden_norm(self.fc(taps_TLD.flatten(1).to(self.fc.weight.dtype)))
        return context_TD

    def context_keys_values(self, taps_TLD: Tensor, start: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the context rows at positions start, start + 1, ..., [T, G, E], a pair per layer."""
        positions_T = torch.arange(start, start + len(taps_TLD), device=taps_TLD.device)
        context_TD, rotary = self.context(taps_TLD), self.rotary(positions_T)
        return [cast(DraftLayer, layer).self_attn.keys_values(context_TD, rotary) for layer in self.layers]

    def rotary(self, positions_N: Tensor) -> Rotary:
        """Cosine and sine of positions, float32 or better whatever the draft's dtype."""
        dtype = torch.promote_types(self.fc.weight.dtype, torch.float32)
        return draft_rotary(self.config, positions_N, dtype)

    def blocks(self, anchor_ids_A: Tensor, positions_A: Tensor, memories: Sequence[Memory]) -> Tensor:
        """Run the layers over blocks [anchor, mask, mask, ...]. Returns: the slots [A, K, D] after the final norm.
        Shapes: positions_A int64, of the anchors in their text; one memory a layer.
        """
        assert self.embedding_VD is not None, "bind the target's tables first"
        positions_AQ = slot_positions(positions_A, self.config.num_rows)
        ids_AQ = torch.full_like(positions_AQ, self.config.mask_token_id)
        ids_AQ[:, 0] = anchor_ids_A
        hidden_ND = functional.embedding(ids_AQ.flatten(), self.embedding_VD).to(self.fc.weight.dtype)
        rotary = self.rotary(positions_AQ.flatten())
        for layer, memory in zip(self.layers, memories, strict=True):
            if self.activation_checkpointing and torch.is_grad_enabled():
                given = (hidden_ND, rotary, memory)
                hidden_ND = checkpoint(layer, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden_ND = layer(hidden_ND, rotary, memory)
        hidden_AQD: Tensor = self.norm(hidden_ND).view(*positions_AQ.shape, -1)
        return hidden_AQD[:, -self.config.block_size :]

    def base_logits(self, hidden: Tensor) -> Tensor:
        """The target's head on hidden states, before the Markov bias. Returns: float32 or better [..., V]."""
        assert self.head_VD is not None, "bind the target's tables first"
        logits = functional.linear(hidden.to(self.head_VD.dtype), self.head_VD)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def forward(
        self, ids_T: Tensor, positions_T: Tensor, taps_TLD: Tensor, starts_A: Tensor, anchors_A: Tensor
    ) -> DraftOutput:
        """Blocks of packed texts under teacher forcing: slot j reads the text's token at p + j as its previous token.

        The texts lie one after another in a row of T tokens. A block reads the context of its own text only; what a
        slot behind its text's end says means nothing.
        Shapes: ids_T int64; positions_T int64, from 0 in every text; taps_TLD the target's layer outputs; starts_A and
        anchors_A int64, where in the row a block's text begins and its anchor stands, both in ascending order.
        """
        places_AK = slot_positions(anchors_A, self.config.block_size)
        previous_ids_AK = gather_positions(ids_T, places_AK)
        memory = Anchored(self.context(taps_TLD), self.rotary(positions_T), starts_A, anchors_A)
        hidden_AKD = self.blocks(previous_ids_AK[:, 0], anchors_A - starts_A, [memory] * len(self.layers))
        embedded_AKR = self.markov_head.embed(previous_ids_AK)
        mixed_AKR = self.markov_head(embedded_AKR, hidden_AKD)
        confidence = None if self.confidence_head is None else self.confidence_head(hidden_AKD, embedded_AKR)
        # A view, for FSDP2 puts a hook on every tensor that is returned, and on the weight itself they would pile up.
        markov_VR = self.markov_head.markov_w2.weight
        return DraftOutput(hidden_AKD, mixed_AKR, markov_VR.view_as(markov_VR), confidence)
