"""The exchange kernels between real processes that wait for each other: over mapped files, in Triton's interpreter."""

from functools import partial
from pathlib import Path

import file_ranking
import pytest
import ranking
import torch
from safetensors.torch import load_file

from dspark.target.loading import NANO_FOLDER
from dspark.verifier import Verifier
from dspark.verifier.ranks import start


@pytest.mark.usefixtures("ranks_of_a_server")
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
def test_two_processes_over_shared_memory_say_what_one_says(tmp_path: Path) -> None:
    start(partial(file_ranking.speak_over_files, folder=tmp_path), 2, "cpu", 120.0)
    ranks = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(2)]
    ranking.assert_alike(ranks)
    alone = file_ranking.say_a_little(Verifier.load(NANO_FOLDER, 64, ranking.LAYERS, torch.float32, "cpu"))
    ranking.assert_near(ranks[0], alone, 1e-5)
    for num_rows in (3, 17):
        assert torch.equal(ranks[0][f"{num_rows} gathered"], ranks[0][f"{num_rows} gathered by sockets"])
    torch.testing.assert_close(ranks[0]["long"], ranks[0]["long by sockets"], rtol=1e-6, atol=1e-6)
