"""The prediction layer on the engine drafts what a loop over the plain layer drafts, and texts stay the target's."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published import FLASH, TINY
from speculating import cycle_text
from tiny import write_tiny_ling
from tokenizers import Tokenizer
from toy import chi_square_p_value
from verifier.drafting.test_block import update
from verifier.drafting.test_cycle import HostReads, flat, law
from verifier.test_kernels import KERNELS
from verifying import Pair, random_ids

from data.nano.learning import mtp_hidden
from dspark.decode.sampling import Sampling, token_probs
from dspark.errors import ConfigError, DraftMismatchError
from dspark.target.config import load_target_config, parse_target_config
from dspark.target.loading import NANO_FOLDER, load_target
from dspark.target.model import LingModel, tensor_shapes
from dspark.types import TargetOutput
from dspark.verifier import MtpWeights, Shard, Step, Verifier, load_mtp, load_weights, make_plan, random_mtp
from dspark.verifier.blocks import Window
from dspark.verifier.calls import call
from dspark.verifier.drafting import Cycle, Drafts, MtpDrafter, Sampler, mtp
from dspark.verifier.timing import call_bytes, record_step
from dspark.verifier.weights import allocate_mtp, num_bytes, tensors_of

VOCAB = 320
COUNTS = (16, 11, 1, 6, 3, 1, 2, 5)


@pytest.fixture(scope="module", params=[None, 12], ids=["tiny", "low-rank queries"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"num_hidden_layers": 3, "q_lora_rank": request.param}
    return write_tiny_ling(tmp_path_factory.mktemp("mtp"), **changes)


@pytest.fixture(scope="module")
def target(folder: Path) -> LingModel:
    target = load_target(folder)
    assert isinstance(target, LingModel)
    return target


def drafter_of(folder: Path, num_drafts: int, shard: Shard = Shard(), device: Any = "cpu") -> MtpDrafter:  # noqa: B008
    """Its memory is NaN where nothing was written."""
    verifier = Verifier(load_weights(folder, shard, torch.float32, device), 128)
    drafter = MtpDrafter(verifier, load_mtp(folder, shard, torch.float32, device), num_drafts)
    drafter.rows_1JC.fill_(torch.nan)
    drafter.hidden_JD.fill_(torch.nan)
    return drafter


@pytest.fixture
def drafter(folder: Path, kernel_device: torch.device) -> MtpDrafter:
    return drafter_of(folder, 5, device=kernel_device)


class Text:
    """What was committed: the target's last hidden states, and the id after each."""

    def __init__(self) -> None:
        self.hidden, self.next_ids = torch.empty(0, 32), torch.empty(0, dtype=torch.int64)

    def commit(self, drafter: MtpDrafter, count: int, num_tokens: int, seed: int) -> None:
        """A window of which so many tokens are kept, read by the drafter as in a cycle; what is refused is noise."""
        generator, device = torch.Generator().manual_seed(seed), drafter.verifier.weights.device
        hidden_TD = torch.randn(num_tokens, 32, generator=generator)
        ids_T = torch.randint(VOCAB, (num_tokens,), generator=generator)
        self.hidden = torch.cat((self.hidden, hidden_TD[:count]))
        self.next_ids = torch.cat((self.next_ids, ids_T[1:count], ids_T[:1]))
        drafter.verifier.ids_T[:num_tokens] = ids_T.to(device)
        update(drafter, Window(hidden_TD[:, None].to(device), hidden_TD.to(device), None), count)

    @torch.no_grad()
    def propose(self, target: LingModel, ids: list[int] | None, num_drafts: int) -> tuple[list[int], torch.Tensor]:
        """Drafts by whole passes over text and drafts, and their logits; given ids take the place of the best."""
        hidden, next_ids, logits = self.hidden, self.next_ids, []
        for slot in range(num_drafts):
            last_D = mtp_hidden(target, next_ids, hidden, [len(next_ids)])[-1]
            logits.append(target.logits(last_D))
            new_id = int(logits[-1].argmax()) if ids is None else ids[slot]
            hidden, next_ids = torch.cat((hidden, last_D[None])), torch.cat((next_ids, torch.tensor([new_id])))
        return next_ids[-num_drafts:].tolist(), torch.stack(logits)


