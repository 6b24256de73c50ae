"""A target that only reads: the plain target's states and logits on 1, 2 and 4 ranks, whatever else is in the pack."""

import pytest
import torch
from verifying import Pair, random_ids

from dspark.errors import ConfigError, RankError
from dspark.target.config import load_target_config
from dspark.target.loading import NANO_FOLDER, load_target, target_facts
from dspark.verifier import PackedReader, Shard
from dspark.verifier.plan import make_reading_plan
from dspark.verifier.ranks import Ranks
from dspark.verifier.reading import packed
from dspark.verifier.weights import num_bytes

LENGTHS, LAYERS = (1, 17, 40, 16), (3, 0)
VOCAB_SIZE = target_facts(NANO_FOLDER).vocab_size
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}


def pack() -> list[torch.Tensor]:
    return [random_ids(VOCAB_SIZE, length, seed=length) for length in LENGTHS]


def say(reader: PackedReader, ids: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    output = reader.prefill(ids)[1]
    return output.taps_NLD, output.last_hidden_ND, reader.logits(output.last_hidden_ND)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@torch.no_grad()
def test_a_pack_is_what_the_target_says_on_every_rank(world_size: int, dtype: torch.dtype) -> None:
    target, pair = load_target(NANO_FOLDER, target_layer_ids=LAYERS, dtype=dtype), Pair(world_size)

    @torch.no_grad()
    def work(_: int) -> tuple[torch.Tensor, ...]:
        reader = PackedReader.load(NANO_FOLDER, sum(LENGTHS), LAYERS, dtype, "cpu", pair)
        return say(reader, pack())

    theirs = target.prefill(pack())[1]
    expected = (theirs.taps_NLD, theirs.last_hidden_ND, target.logits(theirs.last_hidden_ND))
    assert expected[0].shape == (sum(LENGTHS), 2, target.hidden_size)
    for found in pair.run(work):
        for ours, right in zip(found, expected, strict=True):
            assert ours.dtype == right.dtype == dtype
            torch.testing.assert_close(ours, right, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("neighbours", [(), (40,), (1, 90)])
@torch.no_grad()
def test_a_sequence_knows_nothing_of_its_neighbours(neighbours: tuple[int, ...]) -> None:
    reader = PackedReader.load(NANO_FOLDER, 256, LAYERS, torch.float64, "cpu")
    own_T, others = random_ids(VOCAB_SIZE, 25), [random_ids(VOCAB_SIZE, n, seed=n) for n in neighbours]
    expected = say(reader, [own_T])
    for before in range(len(others) + 1):
        start = sum(neighbours[:before])
        found = say(reader, [*others[:before], own_T, *others[before:]])
        for ours, right in zip(found, expected, strict=True):
            torch.testing.assert_close(ours[start : start + len(own_T)], right, rtol=1e-10, atol=1e-10)


def test_nothing_is_kept_of_what_was_read() -> None:
    reader = PackedReader.load(NANO_FOLDER, 8, (), torch.float32, "cpu")
    assert reader.prefill([torch.tensor([1, 2])])[0] is None
    assert not hasattr(reader, "verify")


def test_weights_or_a_pack_that_do_not_fit_are_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (load_target_config(NANO_FOLDER), Shard(), 512, torch.float32, "cpu", 2)
    needed = make_reading_plan(*sizes).total_bytes
    monkeypatch.setattr(packed, "free_bytes", lambda device: needed)
    reader = PackedReader.load(NANO_FOLDER, 512, LAYERS, torch.float32, "cpu")
    assert make_reading_plan(*sizes).weight_bytes == num_bytes(reader.weights)
    monkeypatch.setattr(packed, "load_weights", lambda *arguments: pytest.fail("weights were read"))
    with pytest.raises(
        ConfigError, match=r"^cpu has .* GB free, one rank needs .*use more ranks or a shorter context$"
    ):
        PackedReader.load(NANO_FOLDER, 513, LAYERS, torch.float32, "cpu")
    with pytest.raises(ConfigError, match="target_layer_ids must be distinct"):
        PackedReader(reader.weights, (99,))


class Lost(Ranks):
    """A rank whose device missed another one in what it did last."""

    def check(self) -> None:
        raise RankError("rank 1 has not answered for 20 s; it last reported step 1")


def test_a_lost_rank_is_named_and_its_numbers_are_not_given() -> None:
    reader = PackedReader.load(NANO_FOLDER, 8, (), torch.float32, "cpu", Lost())
    for call in (lambda: reader.prefill([torch.tensor([1, 2])]), lambda: reader.logits(reader.embedding_VD[:2])):
        with pytest.raises(RankError, match="rank 1 has not answered"):
            call()
