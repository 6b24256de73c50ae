"""What ranks do in the tests of ranks: functions that started processes can import, and what they leave in files."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import multiprocessing
from verifying import CAPACITY_TOKENS, random_ids

from dspark.cli import bench
from dspark.target.loading import NANO_FOLDER
from dspark.verifier import PackedReader, Precision, Step, Verifier
from dspark.verifier.ranks import Ranks
from dspark.verifier.ranks.launch import run
from dspark.verifier.timing import prefill

WINDOW = 4
LAYERS = (3, 0)


@torch.no_grad()
def everything(verifier: Verifier, num_greedy: int) -> dict[str, torch.Tensor]:
    """All that a verifier says: states and logits of a prompt and a window, after every count, and a greedy text; and
    what a ``PackedReader`` with its weights says of several sequences.
    """
    prompt_T, window_T = random_ids(verifier.vocab_size, 19), random_ids(verifier.vocab_size, WINDOW, seed=1)
    found: dict[str, torch.Tensor] = {"head": verifier.head_VD}
    for count in range(WINDOW + 1):
        cache, output = verifier.prefill([prompt_T])
        staged = verifier.verify(window_T[None], cache)
        verifier.commit(cache, torch.tensor([count]))
        after = verifier.verify(torch.tensor([[1, 2]]), cache)
        found |= {"prompt": output.last_hidden_ND, "prompt taps": output.taps_NLD}
        found |= {"window": staged.last_hidden_ND, "window taps": staged.taps_NLD}
        found[f"after {count}"] = after.last_hidden_ND
    found["logits"] = verifier.logits(found["window"])
    reader = PackedReader(verifier.weights, verifier.target_layer_ids, verifier.ranks)
    _, output = reader.prefill([random_ids(verifier.vocab_size, length, seed=length) for length in (1, 19, 30)])
    found |= {"pack": output.last_hidden_ND, "pack taps": output.taps_NLD}
    found |= {"pack logits": reader.logits(output.last_hidden_ND), "pack head": reader.head_VD}
    found |= greedy(verifier, prompt_T, num_greedy)
    return {name: tensor.cpu().contiguous() for name, tensor in found.items()}


@torch.no_grad()
def greedy(verifier: Verifier, prompt_T: torch.Tensor, num_tokens: int) -> dict[str, torch.Tensor]:
    """A greedy text of single steps, and the logits that each token was the largest of."""
    _, output = verifier.prefill([prompt_T])
    hidden = [output.last_hidden_ND[-1]]
    step = Step(verifier, 1)
    step.verifier.ids_T[: step.num_tokens].copy_(verifier.logits(hidden[0][None]).argmax(-1))
    ids = [int(step.verifier.ids_T[: step.num_tokens])]
    while len(ids) < num_tokens:
        taken = step()
        hidden.append(taken.hidden_TD[0].clone())
        ids.append(int(taken.next_id_1))
    return {"greedy": torch.tensor(ids), "greedy logits": verifier.logits(torch.stack(hidden))}


def write_everything(
    ranks: Ranks, folder: Path, device: str, num_greedy: dict[torch.dtype, int], target: Path = NANO_FOLDER
) -> None:
    """A rank's ``everything``, of the target in every dtype with so many greedy tokens, into its file."""
    torch.set_num_threads(1)
    for dtype, num_tokens in num_greedy.items():
        verifier = Verifier.load(target, CAPACITY_TOKENS + 64, LAYERS, dtype, device, ranks)
        save_file(everything(verifier, num_tokens), folder / f"{dtype} {ranks.rank}.safetensors")


def read_everything(folder: Path, dtype: torch.dtype, world_size: int) -> list[dict[str, torch.Tensor]]:
    return [load_file(folder / f"{dtype} {rank}.safetensors") for rank in range(world_size)]


def assert_alike(ranks: list[dict[str, torch.Tensor]]) -> None:
    for name, first in ranks[0].items():
        assert all(torch.equal(rank[name], first) for rank in ranks), f"{name} differs between ranks"


def assert_near(several: dict[str, torch.Tensor], alone: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, expected in alone.items():
        if not name.startswith("greedy"):
            torch.testing.assert_close(several[name], expected, rtol=tolerance, atol=2 * tolerance, msg=name)


def assert_round_no_worse(
    several: dict[str, torch.Tensor], alone: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], most: float
) -> None:
    """Than one rank, whose own error is at most so large a part."""
    for name in ("prompt", "window", "window taps", "after 2", "logits"):
        errors = [(found[name].float() - exact[name]).norm() / exact[name].norm() for found in (alone, several)]
        assert errors[1] < 1.25 * errors[0] < 1.25 * most, (name, errors)


