"""Cycles commit what plain speculative decoding commits, are never waited for, and are read one late."""

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from speculating import cycle_text, speculate
from tiny import write_tiny_ling
from torch.utils._python_dispatch import TorchDispatchMode
from toy import chi_square_p_value
from verifying import CAPACITY_TOKENS, random_ids

from dspark.config import DraftConfig
from dspark.decode.sampling import Sampling
from dspark.draft.model import DraftModel
from dspark.errors import CheckpointError, ConfigError, DraftMismatchError
from dspark.kernels import head, projection
from dspark.target.loading import NANO_FOLDER, load_target
from dspark.verifier import Shard, Verifier
from dspark.verifier.calls import call
from dspark.verifier.drafting import BlockDrafter, Cycle, cycle, draft_weights
from dspark.verifier.timing import call_bytes, record_step

NEW_TOKENS = 40
Make = Callable[..., BlockDrafter]


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    return [random_ids(4096, length, length) for length in (1, 16, 37)]  # of no, a whole, some whole windows


def flat(rounds: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(rounds))


@pytest.mark.parametrize("fields", [None, {"markov_head_type": "gated"}, {"markov_head_type": "rnn"}], ids=str)
def test_greedy_text_and_rounds_are_those_of_plain_speculation(
    fields: dict[str, Any] | None,
    draft: DraftModel,
    random_draft: Callable[..., DraftModel],
    drafter_of: Make,
    prompts: list[torch.Tensor],
) -> None:
    draft = draft if fields is None else random_draft(**fields)
    drafter = drafter_of(draft)
    device = drafter.verifier.weights.device
    target = load_target(NANO_FOLDER, target_layer_ids=draft.config.target_layer_ids, device=device)
    whole, lengths = Cycle(drafter.verifier, drafter), set()
    num_new = 12 if fields else NEW_TOKENS  # random drafts are hardly ever right: a round a token
    for prompt_T in prompts[1:] if fields else prompts:
        expected = speculate(target, draft, prompt_T.to(device), Sampling(0.0, num_new), lambda: 0.5)
        assert cycle_text(whole, prompt_T, num_new) == expected.ids_T.tolist()
        (first, *rounds) = itertools.islice(whole.rounds(prompt_T), 1 + len(expected.rounds))
        assert first == expected.ids_T[:1].tolist()
        assert [len(ids) for ids in rounds] == [counts.acceptance_length for counts in expected.rounds]
        lengths |= {len(ids) for ids in rounds}
    assert fields or len(lengths) > 4, "many counts were seen"


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_the_text_does_not_depend_on_the_width(
    num_drafts: int, draft: DraftModel, drafter_of: Make, prompts: list[torch.Tensor]
) -> None:
    texts = []
    for width in (8, num_drafts):
        drafter = drafter_of(draft, width)
        rounds = list(itertools.islice(Cycle(drafter.verifier, drafter).rounds(prompts[1]), NEW_TOKENS))
        assert max(map(len, rounds)) <= width + 1
        texts.append(flat(rounds)[:NEW_TOKENS])
    assert texts[0] == texts[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="forces drafts from the host")
