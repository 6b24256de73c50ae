"""The experts, defined. I inner width of an expert, K experts of a row."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from dspark.kernels.router import Dispatch


def sort_by_expert(ids_NK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The N*K picks in the order of their experts, and where each expert's picks end in that order (int32 [X])."""
    sorted_M, order_M = ids_NK.flatten().to(torch.int16).sort(stable=True)  # a GPU sorts bit by bit
    experts_X = torch.arange(num_experts, device=ids_NK.device, dtype=torch.int16)
    return order_M, torch.searchsorted(sorted_M, experts_X, right=True, out_int32=True)


def swiglu(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    """``min(silu(gate), limit) * clamp(up, -limit, limit)``; no limit means no clamp.

    The limit applies after SiLU and only from above on the gate's side.
    Source: SGLang 0.5.23 (Ling-3.0 routed and shared experts); the vendor's modelling file leaves it out.
    """
    activated = functional.silu(gate)
    if limit is not None:
        activated, up = activated.clamp(max=limit), up.clamp(-limit, limit)
    return activated * up


def run_each(x_ND: Tensor, ids_NJ: Tensor, gate_up_XCD: Tensor, down_XDI: Tensor, limits_X: Tensor) -> Tensor:
    """Every row through the J experts that were chosen for it, each expert with its clamp: outputs_NJD."""
    order_M, ends_X = sort_by_expert(ids_NJ, len(limits_X))
    outputs_MD = x_ND.new_empty(len(order_M), x_ND.shape[1])
    for expert, picks_P in enumerate(order_M.tensor_split(ends_X.tolist()[:-1])):
        if len(picks_P):
            gate_PI, up_PI = functional.linear(x_ND[picks_P // ids_NJ.shape[1]], gate_up_XCD[expert]).chunk(2, 1)
            outputs_MD[picks_P] = functional.linear(swiglu(gate_PI, up_PI, float(limits_X[expert])), down_XDI[expert])
    return outputs_MD.view(*ids_NJ.shape, -1)


def up(x_TD: Tensor, gate_up_XCD: Tensor, dispatch: Dispatch, limits_X: Tensor) -> Tensor:
    """``swiglu`` of the gate and up rows of its expert for every pair, each rounded as a matrix product would be.

    Shapes: gate_up_XCD [X+1, 2I, D]; limits_X an expert's clamp, inf for none. Returns act_MI, M = T*J pair rows.
    """
    num_slots = dispatch.weights_TJ.shape[1]
    act_MI = x_TD.new_empty(dispatch.weights_TJ.numel(), gate_up_XCD.shape[1] // 2)
    for expert, rows_M in _visits(dispatch):
        gate_MI, up_MI = functional.linear(x_TD[rows_M // num_slots], gate_up_XCD[expert]).chunk(2, -1)
        act_MI[rows_M] = swiglu(gate_MI, up_MI, float(limits_X[expert]))
    return act_MI


def down(act_MI: Tensor, down_XDI: Tensor, dispatch: Dispatch) -> Tensor:
    """Every pair's row through the down matrix of its expert, without its weight: out_TJD in the dtype of act_MI."""
    out_MD = act_MI.new_empty(act_MI.shape[0], down_XDI.shape[1])
    for expert, rows_M in _visits(dispatch):
        out_MD[rows_M] = functional.linear(act_MI[rows_M], down_XDI[expert])
    return out_MD.view(*dispatch.weights_TJ.shape, -1)


def _visits(dispatch: Dispatch) -> Iterator[tuple[int, Tensor]]:
    """Every visited expert with its pair rows."""
    for expert, pairs_N in zip(dispatch.experts_P.tolist(), dispatch.pairs_PN, strict=True):
        if expert >= 0:
            yield expert, pairs_N[pairs_N >= 0].long()
