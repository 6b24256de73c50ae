"""Training with FSDP2 learns what the other ways learn, and one goes on with another's checkpoints."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_run import assert_same, half_way, launch, rows_of, write_run

import train

TWO = ("--num_processes", "2", "--main_process_port", "0")
FSDP2 = ("accelerate", "launch", "--config_file", "configs/accelerate/fsdp2.yaml", *TWO)
BF16, FLOAT32 = ("--mixed_precision", "bf16"), ("--mixed_precision", "no")
ON_CPU = "tests/train_fsdp_on_cpu.py"
ROUNDINGS = 5e-6
"""Gradients are added in another order; where Adam's second moment is tiny, as of 1 of 3,072 weights, that shows."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a record, config.yaml, and in run/ the ten steps of it in one process, averaged."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "prompts.jsonl").write_text('{"prompt": "add"}\n{"text": "def add("}\n{"prompt": "more"}\n')
    train.main(write_run(folder, ema_decay=0.75))
    return folder


@pytest.fixture(scope="module")
def sharded(place: Path) -> Path:
    """sharded/run holds the same steps with FSDP2 and bf16 on two processes, layers computed again."""
    start(FSDP2 + BF16, ON_CPU, place, place / "sharded" / "run", "train.activation_checkpointing=true")
    return place / "sharded"


def start(launcher: tuple[str, ...], door: str, place: Path, folder: Path, *more: str, **environment: str) -> str:
    """Two processes that train into ``folder``, from its newest checkpoint if any. Returns: what they printed."""
    overrides = [f"train.folder={folder}", "train.accumulation_steps=2", *more]
    command = [*launcher, door, "--config", str(place / "config.yaml"), *(["--resume"] if folder.exists() else [])]
    done = launch(*command, *(word for override in overrides for word in ("--set", override)), **environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def assert_same_draft(folder: Path, expected: Path) -> None:
    assert (folder / "draft/model.safetensors").read_bytes() == (expected / "draft/model.safetensors").read_bytes()


def test_fsdp2_learns_what_data_parallel_does(place: Path, tmp_path: Path) -> None:
    plain = ("accelerate", "launch", "--multi_gpu", *TWO, *FLOAT32)
    start(plain, "train.py", place, tmp_path / "plain", ACCELERATE_USE_CPU="true")
    start(FSDP2 + FLOAT32, ON_CPU, place, tmp_path / "run")
    assert_same(tmp_path / "run", tmp_path / "plain", tolerance=ROUNDINGS)


def test_in_bf16_only_the_sum_of_the_layers_gradients_by_the_context_is_rounded_in_another_order(
    place: Path, tmp_path: Path
) -> None:
    """It reaches fc and hidden_norm alone, a rounding off; all other gradients of a step have the same bits."""
    plain = ("accelerate", "launch", "--multi_gpu", *TWO, *BF16)
    start(plain, "train.py", place, tmp_path / "plain", "train.steps=1", ACCELERATE_USE_CPU="true")
    start(FSDP2 + BF16, ON_CPU, place, tmp_path / "run", "train.steps=1", "train.activation_checkpointing=true")
    kept = (load_file(tmp_path / name / "checkpoints/step-00000001/moments.safetensors") for name in ("run", "plain"))
    found, wanted = kept
    assert found.keys() == wanted.keys()
    for name in found:
        if name in {"exp_avg.fc.weight", "exp_avg.hidden_norm.weight"}:
            assert (found[name] - wanted[name]).norm() < 2**-7 * wanted[name].norm(), name
        elif name.startswith("exp_avg."):
            assert torch.equal(found[name], wanted[name]), name
    assert rows_of(tmp_path / "run")[0]["loss"] == rows_of(tmp_path / "plain")[0]["loss"]


def test_ten_steps_of_fsdp2_are_five_and_five_bit_for_bit(place: Path, sharded: Path, tmp_path: Path) -> None:
    half_way(sharded, tmp_path / "run")
    shown = start(FSDP2 + BF16, ON_CPU, place, tmp_path / "run", "train.activation_checkpointing=true")
    assert "from step 5; 2 x cpu, distributed: fsdp, mixed precision: bf16" in shown
    assert_same(tmp_path / "run", sharded / "run", tolerance=0)
    assert_same_draft(tmp_path / "run", sharded / "run")


def test_fsdp2_goes_on_with_the_checkpoints_of_one_process(place: Path, tmp_path: Path) -> None:
    half_way(place, tmp_path / "run")
    start(FSDP2 + FLOAT32, ON_CPU, place, tmp_path / "run")
    assert_same(tmp_path / "run", place / "run", tolerance=ROUNDINGS)


def test_fsdp2_decodes_with_all_of_the_weights_and_one_process_goes_on_with_its_checkpoints(
    place: Path, tmp_path: Path
) -> None:
    probing = ("train.probe_every_steps=5", "train.probe_prompts=2", "eval.max_new_tokens=12")
    probing += (f"eval.tasks=[{place / 'prompts.jsonl'}]",)
    two, one = tmp_path / "two", tmp_path / "one"
    start(FSDP2 + FLOAT32, ON_CPU, place, two / "run", *probing)
    train.main(place / "config.yaml", [f"train.folder={one}", *probing])
    assert_same(two / "run", one, tolerance=ROUNDINGS)
    found, wanted = (load_file(each / "best" / "model.safetensors") for each in (two / "run", one))
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=2**-7, atol=1e-6)  # one step of bfloat16
    train.main(place / "config.yaml", [*half_way(two, tmp_path / "half"), *probing], resume=True)
    assert_same(tmp_path / "half", one, tolerance=ROUNDINGS)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("way", ["fsdp2", "deepspeed_zero1", "deepspeed_zero2"])
def test_on_two_gpus_every_way_learns_what_data_parallel_does(place: Path, tmp_path: Path, way: str) -> None:
    for name in ("multi_gpu", way):
        launcher = ("accelerate", "launch", "--config_file", f"configs/accelerate/{name}.yaml", *TWO, *FLOAT32)
        shown = start(launcher, "train.py", place, tmp_path / name)
    assert f"2 x cuda, distributed: {way.split('2')[0].split('_')[0]}, mixed precision: no" in shown
    assert_same(tmp_path / way, tmp_path / "multi_gpu", tolerance=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_gpus_ten_steps_of_fsdp2_are_five_and_five(place: Path, tmp_path: Path) -> None:
    shown = start(FSDP2, "train.py", place, tmp_path / "sharded" / "run")
    assert "2 x cuda, distributed: fsdp, mixed precision: bf16" in shown
    half_way(tmp_path / "sharded", tmp_path / "half")
    assert "from step 5" in start(FSDP2, "train.py", place, tmp_path / "half")
    assert_same(tmp_path / "half", tmp_path / "sharded" / "run", tolerance=0)
