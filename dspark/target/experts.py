"""The mixture of experts: router, routed experts with stacked weights, shared expert."""

import torch
from torch import nn
from torch.nn import functional

from dspark.kernels import moe, router
from dspark.layers.mlp import SwiGLU
from dspark.target.config import TargetConfig


class Router(nn.Module):
    """Chooses experts by grouped sigmoid scores; ``expert_bias`` balances the choice and takes no gradient.
    Computed in float32 or higher whatever the weights' dtype, also under autocast.
    """

    expert_bias: torch.Tensor

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.empty(config.num_experts))
        self.law = config.router_law

    def forward(self, x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ids_NK and weights_NK, as ``router.route``."""
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        with torch.autocast(x_ND.device.type, enabled=False):
            return router.route(functional.linear(x_ND.to(wide), self.weight.to(wide)), self.expert_bias, self.law)


class Experts(nn.Module):
    """The weights of all routed experts of a layer: gate rows then up rows [X, 2I, D], and down [X, D, I]."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        num_experts, inner, width = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(num_experts, width, inner))


class MixtureOfExperts(nn.Module):
    """``sum of w_e * expert_e(x) + shared(x)``; rows are summed in float32 or higher and rounded once.
    Source: specs/ling-3.0.md section 6.
    """

    def __init__(self, config: TargetConfig, layer: int) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = SwiGLU(config.hidden_size, config.shared_intermediate_size, config.shared_limit(layer))
        self.limit = config.routed_limit(layer)

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Returns the output [N, D]."""
        (ids_NK, weights_NK), experts = self.gate(x_ND), self.experts
        routed_ND = moe.run_experts(x_ND, ids_NK, weights_NK, experts.gate_up_proj, experts.down_proj, self.limit)
        output_ND: torch.Tensor = (routed_ND + self.shared_experts(x_ND)).to(x_ND.dtype)
        return output_ND
