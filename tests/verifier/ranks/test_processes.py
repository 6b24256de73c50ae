"""Several processes are the whole target on each of them, bit for bit alike; a lost one is named by the others."""

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import ranking
import torch
from torch.distributed import HashStore
from verifying import CAPACITY_TOKENS

from dspark.errors import RankError
from dspark.kernels.exchange import Exchange
from dspark.target.loading import NANO_FOLDER
from dspark.verifier import Shard, Verifier, load_weights
from dspark.verifier.ranks import Processes, Ranks, start
from dspark.verifier.ranks.devices import Devices

pytestmark = pytest.mark.usefixtures("ranks_of_a_server")
DTYPES = [torch.float32, torch.bfloat16]
NUM_GREEDY = {torch.float32: 256, torch.bfloat16: 64}
PATIENT_SECONDS, LIMIT_SECONDS = 120.0, 4.0


@pytest.fixture(scope="module")
def alone() -> dict[torch.dtype, dict[str, torch.Tensor]]:
    found = {}
    for dtype in DTYPES:
        verifier = Verifier.load(NANO_FOLDER, CAPACITY_TOKENS + 64, ranking.LAYERS, dtype, "cpu")
        found[dtype] = ranking.everything(verifier, NUM_GREEDY[dtype])
    return found


def run(folder: Path, world_size: int, num_greedy: dict[torch.dtype, int]) -> None:
    work = partial(ranking.write_everything, folder=folder, device="cpu", num_greedy=num_greedy)
    start(work, world_size, "cpu", PATIENT_SECONDS)


def test_two_ranks_say_what_one_says(tmp_path: Path, alone: dict[torch.dtype, dict[str, torch.Tensor]]) -> None:
    run(tmp_path, 2, NUM_GREEDY)
    for dtype in DTYPES:
        ranks = ranking.read_everything(tmp_path, dtype, 2)
        ranking.assert_alike(ranks)
        ranking.assert_same_text(ranks[0], alone[dtype], {torch.float32: 2e-5, torch.bfloat16: 0.15}[dtype])
    ranking.assert_near(ranking.read_everything(tmp_path, torch.float32, 2)[0], alone[torch.float32], 1e-5)
    ranking.assert_round_no_worse(ranks[0], alone[torch.bfloat16], alone[torch.float32], 0.04)


def test_four_ranks_say_what_one_says(tmp_path: Path, alone: dict[torch.dtype, dict[str, torch.Tensor]]) -> None:
    run(tmp_path, 4, {torch.float32: 16})
    ranks = ranking.read_everything(tmp_path, torch.float32, 4)
    ranking.assert_alike(ranks)
    ranking.assert_near(ranks[0], alone[torch.float32], 1e-5)
    assert torch.equal(ranks[0]["greedy"], alone[torch.float32]["greedy"][:16])


@pytest.mark.parametrize(
    ("world_size", "number", "who", "says"),
    [
        (2, signal.SIGKILL, 1, "has ended"),
        (2, signal.SIGSTOP, 0, "has not answered for 4 s"),
        (4, signal.SIGSTOP, 1, "has not answered for 4 s"),
    ],
)
def test_a_rank_that_dies_or_stands_still_ends_the_others_by_name(
    world_size: int, number: signal.Signals, who: int, says: str
) -> None:
    found = ranking.unguarded(partial(ranking.step_until, number=number, who=who), world_size, LIMIT_SECONDS, who)
    assert len(found) == world_size - 1
    for text in found.values():
        step = int(text.split()[-1])
        assert text == f"rank {who} {says}; it last reported step {step}"
        assert step > 5


@pytest.mark.parametrize(
    ("number", "says"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "has not answered for 4 s")]
)
def test_a_rank_that_is_lost_while_a_prompt_is_read_is_named(number: signal.Signals, says: str) -> None:
    found = ranking.unguarded(partial(ranking.read_until, number=number, who=1), 2, LIMIT_SECONDS, 1)
    assert [text.rpartition(" ")[0] for text in found.values()] == [f"rank 1 {says}; it last reported step"]


def test_a_killed_rank_ends_the_start_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 1 (was ended by SIGKILL|has ended); it last reported step \d+$"):
        start(partial(ranking.step_until, number=signal.SIGKILL, who=1), 2, "cpu", PATIENT_SECONDS)
    assert time.monotonic() - began < PATIENT_SECONDS


def test_a_mistake_of_one_rank_is_the_message_of_all(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError, match=r"^the weights are not there$"):
        start(partial(ranking.fail, who=1, kind=RankError), 2, "cpu", PATIENT_SECONDS)
    assert "Traceback" not in capfd.readouterr().err
    with pytest.raises(RankError, match=r"^rank 1 ended with status 1; it last reported step 0$"):
        start(partial(ranking.fail, who=1, kind=ZeroDivisionError), 2, "cpu", PATIENT_SECONDS)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_what_the_device_missed_is_raised_at_the_next_step() -> None:
    ranks = Devices.__new__(Devices)
    ranks.rank, ranks.world_size, ranks.limit_seconds, ranks.store, ranks.num_steps = 0, 2, 20.0, HashStore(), 0
    memory = [torch.zeros(16, dtype=torch.int32) for _ in range(3)]
    ranks._exchanges = {8: Exchange(0, memory[0], torch.zeros(3, 2, 16, 8), memory[1], memory[2])}
    for _ in range(17):
        ranks.begin_step()
        ranks.store.set("step/1", str(ranks.num_steps))
    memory[2][5] = 2
    with pytest.raises(RankError, match="rank 1 has not answered"):
        ranks.check()
    with pytest.raises(RankError, match=r"^rank 1 has not answered for 20 s; it last reported step 17$"):
        ranks.begin_step()


def test_who_is_missed_is_the_end_of_the_chain() -> None:
    ranks = Processes.__new__(Processes)
    ranks.rank, ranks.store = 0, HashStore()
    ranks.store.set("misses/1", "3 has not answered for 4 s")
    ranks.store.set("step/3", "9")
    error = ranks.lost(1, "has ended")  # it has, because it missed rank 3
    assert str(error) == "rank 3 has not answered for 4 s; it last reported step 9"
    ranks.store.set("misses/3", "0 has ended")  # a rank that was stopped and runs again
    assert str(ranks.lost(1, "has ended")) == "rank 0 has ended; it last reported step 0"


class Second(Ranks):
    rank, world_size = 1, 2


def test_weights_of_another_rank_are_refused() -> None:
    weights = load_weights(NANO_FOLDER, Shard(0, 2), torch.float32)
    with pytest.raises(ValueError, match=r"rank 1 of 2 was given the weights of Shard\(rank=0, world_size=2\)"):
        Verifier(weights, CAPACITY_TOKENS, ranks=Second())


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    script = f"""
import sys; sys.path[:0] = {sys.path!r}
from functools import partial
from pathlib import Path
import ranking
from dspark.verifier.ranks import start
if __name__ == "__main__":
    start(partial(ranking.sleep, folder=Path({str(tmp_path)!r})), 2, "cpu", 60.0)
"""
    (tmp_path / "start.py").write_text(script)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "start.py")])
    began = time.monotonic()
    while len(list(tmp_path.glob("*.pid"))) < 2:
        assert time.monotonic() - began < 60
        time.sleep(0.1)
    numbers = [int(path.stem) for path in tmp_path.glob("*.pid")]
    parent.kill()
    parent.wait()
    began = time.monotonic()
    while any(Path(f"/proc/{number}/cmdline").is_file() for number in numbers):
        assert time.monotonic() - began < 20, "ranks outlive their parent"
        time.sleep(0.1)