@torch.no_grad()
def test_greedy_drafts_are_those_of_a_loop_over_the_plain_layer(target: LingModel, drafter: MtpDrafter) -> None:
    text, ids_T = Text(), drafter.verifier.ids_T
    for seed, count in enumerate(COUNTS):
        text.commit(drafter, count, 16 if seed < 2 else 6, seed)
        anchor_id = int(ids_T[0])
        for _ in range(2):  # drafting again from the same place says the same
            ids_T[1:] = -1
            drafts = drafter.draft(None, call)
            assert ids_T.tolist() == [anchor_id, *text.propose(target, None, 5)[0], *[-1] * 10], count
            assert drafts == Drafts(None, None)


@torch.no_grad()
@pytest.mark.parametrize("num_rows", [1, 16, 40])
def test_a_prompt_taken_in_at_once_is_the_prompt_window_by_window(
    num_rows: int, folder: Path, target: LingModel, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp, "PIECE_TOKENS", 16)
    text, slow, fast = Text(), drafter_of(folder, 5, device=kernel_device), drafter_of(folder, 5, device=kernel_device)
    for seed, start in enumerate(range(0, num_rows, 16)):
        size = min(16, num_rows - start)
        text.commit(slow, size, size, seed)
    prompt = (text.next_ids.to(kernel_device), text.hidden.to(kernel_device))
    fast.begin(prompt[0], TargetOutput(prompt[1][:, None], prompt[1]))
    torch.testing.assert_close(fast.rows_1JC[:, :num_rows], slow.rows_1JC[:, :num_rows], rtol=1e-4, atol=1e-4)
    assert fast.rows_1JC[:, num_rows:].isnan().all()
    fast.verifier.buffers.length_1.fill_(num_rows)
    fast.verifier.ids_T[:1] = text.next_ids[-1]
    fast.draft(None, call)
    assert fast.verifier.ids_T[1:6].tolist() == text.propose(target, None, 5)[0]


@torch.no_grad()
def test_the_rows_of_committed_tokens_are_written_anew_by_what_the_target_said(
    target: LingModel, drafter: MtpDrafter
) -> None:
    """Also those on which drafts have left their own."""
    text, plain = Text(), Text()
    for seed, count in enumerate(COUNTS):
        text.commit(drafter, count, 16 if seed < 2 else 6, seed)
        drafter.draft(None, call)
    length = int(drafter.verifier.buffers.length_1)
    found_JC = drafter.rows_1JC[0, :length].clone()
    drafter.verifier.buffers.length_1.zero_()
    for seed, count in enumerate(COUNTS):  # without drafting
        plain.commit(drafter, count, 16 if seed < 2 else 6, seed)
    torch.testing.assert_close(drafter.rows_1JC[0, :length], found_JC, rtol=1e-5, atol=1e-5)
    assert found_JC.isfinite().all()


@torch.no_grad()
def test_what_lies_behind_the_committed_rows_is_never_read(target: LingModel, drafter: MtpDrafter) -> None:
    text = Text()
    text.commit(drafter, 16, 16, 0)
    text.commit(drafter, 2, 6, 1)
    drafter.draft(None, call)
    expected = drafter.verifier.ids_T.tolist()
    drafter.rows_1JC[:, 18:] = torch.nan
    drafter.hidden_JD[18:] = torch.nan
    drafter.draft(None, call)
    assert drafter.verifier.ids_T.tolist() == expected


@torch.no_grad()
def test_sampled_drafts_follow_the_logits_that_are_kept(target: LingModel, drafter: MtpDrafter) -> None:
    text, temperature, device = Text(), 0.3, drafter.verifier.weights.device
    text.commit(drafter, 9, 16, 3)
    sampler = Sampler(torch.full((1,), 1 / temperature, device=device), torch.Generator(device).manual_seed(0))
    counts_V, probs_V = torch.zeros(VOCAB, dtype=torch.int64), None
    for number in range(200):
        logits_KV = drafter.draft(sampler, call).logits_KV
        assert logits_KV is not None
        ids = drafter.verifier.ids_T[1:6].tolist()
        if number < 5:
            torch.testing.assert_close(logits_KV.cpu(), text.propose(target, ids, 5)[1], rtol=1e-3, atol=1e-3)
        counts_V[ids[0]] += 1
        probs_V = token_probs(logits_KV[0].cpu(), Sampling(temperature, 1))
    assert probs_V is not None
    assert counts_V.count_nonzero() > 10
    assert chi_square_p_value(counts_V, probs_V) > 1e-3


