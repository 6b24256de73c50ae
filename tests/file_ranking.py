"""The ranks of GPUs in processes on CPUs: files that all of them map in place of peer memory, kernels interpreted."""

from pathlib import Path

import torch
from ranking import LAYERS
from safetensors.torch import save_file
from verifying import random_ids

from dspark.kernels import exchange
from dspark.target.loading import NANO_FOLDER
from dspark.verifier import Step, Verifier
from dspark.verifier.ranks import Processes, devices
from dspark.verifier.ranks.devices import Devices


class OverFiles(Devices):
    """``Devices`` whose memory lies in files."""

    def __init__(self, ranks: Processes, folder: Path) -> None:
        super().__init__(ranks.store, ranks.rank, ranks.world_size, ranks.limit_seconds)
        self.folder = folder

    def share(self, size: int) -> list[torch.Tensor]:
        return [
            torch.from_file(str(self.folder / f"{size}-{rank}"), shared=True, size=size, dtype=torch.float32)
            for rank in range(self.world_size)
        ]


@torch.no_grad()
def say_a_little(verifier: Verifier) -> dict[str, torch.Tensor]:
    """A prompt, a window of wrong and right drafts, and what follows."""
    prompt_T = random_ids(verifier.vocab_size, 3)
    _, output = verifier.prefill([prompt_T])
    logits_NV = verifier.logits(output.last_hidden_ND)
    step = Step(verifier, 3)
    step.verifier.ids_T[: step.num_tokens].copy_(logits_NV[-1].argmax().expand(3))
    found = {"prompt": output.last_hidden_ND, "taps": output.taps_NLD, "logits": logits_NV}
    taken = step()
    found |= {"count": taken.count_1, "next": taken.next_id_1, "hidden": taken.hidden_TD}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def speak_over_files(ranks: Processes, folder: Path) -> None:
    """The nano target on ranks over files, and sums longer than a window."""
    torch.set_num_threads(1)
    exchange._expect_rows = lambda *arguments: None
    devices.LONG_ROWS = 8
    together = OverFiles(ranks, folder)
    verifier = Verifier.load(NANO_FOLDER, 64, LAYERS, torch.float32, "cpu", together)
    found = say_a_little(verifier)
    generator = torch.Generator().manual_seed(ranks.rank)
    parts_TKD = torch.randn(19, 2, verifier.hidden_size, generator=generator)
    residual_TD, weight_D = torch.ones(19, verifier.hidden_size), torch.ones(verifier.hidden_size)
    for name, way in (("long", together), ("long by sockets", ranks)):
        found[name] = way.add_norm(parts_TKD, None, residual_TD, weight_D, 1e-6)[0]
    for num_rows in (3, 17):
        values = torch.arange(num_rows * 700).view(num_rows, 700) + ranks.rank
        for name, way in (("gathered", together), ("gathered by sockets", ranks)):
            found[f"{num_rows} {name}"] = way.gather(values)
    save_file(found, folder / f"{ranks.rank}.safetensors")
