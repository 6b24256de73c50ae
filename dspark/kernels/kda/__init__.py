"""Kimi Delta Attention: short convolution, decay, and the gated delta rule over one sequence or many."""

from dspark.kernels.kda.reference import (
    CHUNK_TOKENS,
    DeltaRule,
    chunked,
    gated_rms_norm,
    history_after,
    l2norm,
    log_decay,
    recurrence,
    short_conv,
    state_after,
)

__all__ = [
    "CHUNK_TOKENS",
    "DeltaRule",
    "chunked",
    "gated_rms_norm",
    "history_after",
    "l2norm",
    "log_decay",
    "recurrence",
    "short_conv",
    "state_after",
]
