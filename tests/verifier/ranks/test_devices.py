"""Ranks on two GPUs: sums and gathers in every order of arrival, the whole target, lost ranks. Skipped without them."""

import signal
from functools import partial
from pathlib import Path

import device_ranking
import pytest
import ranking
import torch
from verifying import CAPACITY_TOKENS

from dspark.target.loading import NANO_FOLDER
from dspark.verifier import Verifier
from dspark.verifier.ranks import start

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("is_chained", [False, True])
def test_sums_and_gathers_are_right_and_bit_equal(is_chained: bool) -> None:
    start(partial(device_ranking.sums_and_gathers, is_chained=is_chained), 2, "cuda")


@pytest.mark.parametrize("is_chained", [False, True])
def test_a_hundred_thousand_delayed_sums_are_bit_equal(is_chained: bool) -> None:
    start(partial(device_ranking.delayed_sums, is_chained=is_chained, num_calls=100_000), 2, "cuda")


def test_two_gpus_say_what_one_says(tmp_path: Path) -> None:
    work = partial(ranking.write_everything, folder=tmp_path, dtypes=DTYPES, device="cuda", num_greedy=256)
    start(work, 2, "cuda", 60.0)
    for dtype in DTYPES:
        first, second = ranking.read_everything(tmp_path, dtype, 2)
        verifier = Verifier.load(NANO_FOLDER, CAPACITY_TOKENS + 64, ranking.LAYERS, dtype, "cuda:0")
        alone = ranking.everything(verifier, 256)
        ranking.assert_alike([first, second])
        ranking.assert_same_text(first, alone, dtype)
        if dtype == torch.float32:
            ranking.assert_near(first, alone, 1e-4)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_gpu_is_named(number: signal.Signals) -> None:
    work = partial(ranking.step_until, number=number, who=1, device="cuda")
    (text,) = ranking.unguarded(work, 2, 8.0, 1, "cuda").values()
    assert text.startswith("rank 1 has not answered for 8 s; it last reported step "), text
