"""Times of stages and whole steps on a GPU: captured, replayed, with cold weights, against the read bandwidth."""

from dspark.verifier.timing.clock import Clock, read_bandwidth, slack_tokens, time_stages, time_step
from dspark.verifier.timing.routing import read_trace, replay
from dspark.verifier.timing.stages import call_bytes, distinct_experts, fill, record_step, rewind

__all__ = ["Clock", "call_bytes", "distinct_experts", "fill", "read_bandwidth", "record_step", "rewind", "slack_tokens"]
__all__ += ["read_trace", "replay", "time_stages", "time_step"]
