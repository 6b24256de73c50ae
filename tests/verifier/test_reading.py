"""Reading packed sequences: the plain target's taps and states, packed as separate, in pieces as whole, over ranks."""

from pathlib import Path

import pytest
import torch
from verifying import Pair, random_ids

from dspark.errors import ConfigError
from dspark.target.model import LingModel
from dspark.types import TargetOutput
from dspark.verifier import Shard, Verifier, load_weights
from dspark.verifier.plan import reading_bytes
from dspark.verifier.reading import passes, read_packed

LENGTHS = (1, 17, 40, 16)


def assert_near(ours: TargetOutput, theirs: TargetOutput, tolerance: float = 1e-5) -> None:
    if ours.taps_NLD.is_cuda:
        tolerance *= 3  # chains of multiply-adds against torch's sums
    for x, y in ((ours.taps_NLD, theirs.taps_NLD), (ours.last_hidden_ND, theirs.last_hidden_ND)):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_packed_sequences_are_the_targets(verifier: Verifier, target: LingModel) -> None:
    ids = [random_ids(target.vocab_size, length, seed=length) for length in LENGTHS]
    found = read_packed(verifier.weights, ids, target.target_layer_ids)
    assert found.taps_NLD.shape == (sum(LENGTHS), 2, target.hidden_size)
    assert_near(found, target.prefill(ids)[1])
    assert read_packed(verifier.weights, ids).taps_NLD.shape == (sum(LENGTHS), 0, target.hidden_size)


@torch.no_grad()
def test_packed_sequences_are_the_separate_ones(verifier: Verifier) -> None:
    ids = [random_ids(verifier.vocab_size, length, seed=length) for length in LENGTHS]
    together = read_packed(verifier.weights, ids, (0, 3))
    alone = [read_packed(verifier.weights, [ids_T], (0, 3)) for ids_T in ids]
    taps_NLD, hidden_ND = (torch.cat([getattr(x, name) for x in alone]) for name in ("taps_NLD", "last_hidden_ND"))
    assert_near(together, TargetOutput(taps_NLD, hidden_ND))


def read_by_windows(verifier: Verifier, ids_T: torch.Tensor) -> None:
    cache, _ = verifier.prefill([ids_T[:1]])
    for window_T in ids_T[1:].split(16):
        verifier.verify(window_T[None], cache)
        verifier.commit(cache, torch.tensor([len(window_T)]))


@pytest.mark.parametrize("piece_tokens", [8192, 19, 2])
@torch.no_grad()
def test_prefill_whole_or_in_pieces_leaves_the_memory_that_windows_leave(
    verifier: Verifier, piece_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("engine", "reading.passes"):
        monkeypatch.setattr(f"dspark.verifier.{module}.PIECE_TOKENS", piece_tokens)
    ids_T = random_ids(verifier.vocab_size, 49)
    whole = read_packed(verifier.weights, [ids_T], verifier.target_layer_ids)
    read_by_windows(verifier, ids_T)
    buffers = verifier.buffers
    expected = [tensor.clone() for tensor in (*buffers.memory(), buffers.rows_MJC[:, :49])]
    buffers.rows_MJC.fill_(torch.nan)
    cache, found = verifier.prefill([ids_T])
    assert verifier.most_tokens == int(buffers.length_1) == 49
    assert_near(found, whole, 5e-5)
    for ours, theirs in zip((*buffers.memory(), buffers.rows_MJC[:, :49]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-5, atol=5e-5)
    further_T = random_ids(verifier.vocab_size, 5, seed=1)
    buffers.rows_MJC[:, 49:] = 0
    continued = verifier.verify(further_T[None], cache)
    longer = read_packed(verifier.weights, [torch.cat((ids_T, further_T))], verifier.target_layer_ids)
    assert_near(continued, TargetOutput(longer.taps_NLD[49:], longer.last_hidden_ND[49:]), 5e-5)


@torch.no_grad()
def test_ranks_add_their_partial_sums(folder: Path, verifier: Verifier) -> None:
    ids = [random_ids(verifier.vocab_size, length, seed=length) for length in (3, 20)]
    whole, pair = read_packed(verifier.weights, ids, (0, 3)), Pair()

    def read(rank: int) -> TargetOutput:
        weights = load_weights(folder, Shard(rank, 2), torch.float32, verifier.weights.device)
        return read_packed(weights, ids, (0, 3), ranks=pair)

    for output in pair.run(torch.no_grad()(read)):
        assert_near(output, whole)


def test_what_cannot_be_read_is_refused(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    ids_T = random_ids(verifier.vocab_size, 4)
    with pytest.raises(ValueError, match=r"lengths \[4, 0\], expected at least one token each"):
        read_packed(verifier.weights, [ids_T, ids_T[:0]])
    with pytest.raises(ValueError, match=r"lengths \[\], expected at least one token each"):
        read_packed(verifier.weights, [])
    with pytest.raises(AssertionError, match="hold one sequence"):
        read_packed(verifier.weights, [ids_T, ids_T], (), verifier.buffers)
    needed = reading_bytes(verifier.config, Shard(), 4, torch.float32)
    monkeypatch.setattr(passes, "free_bytes", lambda device: needed - 1)
    with pytest.raises(ConfigError, match=r"reading 4 tokens together takes .* read fewer at a time"):
        read_packed(verifier.weights, [ids_T])