def test_every_count_of_a_window_can_be_committed(
    draft: DraftModel, drafter_of: Make, prompts: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that are right up to a place, then wrong, for every place; then the drafter's own again."""
    drafter = drafter_of(draft)
    verifier, seen = drafter.verifier, []
    whole = Cycle(verifier, drafter)
    plain = flat(list(itertools.islice(whole.rounds(prompts[2]), 70)))
    own = drafter.draft

    def forced(sampler: Any, call: Any) -> Any:
        drafts = own(sampler, call)
        place = int(verifier.buffers.length_1) - len(prompts[2]) + 1
        good = len(seen) % 9
        ids_K = torch.tensor(plain[place : place + 8])
        ids_K[good:] = (ids_K[good:] + 1) % 4096
        verifier.ids_T[1:9] = ids_K
        seen.append(good)
        return drafts

    whole._pending.clear()
    monkeypatch.setattr(drafter, "draft", forced)
    forced_cycle = Cycle(verifier, drafter)
    rounds = list(itertools.islice(forced_cycle.rounds(prompts[2]), 10))
    assert [len(ids) for ids in rounds] == [1, *range(1, 10)]
    monkeypatch.undo()
    for _ in range(2):
        forced_cycle.enqueue()
        rounds.append(forced_cycle.receive())
    text = flat(rounds)
    assert text == plain[: len(text)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at every update from the host")
def test_an_update_finds_the_id_that_follows_every_committed_row(
    draft: DraftModel, drafter_of: Make, prompts: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = drafter_of(draft)
    whole, own, after = Cycle(drafter.verifier, drafter), drafter.update, dict[int, int]()
    monkeypatch.setattr(drafter, "begin", lambda next_ids_N, output: after.update(enumerate(next_ids_N.tolist())))

    def update(window: Any, start_1: torch.Tensor, count_1: torch.Tensor, call: Any) -> None:
        next_id, *rest = drafter.verifier.ids_T.tolist()
        following = [*rest[: int(count_1) - 1], next_id]
        assert not set(after) & {int(start_1) + place for place in range(len(following))}
        after.update({int(start_1) + place: new_id for place, new_id in enumerate(following)})
        own(window, start_1, count_1, call)

    monkeypatch.setattr(drafter, "update", update)
    rounds = whole.rounds(prompts[2])
    text = [*prompts[2].tolist(), *flat([next(rounds) for _ in range(8)]), *whole.receive()]
    assert after == dict(enumerate(text[1:]))


def test_the_reserved_length_is_exact_once_all_is_read(
    draft: DraftModel, drafter_of: Make, prompts: list[torch.Tensor]
) -> None:
    drafter = drafter_of(draft)
    verifier, whole = drafter.verifier, Cycle(drafter.verifier, drafter)
    rounds = whole.rounds(prompts[1])
    for _ in range(5):
        next(rounds)
    assert verifier.most_tokens >= int(verifier.buffers.length_1)
    whole.receive()
    assert verifier.most_tokens == int(verifier.buffers.length_1)
    assert next(whole.rounds(prompts[1])) == next(whole.rounds(prompts[1])), "a new text forgets what was under way"


def test_rounds_end_where_the_memory_ends(draft: DraftModel, drafter_of: Make) -> None:
    drafter = drafter_of(draft)
    length_1 = drafter.verifier.buffers.length_1
    rounds, seen = Cycle(drafter.verifier, drafter).rounds(random_ids(4096, CAPACITY_TOKENS - 40)), []

    def read_all() -> None:
        for ids in rounds:
            assert drafter.verifier.most_tokens >= int(length_1)
            seen.append(ids)

    with pytest.raises(ConfigError, match="room for 256 tokens"):
        read_all()
    assert CAPACITY_TOKENS - 9 < int(length_1) <= CAPACITY_TOKENS
    assert len(flat(seen)) > 20


def test_a_cycle_is_enqueued_before_the_one_before_is_read(
    draft: DraftModel, drafter_of: Make, prompts: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = drafter_of(draft)
    whole, seen = Cycle(drafter.verifier, drafter), []
    enqueue, receive = whole.enqueue, whole.receive
    monkeypatch.setattr(whole, "enqueue", lambda: (seen.append("enqueue"), enqueue())[1])
    monkeypatch.setattr(whole, "receive", lambda: (seen.append("read"), receive())[1])
    rounds = whole.rounds(prompts[0])
    for _ in range(3):
        next(rounds)
    assert seen == ["enqueue", "read"] * 3, "the first is that of the prefill"
    assert len(whole._pending) == 1


class HostReads(TorchDispatchMode):
    """Counts what reads the device from the host, but for the plain references of kernels, which a GPU does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"}:
            frame, files = sys._getframe(), set()
            while frame is not None:
                files.add(Path(frame.f_code.co_filename))
                frame = frame.f_back
            if not any(file.name == "reference.py" and "kernels" in file.parts for file in files):
                self.found.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cycles_are_enqueued_without_waiting_for_the_device(
    temperature: float, draft: DraftModel, drafter_of: Make, prompts: list[torch.Tensor]
) -> None:
    drafter = drafter_of(draft)
    device = drafter.verifier.weights.device
    whole = Cycle(drafter.verifier, drafter, temperature, torch.Generator(device).manual_seed(0))
    whole.begin(prompts[0])
    whole.enqueue()
    whole.receive()
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with HostReads() as reads:
            for _ in range(3):
                whole._pending.popleft()  # unread: reading is what the host may wait for
                whole.enqueue()
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert not reads.found
    with HostReads() as reads:
        int(drafter.verifier.buffers.length_1)
    assert reads.found, "the count does count"


def test_recorded_calls_put_the_memory_back_and_name_their_stages(
    draft: DraftModel, drafter_of: Make, prompts: list[torch.Tensor]
) -> None:
    drafter = drafter_of(draft)
    whole = Cycle(drafter.verifier, drafter)
    whole.begin(prompts[2])
    before = [tensor.clone() for tensor in whole.memory()]
    stages, output = record_step(whole)
    for ours, theirs in zip(whole.memory(), before, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(whole.captured().result_N, output.result_N)
    assert len(stages["Draft Markov step"]) == 8
    assert len(stages["Context rows"]) == len(stages["Draft attention"]) == 5
    attend = stages["Draft attention"][0]
    assert call_bytes(attend, 37) == attend.args[0].nbytes + 2 * (37 + 8) * 256 * 4
    step = stages["Draft Markov step"][0]
    assert call_bytes(step, 37) == 4096 * 4 * (1 + 128)


VOCAB, TEXT = 4, 3


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Verifier, DraftModel]:
    """A target of four tokens and a draft that knows nothing of it."""
    folder = write_tiny_ling(tmp_path_factory.mktemp("toy"), vocab_size=VOCAB, num_hidden_layers=3)
    verifier = Verifier.load(folder, 64, (0, 1), torch.float32, "cpu")
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    widths = {"intermediate_size": 8, "max_position_embeddings": 64, "markov_rank": 4, "block_size": 2}
    target = {"vocab_size": VOCAB, "hidden_size": 32, "num_target_layers": 3, "target_layer_ids": (0, 1)}
    draft = DraftModel(DraftConfig(**(shape | widths | target), mask_token_id=3))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
    return verifier, draft


def law(verifier: Verifier, prompt_T: torch.Tensor, temperature: float) -> Iterator[float]:
    """The probability of every text, in order."""
    for text in itertools.product(range(VOCAB), repeat=TEXT):
        _, output = verifier.prefill([torch.cat((prompt_T, torch.tensor(text)))])
        logits_NV = verifier.logits(output.last_hidden_ND[len(prompt_T) - 1 : -1])
        probs_NV = (logits_NV.double() / temperature).softmax(-1)
        yield math.prod(float(probs_V[new_id]) for probs_V, new_id in zip(probs_NV, text, strict=True))


@pytest.mark.parametrize("is_broken", [False, True])
def test_sampled_text_has_the_law_of_the_target(
    is_broken: bool, toy: tuple[Verifier, DraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, draft = toy
    if is_broken:  # every draft stays
        monkeypatch.setattr(cycle, "accept", lambda ids_T, _, *rest: accept_all(ids_T, *rest))
    prompt_T, temperature = torch.tensor([2, 0, 1]), 0.7
    drafter = BlockDrafter(verifier, draft_weights(draft, Shard(), torch.float32), 2)
    whole = Cycle(verifier, drafter, temperature, torch.Generator().manual_seed(5))
    counts_N = torch.zeros(VOCAB**TEXT, dtype=torch.int64)
    for _ in range(100 if is_broken else 300):
        text = cycle_text(whole, prompt_T, TEXT)
        counts_N[sum(new_id * VOCAB ** (TEXT - 1 - place) for place, new_id in enumerate(text))] += 1
    p_value = chi_square_p_value(counts_N, torch.tensor(list(law(verifier, prompt_T, temperature))))
    assert p_value < 1e-4 if is_broken else p_value > 1e-3


def test_the_drafts_of_a_block_are_drawn_apart(toy: tuple[Verifier, DraftModel]) -> None:
    verifier, draft = toy
    drafter = BlockDrafter(verifier, draft_weights(draft, Shard(), torch.float32), 2)
    whole = Cycle(verifier, drafter, 2.0, torch.Generator().manual_seed(1))
    whole.begin(torch.tensor([1, 2, 0]))
    counts_VV, probs_VV = torch.zeros(VOCAB, VOCAB, dtype=torch.int64), torch.zeros(VOCAB, VOCAB)
    for _ in range(500):
        logits_KV = whole.draft(call).logits_KV
        assert logits_KV is not None
        first_id, second_id = verifier.ids_T[1:3].tolist()
        first_V, second_V = (logits_KV / 2.0).softmax(-1)
        probs_VV[first_id] = first_V[first_id] * second_V
        counts_VV[first_id, second_id] += 1
    assert chi_square_p_value(counts_VV.flatten(), probs_VV.flatten()) > 1e-3


def accept_all(ids_T: torch.Tensor, target_TV: torch.Tensor, inverse_1: torch.Tensor, u_T: torch.Tensor) -> Any:
    probs_V = (target_TV[-1] * inverse_1).softmax(-1)
    return torch.tensor([len(ids_T)]), torch.searchsorted(probs_V.cumsum(0), u_T[-1:].float()).clamp(max=VOCAB - 1)


def test_a_low_temperature_is_greedy_and_a_seed_is_a_text(
    draft: DraftModel, drafter_of: Make, prompts: list[torch.Tensor]
) -> None:
    drafter = drafter_of(draft)
    device = drafter.verifier.weights.device

    def write(temperature: float, seed: int) -> list[int]:
        generator = torch.Generator(device).manual_seed(seed)
        whole = Cycle(drafter.verifier, drafter, temperature, generator)
        return cycle_text(whole, prompts[1], NEW_TOKENS)

    assert write(1e-4, 0) == write(0.0, 0)
    assert write(1.0, 1) == write(1.0, 1) != write(1.0, 2)


def test_a_text_whose_place_another_has_taken_does_not_go_on(
    draft: DraftModel, drafter_of: Make, prompts: list[torch.Tensor]
) -> None:
    drafter = drafter_of(draft)
    whole = Cycle(drafter.verifier, drafter)
    with pytest.raises(ValueError, match="replaced"):
        whole.enqueue()
    with pytest.raises(ValueError, match="no result"):
        whole.receive()
    old, new = whole.rounds(prompts[0]), whole.rounds(prompts[1])
    next(old), next(new)
    with pytest.raises(ValueError, match="replaced"):
        next(old)
    assert next(new)
    whole.enqueue()
    length = drafter.verifier.buffers.length_1.clone()
    with pytest.raises(ValueError, match="third"):
        whole.enqueue()
    assert torch.equal(drafter.verifier.buffers.length_1, length)


def test_what_a_cycle_cannot_mean_is_refused(draft: DraftModel, drafter_of: Make) -> None:
    drafter = drafter_of(draft)
    for temperature in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="temperature"):
            Cycle(drafter.verifier, drafter, temperature)
    other = Verifier(drafter.verifier.weights, CAPACITY_TOKENS, draft.config.target_layer_ids)
    with pytest.raises(DraftMismatchError, match="another verifier"):
        Cycle(other, drafter)
    for shard, dtype in ((Shard(0, 2), torch.float32), (Shard(), torch.bfloat16)):
        with pytest.raises(DraftMismatchError, match="part and dtype"):
            BlockDrafter(drafter.verifier, draft_weights(draft, shard, dtype, other.weights.device), 8)


def test_a_damaged_target_gives_no_text(draft: DraftModel, drafter_of: Make, prompts: list[torch.Tensor]) -> None:
    drafter = drafter_of(draft)
    drafter.verifier.weights.layers[3].input_norm_D[5] = torch.nan
    with pytest.raises(CheckpointError, match="not numbers"):
        next(Cycle(drafter.verifier, drafter).rounds(prompts[0]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompts_last_logits_are_computed_once(
    temperature: float,
    draft: DraftModel,
    drafter_of: Make,
    prompts: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter, heads = drafter_of(draft), []
    cycle = Cycle(drafter.verifier, drafter, temperature)

    def counted(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if args[1] is drafter.verifier.weights.head_VD:
            heads.append(len(args[0]))
        return function(*args, **options)

    for module, name in ((projection, "project"), (head, "greedy")):
        monkeypatch.setattr(module, name, partial(counted, getattr(module, name)))
    cycle.begin(prompts[0])
    assert heads == [1]