@torch.no_grad()
def test_drafts_on_kernels_are_the_plain_ones(
    folder: Path, target: LingModel, monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device
) -> None:
    drafter = drafter_of(folder, 3, device=kernel_device)
    for public, kernel, names in KERNELS:
        for name in names:
            monkeypatch.setattr(public, name, getattr(kernel, name))
    text = Text()
    for seed, count in enumerate((16, 4, 1)):
        text.commit(drafter, count, 16 if seed == 0 else 4, seed)
        drafter.draft(None, call)
        assert drafter.verifier.ids_T[1:4].tolist() == text.propose(target, None, 3)[0]
    logits_KV = drafter.draft(Sampler(torch.ones(1, device=kernel_device), None), call).logits_KV
    assert logits_KV is not None
    expected_KV = text.propose(target, drafter.verifier.ids_T[1:4].tolist(), 3)[1]
    torch.testing.assert_close(logits_KV.cpu(), expected_KV, rtol=1e-4, atol=1e-4)
    assert not drafter.verifier.buffers.counters.any()


def test_the_shipped_nano_s_layer_is_often_right(kernel_device: torch.device) -> None:
    """It was trained: 1.6 of its drafts stay in the mean of two texts; a wrong row or id would leave none."""
    drafter = drafter_of(NANO_FOLDER, 3, device=kernel_device)
    tokenizer = Tokenizer.from_file(str(NANO_FOLDER / "tokenizer.json"))
    prompt_T = torch.tensor(
        tokenizer.encode("<role>HUMAN</role>Add two numbers.<|role_end|><role>ASSISTANT</role>").ids
    )
    rounds = list(itertools.islice(Cycle(drafter.verifier, drafter).rounds(prompt_T), 1, 25))
    assert sum(map(len, rounds)) / len(rounds) > 2


def plain_text(verifier: Verifier, prompt_T: torch.Tensor, num_tokens: int) -> list[int]:
    _, output = verifier.prefill([prompt_T])
    step = Step(verifier, 1)
    step.verifier.ids_T[: step.num_tokens].copy_(verifier.logits(output.last_hidden_ND[-1:]).argmax(-1))
    ids = [int(step.verifier.ids_T[: step.num_tokens])]
    while len(ids) < num_tokens:
        ids.append(int(step().next_id_1))
    return ids


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_greedy_text_is_that_of_plain_decoding(num_drafts: int, folder: Path, kernel_device: torch.device) -> None:
    drafter = drafter_of(folder, num_drafts, device=kernel_device)
    whole = Cycle(drafter.verifier, drafter)
    for length in (1, 16, 37):
        prompt_T = random_ids(VOCAB, length, length)
        assert cycle_text(whole, prompt_T, 24) == plain_text(drafter.verifier, prompt_T, 24)


