"""A small true decode while a draft is being trained: the number that the teacher-forced estimate stands for."""

from dataclasses import dataclass
from typing import Any

import torch

from dspark.decode.generation import DraftSpeaker
from dspark.decode.sampling import Sampling
from dspark.draft.model import DraftModel
from dspark.errors import PromptError
from dspark.eval.measure import decode_prompts
from dspark.eval.statistics import acceptance_statistics
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
        length with the bonus token, over the rounds of all prompts. Raises: PromptError when there is no round.
        """
        texts = decode_prompts(DraftSpeaker(self.target, draft), self.prompts, self.sampling, self.seed)
        if not any(text.rounds for text in texts):
            raise PromptError("probe: all texts stopped at their first token; use prompts that the target answers")
        return acceptance_statistics([text.rounds for text in texts]).mean_acceptance_length