def assert_same_text(several: dict[str, torch.Tensor], alone: dict[str, torch.Tensor], largest_gap: float) -> None:
    """Byte-equal, or first different where the two largest logits are nearer than what both round."""
    differs = (several["greedy"] != alone["greedy"]).nonzero()
    if len(differs):
        place = int(differs[0])
        logits_V, chosen = alone["greedy logits"][place], several["greedy"][place]
        gap = float(logits_V.max() - logits_V[chosen])
        print(f"token {place} differs, at a logit gap of {gap:.3g} of {largest_gap:.3g}")
        assert gap < largest_gap, (place, gap, largest_gap)


def step_until(ranks: Ranks, number: signal.Signals, who: int, device: str = "cpu") -> None:
    """Steps without end; in its fifth, ``who`` sends itself a signal."""
    verifier = Verifier.load(NANO_FOLDER, CAPACITY_TOKENS, (), torch.float32, device, ranks)
    verifier.prefill([random_ids(verifier.vocab_size, 3)])
    first = ranks.num_steps  # type: ignore[attr-defined]
    step = Step(verifier, 1)
    while True:
        if ranks.rank == who and ranks.num_steps == first + 5:  # type: ignore[attr-defined]
            os.kill(os.getpid(), number)
        verifier.buffers.length_1.fill_(3)
        verifier.most_tokens = 3
        int(step().next_id_1)


def read_until(ranks: Ranks, number: signal.Signals, who: int) -> None:
    """Prompts longer than a window without end; before its third, ``who`` sends itself a signal."""
    verifier = Verifier.load(NANO_FOLDER, CAPACITY_TOKENS, (), torch.float32, "cpu", ranks)
    for number_read in range(1000):
        if ranks.rank == who and number_read == 2:
            os.kill(os.getpid(), number)
        verifier.prefill([random_ids(verifier.vocab_size, 20)])


def sleep(ranks: Ranks, folder: Path) -> None:
    """Say its number, then do nothing for long."""
    (folder / f"{os.getpid()}.pid").touch()
    time.sleep(600)


def fail(ranks: Ranks, who: int, kind: type[BaseException]) -> None:
    """``who`` fails; the others wait for it."""
    if ranks.rank == who:
        raise kind("the weights are not there")
    ranks.reserve(8)


class TenMicroseconds:
    """A clock that runs what it is given, on the CPU."""

    start_microseconds = 1.0

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        self.device = device

    def time(self, captured: Callable[[], object]) -> float:
        captured()
        return 10.0

    time_burst = time


def measure_on_cpus(ranks: Ranks, path: Path, routing: str) -> None:
    """``dspark bench verify --tp N`` from where its processes have started, without GPUs."""
    prefill.SIDE = 8
    bench.DEVICE, bench.Clock = "cpu", TenMicroseconds  # type: ignore[assignment,misc]
    bench.read_bandwidth = lambda clock, free_bytes: 1e12
    torch.cuda.get_device_name = lambda device: "a GPU"  # type: ignore[assignment]
    sizes, precision = (1, (1, 3), 100), Precision(torch.bfloat16)
    job = bench.Job("ling-3.0-nano", str(NANO_FOLDER), NANO_FOLDER, *sizes, "mtp", routing, 40, path, precision)
    bench.run(ranks, job)


def unguarded(
    work: Callable[[Ranks], None], world_size: int, limit_seconds: float, who: int, device: str = "cpu"
) -> dict[int, str]:
    """What the ranks other than ``who`` say, when nobody ends them but they themselves; ``who`` is killed then."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    options = (world_size, store.port, device, limit_seconds, work)
    processes = [context.Process(target=run, args=(rank, *options), daemon=True) for rank in range(world_size)]
    for process in processes:
        process.start()
    try:
        for rank, process in enumerate(processes):
            if rank != who:
                process.join(120)
                assert process.exitcode == 2, f"rank {rank}: {process.exitcode}"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return {rank: store.get(f"failure/{rank}").decode() for rank in range(world_size) if rank != who}