@pytest.mark.skipif(torch.cuda.is_available(), reason="follows every cycle from the host")
def test_every_cycle_drafts_from_what_the_target_said_so_far(
    target: LingModel, drafter: MtpDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts forced to be right up to a place, so that every count is seen."""
    verifier, prompt_T, own, seen = drafter.verifier, random_ids(VOCAB, 21), drafter.draft, []
    plain = [*prompt_T.tolist(), *plain_text(verifier, prompt_T, 50)]

    def forced(sampler: Any, call: Callable[..., Any]) -> Drafts:
        drafts = own(sampler, call)
        length, good = int(verifier.buffers.length_1), len(seen) % 6
        text = Text()
        text.hidden = target.prefill([torch.tensor(plain[:length])])[1].last_hidden_ND
        text.next_ids = torch.tensor(plain[1 : length + 1])
        assert verifier.ids_T[:6].tolist() == [plain[length], *text.propose(target, None, 5)[0]]
        ids_K = torch.tensor(plain[length + 1 : length + 6])
        ids_K[good:] = (ids_K[good:] + 1) % VOCAB
        verifier.ids_T[1:6] = ids_K
        seen.append(good)
        return drafts

    monkeypatch.setattr(drafter, "draft", forced)
    rounds = list(itertools.islice(Cycle(verifier, drafter).rounds(prompt_T), 8))
    assert [len(ids) for ids in rounds] == [1, *range(1, 7), 1]
    assert flat(rounds) == plain[21 : 21 + len(flat(rounds))]


@torch.no_grad()
def test_a_layer_that_knows_the_target_is_always_right(folder: Path, kernel_device: torch.device) -> None:
    """The blocks of both say nothing, so the next token depends on the last one only, and the layer sees that one."""
    drafter = drafter_of(folder, 5, device=kernel_device)
    verifier, weights = drafter.verifier, drafter.weights
    for layer in (*verifier.weights.layers, weights.layer):
        layer.experts.down_XDI.zero_()
        if layer.latent is not None:
            layer.latent.out_DC.zero_()
    assert verifier.weights.linear is not None
    verifier.weights.linear.out_LDC.zero_()
    weights.eh_DC.copy_(torch.eye(32, 64))
    weights.enorm_D.fill_(1)
    weights.norm_D.copy_(verifier.weights.norm_D)
    rounds = list(itertools.islice(Cycle(verifier, drafter).rounds(random_ids(VOCAB, 7)), 6))
    assert [len(ids) for ids in rounds] == [1, *[6] * 5]


def test_the_drafts_of_a_cycle_are_drawn_apart(tmp_path: Path) -> None:
    drafter = drafter_of(write_tiny_ling(tmp_path, vocab_size=4, num_hidden_layers=3), 2)
    whole = Cycle(drafter.verifier, drafter, 2.0, torch.Generator().manual_seed(1))
    whole.begin(torch.tensor([1, 2, 0]))
    counts_VV, probs_VV = torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4)
    for _ in range(400):
        logits_KV = whole.draft(call).logits_KV
        assert logits_KV is not None
        first_id, second_id = drafter.verifier.ids_T[1:3].tolist()
        first_V, second_V = (logits_KV / 2.0).softmax(-1)
        probs_VV[first_id] = first_V[first_id] * second_V
        counts_VV[first_id, second_id] += 1
    assert chi_square_p_value(counts_VV.flatten(), probs_VV.flatten()) > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rank_alone_can_be_measured(temperature: float, folder: Path) -> None:
    drafter = drafter_of(folder, 3, Shard(1, 2))
    rounds = itertools.islice(Cycle(drafter.verifier, drafter, temperature).rounds(random_ids(VOCAB, 5)), 4)
    assert all(0 <= new_id < VOCAB for new_id in flat(list(rounds)))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sampled_text_has_the_law_of_the_target(
    temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The greedy one is the planted fault: it has another law."""
    drafter = drafter_of(write_tiny_ling(tmp_path, vocab_size=4, num_hidden_layers=3), 2)
    whole = Cycle(drafter.verifier, drafter, temperature, torch.Generator().manual_seed(5))
    prompt_T, counts_N = torch.tensor([2, 0, 1]), torch.zeros(64, dtype=torch.int64)
    for _ in range(200 if temperature else 20):
        first, second, third = cycle_text(whole, prompt_T, 3)
        counts_N[first * 16 + second * 4 + third] += 1
    p_value = chi_square_p_value(counts_N, torch.tensor(list(law(drafter.verifier, prompt_T, 0.8))))
    assert p_value > 1e-3 if temperature else p_value < 1e-4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cycles_are_enqueued_without_waiting_and_can_be_run_again(temperature: float, drafter: MtpDrafter) -> None:
    whole = Cycle(drafter.verifier, drafter, temperature)
    whole.begin(random_ids(VOCAB, 21))
    with HostReads() as reads:
        for _ in range(2):
            whole._pending.popleft()
            whole.enqueue()
    assert not reads.found
    if temperature == 0:
        stages, output = record_step(whole)
        assert torch.equal(whole.captured().result_N, output.result_N)
        own = {name: len(calls) for name, calls in stages.items() if name.startswith(("Draft", "Update"))}
        assert own["Draft MLA attention"] == own["Draft MoE up"] == own["Draft head"] - 1 == 4
        assert own["Update MLA attention"] == own["Update MoE up"] == 1
        assert all(call_bytes(one, 21) > 0 for name in own for one in stages[name])


@pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks in two threads, on the CPU")
@pytest.mark.parametrize("is_greedy", [True, False])
def test_two_ranks_draft_what_one_drafts(is_greedy: bool, folder: Path) -> None:
    @torch.no_grad()
    def run(drafter: MtpDrafter) -> tuple[list[int], Drafts]:
        sampler = None if is_greedy else Sampler(torch.full((1,), 2.0), torch.Generator().manual_seed(3))
        text, hidden_ND = Text(), torch.randn(20, 32, generator=torch.Generator().manual_seed(9))
        drafter.begin(random_ids(VOCAB, 20), TargetOutput(hidden_ND[:, None], hidden_ND))
        drafter.verifier.buffers.length_1.fill_(20)
        drafter.draft(sampler, call)
        for seed, count in enumerate(COUNTS[:3]):
            text.commit(drafter, count, 16, seed)
            drafts = drafter.draft(sampler, call)
        return drafter.verifier.ids_T.tolist(), drafts

    expected = run(drafter_of(folder, 4))
    pair, drafters = Pair(), [drafter_of(folder, 4, Shard(rank, 2)) for rank in range(2)]
    for drafter in drafters:
        drafter.verifier.ranks = pair
    for ids, drafts in pair.run(lambda rank: run(drafters[rank])):
        assert ids == expected[0]
        torch.testing.assert_close(drafts.logits_KV, expected[1].logits_KV, rtol=1e-4, atol=1e-4)


def test_every_tensor_of_the_layer_is_placed_once_and_a_rank_holds_its_part(folder: Path) -> None:
    config = load_target_config(folder)
    placed: list[str] = []
    allocate_mtp(config, Shard(1, 2), torch.bfloat16, "meta", lambda _, names: placed.extend(names))
    assert sorted(placed) == sorted(name for name in tensor_shapes(config) if is_mtp(name, config))
    whole = load_mtp(folder, Shard(), torch.float32)
    *routed, shared = whole.layer.experts.limits_X.tolist()
    assert (set(routed), shared) == ({torch.inf}, config.share_expert_swiglu_limit_list[3])
    halves = [load_mtp(folder, Shard(rank, 2), torch.float32) for rank in range(2)]
    for half in halves:
        assert torch.equal(half.eh_DC, whole.eh_DC)
    down_XDI = torch.cat([half.layer.experts.down_XDI for half in halves], 2)
    assert torch.equal(down_XDI, whole.layer.experts.down_XDI)


def is_mtp(name: str, config: Any) -> bool:
    return name.startswith(f"model.layers.{config.num_hidden_layers}.")


def test_a_quarter_of_flash_s_layer_has_the_published_size_and_is_planned_for() -> None:
    config, shard = parse_target_config(FLASH), Shard(0, 4)
    weights = allocate_mtp(config, shard, torch.bfloat16, "meta")
    assert num_bytes(weights) == 1_559_957_504 + weights.layer.experts.limits_X.nbytes  # specs/ling-3.0.md section 10
    plain, made = (make_plan(config, shard, 8192, torch.bfloat16, has_mtp=has_mtp) for has_mtp in (False, True))
    assert made.weight_bytes - plain.weight_bytes == num_bytes(weights)
    assert made.cache_bytes - plain.cache_bytes == (8192 + 16) * 1152


def test_random_layers_are_those_of_the_seed_and_drafts_of_them_differ(folder: Path) -> None:
    config = load_target_config(folder)
    first, again, other = (random_mtp(config, Shard(), torch.float32, seed) for seed in (3, 3, 4))
    for ours, theirs in zip(tensors_of(first), tensors_of(again), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(first.eh_DC, other.eh_DC)
    assert all(tensor.isfinite().all() for tensor in tensors_of(first) if tensor is not first.layer.experts.limits_X)
    drafter = MtpDrafter(drafter_of(folder, 1).verifier, first, 3)
    texts = []
    for seed in range(3):
        with torch.no_grad():
            Text().commit(drafter, 5, 9, seed)
            drafter.draft(None, call)
        texts.append(tuple(drafter.verifier.ids_T[1:4].tolist()))
    assert len(set(texts)) == 3


def test_a_layer_that_does_not_fit_the_verifier_is_refused(folder: Path) -> None:
    verifier = drafter_of(folder, 1).verifier
    half: MtpWeights = load_mtp(folder, Shard(0, 2), torch.float32)
    with pytest.raises(DraftMismatchError, match=r"rank=0, world_size=2.*rank=0, world_size=1"):
        MtpDrafter(verifier, half, 3)
    for num_drafts in (0, 16):
        with pytest.raises(DraftMismatchError, match=f"drafts 1 to 15 tokens, found {num_drafts}"):
            MtpDrafter(verifier, load_mtp(folder, Shard(), torch.float32), num_drafts)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers is 0"):
        allocate_mtp(parse_target_config(TINY), Shard(), torch.bfloat16, "meta")
