"""Real routing for a timed window: a trace of the experts that consecutive tokens of a text visited."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional

from dspark.errors import ConfigError
from dspark.kernels.router import list_pairs
from dspark.target.config import TargetConfig
from dspark.verifier.engine import Verifier


def read_trace(path: Path, config: TargetConfig, num_tokens: int) -> torch.Tensor:
    """The experts that a text's tokens picked in every mixture layer: ids_NLK int64, of at least ``num_tokens`` tokens.

    Raises: ConfigError unless it is a safetensors file that holds them as the integer tensor ``expert_ids``.
    """
    layout = sum(map(config.is_moe, range(config.num_hidden_layers))), config.num_experts_per_tok
    expected = "expected integers expert_ids [{} tokens or more, {} MoE layers, {} picks]".format(num_tokens, *layout)
    try:
        with safe_open(path, framework="pt") as file:
            ids_NLK: torch.Tensor = file.get_tensor("expert_ids")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: no safetensors file that can be read ({error}); {expected}") from error
    if (
        ids_NLK.dtype == torch.bool
        or not torch.can_cast(ids_NLK.dtype, torch.int64)
        or ids_NLK.shape[1:] != layout
        or len(ids_NLK) < num_tokens
    ):
        raise ConfigError(f"{path}: {expected}, found {ids_NLK.dtype} {list(ids_NLK.shape)}")
    ids_NLK = ids_NLK.long().sort().values
    is_wrong_NLK = (ids_NLK < 0) | (ids_NLK >= config.num_experts) | functional.pad(ids_NLK.diff() == 0, (1, 0))
    for token, layer, _ in is_wrong_NLK.nonzero()[:1].tolist():
        found = f"found {ids_NLK[token, layer].tolist()} of token {token} in MoE layer {layer} (the first ones are 0)"
        raise ConfigError(f"{path}: expected different experts in 0..{config.num_experts - 1}, {found}")
    return ids_NLK


def uniform_trace(config: TargetConfig, num_tokens: int, seed: int) -> torch.Tensor:
    """Different experts drawn evenly for every token and mixture layer: ids_NLK int64, as ``read_trace`` gives them."""
    layers = sum(map(config.is_moe, range(config.num_hidden_layers)))
    chance_NLX = torch.rand(num_tokens, layers, config.num_experts, generator=torch.Generator().manual_seed(seed))
    return chance_NLX.topk(config.num_experts_per_tok).indices.sort().values


def replay(verifier: Verifier, trace_NLK: torch.Tensor, num_tokens: int) -> dict[str, float]:
    """Route windows as the one of the trace whose visits are the median of all, with equal weights of the usual sum.

    Returns: mean, least and most experts a layer of all windows, the shared one included; uniform routing's mean.
    """
    config, device = verifier.config, verifier.weights.device
    num_experts, num_picks = config.num_experts, config.num_experts_per_tok
    windows = (ids_NK.unfold(0, num_tokens, 1).flatten(1) for ids_NK in trace_NLK.unbind(1))
    counts_WL = torch.stack([(ids_WM.sort().values.diff() != 0).sum(1) + 2 for ids_WM in windows], 1)
    first = int(counts_WL.sum(1).argsort(stable=True)[(len(counts_WL) - 1) // 2])
    ids_LTJ = functional.pad(trace_NLK[first : first + num_tokens].transpose(0, 1).int(), (0, 1), value=num_experts)
    weights_TJ = torch.full(ids_LTJ.shape[1:], config.routed_scaling_factor / num_picks, device=device)
    weights_TJ[:, -1] = 1
    verifier.forced[num_tokens] = [list_pairs(ids_TJ, weights_TJ, num_experts) for ids_TJ in ids_LTJ.to(device)]
    uniform = num_experts * (1 - (1 - num_picks / num_experts) ** num_tokens) + 1
    found = {"mean": round(float(counts_WL.double().mean()), 2), "uniform": round(uniform, 2), "first_token": first}
    return found | {"least": int(counts_WL.min()), "most": int(counts_WL.max())}
