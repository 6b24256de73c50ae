"""A small true decode while a draft is being trained: the number that the teacher-forced estimate stands for."""

from dataclasses import dataclass
from typing import Any

import torch

from dspark.decode.sampling import Sampling
from dspark.draft.model import DraftModel
from dspark.eval.measure import measure
from dspark.types import Target


@dataclass(frozen=True)
class Probe:
    """The target, the few prompts (int64 [T]) and the draws that every probe of a run shares, so that only the draft
    tells two probes apart.
    """

    target: Target[Any]
    prompts: tuple[torch.Tensor, ...]
    sampling: Sampling
    seed: int

    def __call__(self, draft: DraftModel) -> float:
        """Decode with the draft as it is; training goes on as if nothing had happened. Returns: the mean acceptance
        length with the bonus token, over the rounds of all prompts. Raises: PromptError as ``decode_prompts``.
        """
        measurement = measure(self.target, draft, ("probe", self.prompts), self.sampling, self.seed)
        assert measurement.acceptance is not None, "measure refuses texts without a round"
        return measurement.acceptance.mean_acceptance_length
