"""What a target that learns does beside reading: fresh weights, its prediction layer, its choices, a checkpoint."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import log

import torch
from torch import Tensor

from dspark.target.cache import Layout
from dspark.target.experts import Router
from dspark.target.model import LingModel, PredictionLayer, tensor_shapes


def initialise(model: LingModel, generator: torch.Generator) -> None:
    """Draw fresh weights: normal with deviation 0.02, norms 1, expert bias 0, convolutions uniform to 1/sqrt(taps).
    ``dt_bias`` spreads the decay rates of the channels evenly in the logarithm from 0.001 to 1 a token.
    """
    rates = (0.001, 1.0)
    for name, tensor in model.state_dict().items():
        drawn = torch.empty(tensor.shape, device=generator.device)
        if name.endswith("norm.weight"):
            drawn.fill_(1)
        elif name.endswith("expert_bias"):
            drawn.zero_()
        elif name.endswith("A_log"):
            drawn.uniform_(1, 2, generator=generator).log_()
        elif name.endswith("dt_bias"):
            drawn.uniform_(log(rates[0]), log(rates[1]), generator=generator).exp_()
            drawn = (drawn / -model.config.kda_lower_bound).logit()
        elif "conv1d" in name:
            drawn.uniform_(-1, 1, generator=generator).mul_(tensor.shape[-1] ** -0.5)
        else:
            drawn.normal_(0, 0.02, generator=generator)
        tensor.copy_(drawn)


def mtp_hidden(model: LingModel, next_ids_N: Tensor, last_hidden_ND: Tensor, lengths: Sequence[int]) -> Tensor:
    """The prediction layer over whole sequences: row t, from last_hidden[t] and token t+1, speaks of token t+2.

    Returns the hidden state whose ``logits`` predict [N, D], rows laid as in ``LingModel.forward``. To predict further,
    feed the hidden state back with the drafted ids.
    Source: specs/ling-3.0.md section 7; DeepSeek-V3 (arXiv 2412.19437) section 2.2.
    """
    layer = model.model.layers[model.config.num_hidden_layers]
    assert isinstance(layer, PredictionLayer)
    embedded_ND = layer.enorm(model.model.word_embeddings(next_ids_N))
    hidden_ND = layer.eh_proj(torch.cat((embedded_ND, layer.hnorm(last_hidden_ND)), -1))
    layout = Layout.of(lengths, next_ids_N.device)
    attended_ND, _ = layer.attention(layer.input_layernorm(hidden_ND), layout, model.angles(layout))
    hidden_ND = hidden_ND + attended_ND
    last_ND: Tensor = layer.final_layernorm(hidden_ND + layer.mlp(layer.post_attention_layernorm(hidden_ND)))
    return last_ND


@contextmanager
def chosen_experts(model: LingModel) -> Iterator[list[Tensor]]:
    """A list that every router of the model appends to when it chooses: ids_NK int64."""
    chosen: list[Tensor] = []
    routers = [module for module in model.modules() if isinstance(module, Router)]
    hooks = [router.register_forward_hook(lambda *call: chosen.append(call[2][0])) for router in routers]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def checkpoint_tensors(model: LingModel) -> dict[str, Tensor]:
    """Every weight under its checkpoint name, in the dtype that a checkpoint has it in."""
    specs = tensor_shapes(model.config)
    return {name: place.to(specs[name].dtype, copy=True) for name, place in model.places()}
