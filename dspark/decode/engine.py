"""The verifier's cycles as a way to write texts: whole rounds on the device, read by the host one round late."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from dspark.decode.round import count
from dspark.decode.sampling import Sampling, Uniforms
from dspark.decode.speaking import Spoken, Stopwatch
from dspark.errors import ConfigError
from dspark.verifier import Verifier
from dspark.verifier.drafting import Cycle, Drafter
from dspark.verifier.timing import Clock, time_parts

SEEDS = 2**62
SLACK_TOKENS = 48
"""Room behind the longest text: two windows under way, and what a round commits beyond max_new_tokens."""


class CycleSpeaker:
    """A ``Speaker`` of one text at a time: speculative decoding by ``Cycle``, plain decoding with a ``NoDrafter``.

    Greedy text is that of the reference path up to rounding. Sampled text has its distribution and not its words:
    chance comes from the device's generator, seeded by the row's first uniform, so the same on all ranks.

    A round is one graph, whose parts no clock of the host sees. On a GPU every part is timed as a graph of its own,
    once a temperature, behind the first prompt; a text's phases draft, verify, commit and update are these times its
    rounds (made smaller in one proportion where they exceed what the rounds took), "other" is the rest. On a CPU all
    of a round is the phase "cycle", but for the first, which runs before the first token is read: "prefill".
    """

    def __init__(self, verifier: Verifier, drafter: Drafter) -> None:
        self.verifier, self.drafter, self.is_drafting = verifier, drafter, drafter.num_drafts > 0
        self._cycles: dict[float, Cycle] = {}
        self._part_seconds: dict[float, dict[str, float]] = {}

    def __call__(
        self, prompts: Sequence[torch.Tensor], sampling: Sampling, uniforms: Sequence[Uniforms], stopwatch: Stopwatch
    ) -> Iterator[list[Spoken]]:
        """Raises: ConfigError for several prompts, a truncated distribution, or a text that exceeds the capacity."""
        if len(prompts) != 1:
            raise ConfigError(f"the verifier writes one text at a time, got {len(prompts)} prompts")
        if sampling.top_k or sampling.top_p < 1:
            raise ConfigError("the verifier draws from the whole distribution: top_k must be 0 and top_p 1")
        cycle = self._cycle(sampling.temperature, prompts[0])
        if cycle.generator is not None:
            cycle.generator.manual_seed(int(uniforms[0]() * SEEDS))
        received = cycle.rounds(prompts[0])
        ids = next(received)
        stopwatch.lap("prefill")
        yield [Spoken(0, ids, None)]
        num_tokens, num_rounds = 1, 0
        most = sampling.max_new_tokens - (not self.is_drafting)  # a full text is followed by one more round if drafted
        while ids[-1] not in sampling.stop_token_ids and num_tokens <= most:
            ids, room = next(received), sampling.max_new_tokens - num_tokens
            ids, counts = count(ids, self.drafter.num_drafts, sampling.stop_token_ids, cycle.confidence_logits)
            counts = replace(counts, is_cut=counts.is_cut or len(ids) > room)
            num_tokens, num_rounds = num_tokens + len(ids), num_rounds + 1
            yield [Spoken(0, ids[:room], counts if self.is_drafting else None)]
        stopwatch.lap("cycle")
        cycle.receive()  # of the round under way, for which the next text would have to wait
        self.verifier.ranks.check()
        if parts := self._part_seconds.get(sampling.temperature):
            _divide(stopwatch.phase_seconds, {name: seconds * num_rounds for name, seconds in parts.items()})

    def _cycle(self, temperature: float, prompt_ids_T: torch.Tensor) -> Cycle:
        if temperature not in self._cycles:
            device = self.verifier.weights.device
            generator = None if Sampling(temperature, 1).is_greedy else torch.Generator(device)
            self._cycles[temperature] = cycle = Cycle(self.verifier, self.drafter, temperature, generator)
            if device.type == "cuda":
                cycle.begin(prompt_ids_T)
                found = time_parts(cycle, Clock(device, self.verifier.ranks), len(prompt_ids_T))
                self._part_seconds[temperature] = {name: value / 1e6 for name, value in found.items()}
        return self._cycles[temperature]


def _divide(phase_seconds: dict[str, float], parts: dict[str, float]) -> None:
    """Put the parts of all rounds, and what they leave, in the place of "cycle"."""
    whole = phase_seconds.pop("cycle")
    share = min(1.0, whole / max(sum(parts.values()), 1e-12))
    phase_seconds.update({name: seconds * share for name, seconds in parts.items()})
    phase_seconds["other"] = phase_seconds.get("other", 0.0) + whole - share * sum(parts.values())
