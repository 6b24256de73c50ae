"""How fast whole sequences are read, against a large matrix product of the device."""

from functools import partial

import torch

from dspark.verifier.engine import Verifier
from dspark.verifier.reading import read_packed
from dspark.verifier.timing.clock import Clock
from dspark.verifier.weights import VerifierWeights, tensors_of

SIDE = 8192
"""Rows and columns of the matrix product."""


def product_flops(weights: VerifierWeights) -> int:
    """FLOP a token of this rank's products with weights: without attention itself, the delta rule and the head."""
    tensors = [] if weights.linear is None else [weights.linear.in_LCD, weights.linear.out_LDC]
    for layer in weights.layers:
        tensors += [tensor for tensor in tensors_of((layer.latent, layer.router)) if tensor.dim() > 1]
        num_experts = 1 if layer.router is None else 1 + weights.config.num_experts_per_tok
        tensors += [layer.experts.gate_up_XCD[0], layer.experts.down_XDI[0]] * num_experts
    return 2 * sum(tensor.numel() for tensor in tensors)


def matmul_flops(clock: Clock) -> float:
    """FLOP a second of a product of two matrices of SIDE x SIDE in bfloat16."""
    x_MM, y_MM = (torch.randn(SIDE, SIDE, device=clock.device, dtype=torch.bfloat16) for _ in range(2))
    multiply = partial(torch.mm, x_MM, y_MM)
    multiply()  # loads the library
    return 2e6 * SIDE**3 / clock.time_burst(multiply)


def time_prefill(verifier: Verifier, clock: Clock, num_tokens: int, num_sequences: int) -> float:
    """Microseconds to read random tokens in the host's memory, packed sequences of equal length from their start.

    Passes are enqueued one behind the other, as a recording's are; the host's part of a pass hides behind another.
    """
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(verifier.vocab_size, (num_tokens,), generator=generator).tensor_split(num_sequences)
    inputs = (verifier.weights, sequences, verifier.target_layer_ids)
    read_packed(*inputs, ranks=verifier.ranks)
    return clock.time_burst(lambda: read_packed(*inputs, ranks=verifier.ranks))
