"""The verifier's cycles write what the reference path writes, and say of their rounds and time what it says."""

from collections.abc import Callable

import pytest
import torch
from speculating import Generation, speculate
from verifying import CAPACITY_TOKENS, random_ids

from dspark.decode.engine import CycleSpeaker, _divide
from dspark.decode.generation import generate
from dspark.decode.round import Round
from dspark.decode.sampling import Sampling, row_uniforms
from dspark.decode.speaking import Stopwatch
from dspark.draft.model import DraftModel
from dspark.errors import ConfigError
from dspark.export.draft_folder import read_draft
from dspark.target.loading import NANO_FOLDER, load_target
from dspark.types import Target
from dspark.verifier import Shard, Verifier
from dspark.verifier.drafting import BlockDrafter, NoDrafter, draft_weights

TAPS = (1, 2, 4, 5, 6)
Make = Callable[[int], CycleSpeaker]


@pytest.fixture(scope="module")
def reference() -> Target:
    return load_target(NANO_FOLDER, target_layer_ids=TAPS)


@pytest.fixture(scope="module")
def draft(reference: Target) -> DraftModel:
    return read_draft(NANO_FOLDER / "draft", (reference.embedding_VD, reference.head_VD))


@pytest.fixture(scope="module")
def speaker_of(draft: DraftModel) -> Make:
    """Cycles of so many drafts; of none: plain decoding."""
    kernel_device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    verifier = Verifier.load(NANO_FOLDER, CAPACITY_TOKENS, TAPS, torch.float32, kernel_device)
    weights = draft_weights(draft, Shard(), torch.float32, kernel_device)

    def make(num_drafts: int) -> CycleSpeaker:
        drafter = BlockDrafter(verifier, weights, num_drafts) if num_drafts else NoDrafter(verifier)
        return CycleSpeaker(verifier, drafter)

    return make


def spoken(
    speaker: CycleSpeaker, prompt_T: torch.Tensor, sampling: Sampling, row: int = 0
) -> tuple[Generation, Stopwatch]:
    ids: list[int] = []
    rounds: list[Round] = []
    stopwatch = Stopwatch()
    for ((place, new_ids, counts),) in speaker([prompt_T], sampling, [row_uniforms(0, row)], stopwatch):
        assert place == 0
        ids += new_ids
        rounds += [] if counts is None else [counts]
    return Generation(torch.tensor(ids), tuple(rounds)), stopwatch


def counted(generation: Generation) -> list[tuple[int, int, int, bool]]:
    return [(r.num_proposed, r.accepted_drafts, r.acceptance_length, r.is_cut) for r in generation.rounds]


@pytest.mark.parametrize(("length", "stop_place"), [(1, None), (16, 9), (37, 17)])
def test_greedy_texts_and_rounds_are_the_reference_paths(
    length: int, stop_place: int | None, speaker_of: Make, reference: Target, draft: DraftModel
) -> None:
    """With a stop token that drafts hold, and without."""
    prompt_T = random_ids(4096, length, length)
    free = speculate(reference, draft, prompt_T, Sampling(0.0, 30), row_uniforms(0, 0))
    stops = () if stop_place is None else (int(free.ids_T[stop_place]),)
    sampling = Sampling(0.0, 30, stops)
    expected = speculate(reference, draft, prompt_T, sampling, row_uniforms(0, 0))
    found, stopwatch = spoken(speaker_of(8), prompt_T, sampling)
    assert found.ids_T.tolist() == expected.ids_T.tolist()
    assert counted(found) == counted(expected)
    assert stop_place is None or len(found.ids_T) <= stop_place + 1
    for ours, theirs in zip(found.rounds, expected.rounds, strict=True):
        assert ours.confidence_logits == pytest.approx(theirs.confidence_logits, abs=2e-3)
    parts = {"draft", "verify", "commit", "update", "other"} if torch.cuda.is_available() else {"cycle"}
    assert stopwatch.phase_seconds.keys() == {"prefill"} | parts


def test_without_drafts_it_is_plain_decoding(speaker_of: Make, reference: Target) -> None:
    prompt_T = random_ids(4096, 20, 3)
    (expected_T,) = generate(reference, [prompt_T], Sampling(0.0, 25), [row_uniforms(0, 0)])
    speaker = speaker_of(0)
    found, _ = spoken(speaker, prompt_T, Sampling(0.0, 25))
    committed = int(speaker.verifier.buffers.length_1) - len(prompt_T)
    assert committed == 25, "24 passes, and the one that was under way"
    assert not speaker.is_drafting
    assert found.ids_T.tolist() == expected_T.tolist()
    assert found.rounds == ()


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_drawn_texts_depend_on_their_row_alone(num_drafts: int, speaker_of: Make) -> None:
    prompt_T, speaker, sampling = random_ids(4096, 5, 5), speaker_of(num_drafts), Sampling(1.0, 10)
    first, other, again = (spoken(speaker, prompt_T, sampling, row)[0].ids_T.tolist() for row in (0, 1, 0))
    assert first == again != other
    assert len(first) == len(other) == 10


def test_a_rounds_parts_take_the_place_of_the_whole() -> None:
    phases = {"prefill": 2.0, "cycle": 10.0, "other": 1.0}
    _divide(phases, {"draft": 3.0, "verify": 6.0})
    assert phases == pytest.approx({"prefill": 2.0, "other": 2.0, "draft": 3.0, "verify": 6.0})
    phases = {"prefill": 2.0, "cycle": 6.0}
    _divide(phases, {"draft": 3.0, "verify": 6.0})  # each alone took longer than in the round
    assert phases == pytest.approx({"prefill": 2.0, "other": 0.0, "draft": 2.0, "verify": 4.0})


def test_what_it_cannot_do_is_refused(speaker_of: Make) -> None:
    speaker, prompt_T = speaker_of(8), random_ids(4096, 5)
    with pytest.raises(ConfigError, match="one text at a time, got 2"):
        next(speaker([prompt_T] * 2, Sampling(0.0, 5), [row_uniforms(0, 0)] * 2, Stopwatch()))
    for sampling in (Sampling(1.0, 5, top_k=3), Sampling(1.0, 5, top_p=0.9)):
        with pytest.raises(ConfigError, match="top_k must be 0 and top_p 1"):
            spoken(speaker, prompt_T, sampling)
    with pytest.raises(ConfigError, match="room for"):
        spoken(speaker, random_ids(4096, CAPACITY_TOKENS - 4), Sampling(0.0, 50))
