"""The Ling-3.0 target: a stack of linear and latent attention layers, with its multi-token prediction layer."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from dspark.kernels.rotary import rotary_angles
from dspark.layers.mlp import SwiGLU
from dspark.layers.rms_norm import RMSNorm
from dspark.target.cache import Layout, LinearMemory, LinearStage, LingCache
from dspark.target.config import TargetConfig
from dspark.target.experts import MixtureOfExperts
from dspark.target.latent_attention import Angles, LatentAttention
from dspark.target.linear_attention import LinearAttention
from dspark.types import TargetOutput

_FLOAT32_NAMES = ("A_log", "dt_bias", "expert_bias")


class Layer(nn.Module):
    """Pre-norm attention and feed-forward block, each added to the residual stream."""

    def __init__(self, config: TargetConfig, index: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.attention = LatentAttention(config) if config.is_latent(index) else LinearAttention(config)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MixtureOfExperts(config, index) if config.is_moe(index) else SwiGLU(width, config.intermediate_size)


class PredictionLayer(Layer):
    """The multi-token prediction layer: joins the next token's embedding to the last hidden state."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__(config, config.num_hidden_layers)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.final_layernorm = (RMSNorm(width, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)


class Trunk(nn.Module):
    """Everything but the head; the prediction layer follows the layers of the main model."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.layers.extend(PredictionLayer(config) for _ in range(config.num_nextn_predict_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LingModel(nn.Module):
    """Ling-3.0 as a ``Target``. Parameters have the checkpoint's names; routed experts are stacked.

    A new model's memory is undefined until ``load_tensors``. ``dtype`` is that of the weights and of the residual
    stream; A_log, dt_bias, expert_bias and the recurrent states stay in float32 or higher.
    Source: specs/ling-3.0.md; modeling_bailing_moe_v3.py of inclusionAI/Ling-3.0-flash with the clamps it leaves out.
    """

    def __init__(
        self, config: TargetConfig, target_layer_ids: tuple[int, ...] = (), dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.target_layer_ids = config, target_layer_ids
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers = config.num_hidden_layers
        with torch.device("meta"):
            self.model = Trunk(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.to(dtype)
        for name, tensor in self.state_dict(keep_vars=True).items():
            if name.endswith(_FLOAT32_NAMES):
                tensor.data = tensor.data.to(torch.promote_types(dtype, torch.float32))
        self.to_empty(device=device)

    @property
    def embedding_VD(self) -> Tensor:
        return self.model.word_embeddings.weight.detach()

    @property
    def head_VD(self) -> Tensor:
        return self.lm_head.weight.detach()

    def logits(self, hidden: Tensor) -> Tensor:
        """The head on last hidden states [..., D]: logits [..., V] in float32 or higher."""
        logits: Tensor = self.lm_head(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def forward(self, ids_N: Tensor, lengths: Sequence[int]) -> TargetOutput:
        """Read whole sequences laid one after the other, with gradients; ``lengths`` are host integers, ids_N int64.
        Sequences of one length are read without padding, loops over sequences or host syncs.
        """
        return self._read(ids_N, Layout.of(lengths, ids_N.device))[0]

    @torch.no_grad()
    def prefill(self, ids: Sequence[Tensor]) -> tuple[LingCache, TargetOutput]:
        lengths = [len(ids_T) for ids_T in ids]
        ids_N = torch.cat(list(ids)).to(self.lm_head.weight.device)
        output, linear, latent = self._read(ids_N, Layout.of(lengths, ids_N.device))
        return LingCache(lengths, linear, latent), output

    @torch.no_grad()
    def verify(self, ids_BT: Tensor, cache: LingCache) -> TargetOutput:
        cache.stage([], 0)
        view = cache.view(ids_BT.shape[1])
        angles = self.angles(view.layout)
        stages: list[LinearStage] = []
        latent_layers = iter(range(self.config.num_hidden_layers))

        def attend(layer: Layer, x_ND: Tensor) -> Tensor:
            if isinstance(layer.attention, LinearAttention):
                y_ND, stage = layer.attention.stage(x_ND, view.layout, cache.memory(len(stages)))
                stages.append(stage)
                return y_ND
            return layer.attention.stage(x_ND, angles, view, cache.rows_MBJC[next(latent_layers)])

        output = self._walk(ids_BT.flatten().to(self.lm_head.weight.device), attend)
        cache.stage(stages, ids_BT.shape[1])
        return output

    def commit(self, cache: LingCache, counts_B: Tensor) -> None:
        cache.commit(counts_B)

    @torch.no_grad()
    def load_tensors(self, get: Callable[[str], Tensor]) -> None:
        """Fill every weight from ``get(checkpoint name)``, converted to this model's dtypes."""
        for name, place in self.places():
            place.copy_(get(name))

    def places(self) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names with the memory they fill: a parameter, or one expert's part of a stacked one."""
        for name, tensor in self.state_dict().items():
            prefix, separator, part = name.partition(".experts.")
            if not separator:
                yield name, tensor
                continue
            halves = tensor.chunk(2, 1) if part == "gate_up_proj" else (tensor,)
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for expert in range(tensor.shape[0]):
                for label, half in zip(parts, halves, strict=True):
                    yield f"{prefix}.experts.{expert}.{label}.weight", half[expert]

    def angles(self, layout: Layout) -> Angles:
        """Cosine and sine of the positions of a layout's rows."""
        wide = torch.promote_types(self.lm_head.weight.dtype, torch.float32)
        return rotary_angles(layout.positions_N, self.config.qk_rope_head_dim, self.config.rope_theta, wide)

    def _read(self, ids_N: Tensor, layout: Layout) -> tuple[TargetOutput, list[LinearMemory], list[Tensor]]:
        angles = self.angles(layout)
        linear: list[LinearMemory] = []
        latent: list[Tensor] = []

        def attend(layer: Layer, x_ND: Tensor) -> Tensor:
            if isinstance(layer.attention, LinearAttention):
                linear_ND, memory = layer.attention.forward(x_ND, layout)
                linear.append(memory)
                return linear_ND
            latent_ND, rows_BTC = layer.attention.forward(x_ND, layout, angles)
            latent.append(rows_BTC)
            return latent_ND

        return self._walk(ids_N, attend), linear, latent

    def _walk(self, ids_N: Tensor, attend: Callable[[Layer, Tensor], Tensor]) -> TargetOutput:
        hidden_ND = self.model.word_embeddings(ids_N)
        outputs: list[Tensor] = []
        for index in range(self.num_layers):
            layer = self.model.layers[index]
            assert isinstance(layer, Layer)
            hidden_ND = hidden_ND + attend(layer, layer.input_layernorm(hidden_ND))
            hidden_ND = hidden_ND + layer.mlp(layer.post_attention_layernorm(hidden_ND))
            outputs.append(hidden_ND)
        taps = [outputs[index] for index in self.target_layer_ids]
        taps_NLD = torch.stack(taps, 1) if taps else hidden_ND.new_empty(len(hidden_ND), 0, self.hidden_size)
        return TargetOutput(taps_NLD, self.model.norm(hidden_ND))


def tensor_shapes(config: TargetConfig) -> dict[str, Tensor]:
    """Every tensor that the model's checkpoint must hold, on the meta device: name, shape and dtype.
    Source: specs/ling-3.0.md sections 2 and 10; the tests hold them against the published totals of flash and tiny.
    """
    return dict(LingModel(config, dtype=torch.bfloat16, device="meta").places())
