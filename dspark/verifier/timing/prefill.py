"""How fast whole sequences are read, against the fastest matrix product of the device."""

from collections.abc import Callable

import torch

from dspark.verifier.engine import Verifier
from dspark.verifier.reading import read_packed
from dspark.verifier.weights import VerifierWeights

RUNS, SIDE = 5, 8192


def product_flops(weights: VerifierWeights) -> int:
    """FLOP a token of this rank's products with weights: without attention itself, the delta rule and the head."""
    tensors = [] if weights.linear is None else [weights.linear.in_LCD, weights.linear.out_LDC]
    num_weights = 0
    for layer in weights.layers:
        if layer.latent is not None:
            latent = layer.latent
            tensors += [latent.in_CD, latent.keys_HEC, latent.values_HFC, latent.out_DC]
            tensors += [] if latent.q_b_CQ is None else [latent.q_b_CQ]
        num_experts = 1
        if layer.router is not None:
            tensors.append(layer.router.gate_XD)
            num_experts = weights.config.num_experts_per_tok + 1
        num_weights += num_experts * (layer.experts.gate_up_XCD[0].numel() + layer.experts.down_XDI[0].numel())
    return 2 * (num_weights + sum(tensor.numel() for tensor in tensors))


def matmul_flops(device: torch.device) -> float:
    """FLOP a second of a large product in bfloat16."""
    x_MM, y_MM = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * SIDE**3 / _seconds(lambda: x_MM @ y_MM)


def time_prefill(verifier: Verifier, num_tokens: int, num_sequences: int) -> float:
    """Seconds to read random tokens, packed sequences of equal length from their start."""
    generator = torch.Generator().manual_seed(0)
    ids_N = torch.randint(verifier.vocab_size, (num_tokens,), generator=generator).to(verifier.weights.device)
    sequences = ids_N.tensor_split(num_sequences)
    inputs = (verifier.weights, sequences, verifier.target_layer_ids)
    return _seconds(lambda: read_packed(*inputs, ranks=verifier.ranks))


def _seconds(function: Callable[[], object]) -> float:
    """Mean of some runs, enqueued one behind the other as a recording's are."""
    for _ in range(2):
        function()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before.record()
    for _ in range(RUNS):
        function()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after)) / RUNS / 1e3
