"""What a step costs, on made-up data of a target's size and through training's own code."""

from dspark.train.measure.made_up import RandomRecord, least_bytes, random_learner
from dspark.train.measure.operations import count_operations
from dspark.train.measure.parts import MicroStep, whole_steps

__all__ = ["MicroStep", "RandomRecord", "count_operations", "least_bytes", "random_learner", "whole_steps"]
