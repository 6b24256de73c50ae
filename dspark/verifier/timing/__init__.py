"""Times of stages and whole steps on a GPU: captured, replayed, with cold weights, against the read bandwidth."""

from dspark.verifier.timing.clock import Clock, read_bandwidth, slack_tokens, time_parts, time_stages, time_step
from dspark.verifier.timing.prefill import matmul_flops, product_flops, time_prefill
from dspark.verifier.timing.routing import read_trace, replay, uniform_trace
from dspark.verifier.timing.stages import call_bytes, distinct_experts, fill, record_step, rewind

__all__ = ["Clock", "call_bytes", "distinct_experts", "fill", "matmul_flops", "product_flops", "read_bandwidth"]
__all__ += ["read_trace", "record_step", "replay", "rewind", "slack_tokens", "time_parts", "time_prefill"]
__all__ += ["time_stages", "time_step", "uniform_trace"]
