"""Latent attention: the plain form for whole sequences and the absorbed form over a latent cache."""

from dspark.kernels.mla.reference import absorbed_attention, causal_attention

__all__ = ["absorbed_attention", "causal_attention"]
