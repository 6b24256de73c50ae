"""The tensor-parallel engine: a rank's slices, static buffers, captured steps, stage and commit."""

from dspark.verifier.engine import Verifier, VerifierCache
from dspark.verifier.plan import Plan, make_plan
from dspark.verifier.reading import PackedReader
from dspark.verifier.sharding import load_mtp, load_weights, random_mtp, random_weights
from dspark.verifier.step import Step, StepOutput
from dspark.verifier.weights import MtpWeights, Precision, Shard, VerifierWeights

__all__ = ["MtpWeights", "Plan", "Precision", "Shard", "Step", "StepOutput", "Verifier", "VerifierCache"]
__all__ += ["PackedReader", "VerifierWeights", "load_mtp", "load_weights", "make_plan", "random_mtp", "random_weights"]
