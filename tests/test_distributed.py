"""A launch that accelerate would turn into something else is refused, and sums mean the same with one process."""

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from training_run import make_run

from dspark.distributed import (
    check_fsdp,
    check_launch,
    spread,
    start_accelerator,
    sum_over_ranks,
    whole,
)
from dspark.errors import ConfigError


def test_processes_that_would_train_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"started 2 processes but this one trains in a group of 1.*--multi_gpu"):
        check_launch(1, {"WORLD_SIZE": "2"}, ())


@pytest.mark.parametrize("option", ["--num_processes 2", "--num-processes 2", "--num_processes=2"])
def test_fewer_processes_than_asked_for_are_refused(option: str) -> None:
    launcher = ["python3", "accelerate", "launch", "--cpu", *option.split(), "train.py"]
    with pytest.raises(ConfigError, match="asked for 2 processes and started 1"):
        check_launch(1, {}, launcher)


def test_what_was_asked_for_passes() -> None:
    launcher = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "train.py"]
    check_launch(2, {"WORLD_SIZE": "2"}, launcher)
    check_launch(1, {}, ["accelerate", "launch", "train.py"])
    check_launch(1, {}, ["bash"])


def test_deepspeed_that_does_not_start_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="DeepSpeed was asked for but accelerate trains without it"):
        start_accelerator(make_run(tmp_path).train, {"ACCELERATE_USE_DEEPSPEED": "true"}, ())


def test_muon_with_deepspeed_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"train\.optimizer muon moves whole matrices, DeepSpeed flat parts"):
        start_accelerator(make_run(tmp_path, optimizer="muon").train, {"ACCELERATE_USE_DEEPSPEED": "true"}, ())


def test_one_process_sums_to_itself() -> None:
    value = torch.tensor([1.0, 2.0])
    total = sum_over_ranks(value)
    total += 1
    assert value.tolist() == [1.0, 2.0]


def test_fsdp_that_does_not_start_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="FSDP was asked for but accelerate trains without it"):
        start_accelerator(make_run(tmp_path).train, {"ACCELERATE_USE_FSDP": "true"}, ())


def test_muon_with_fsdp2_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"train\.optimizer muon moves whole matrices, FSDP2 rows"):
        start_accelerator(make_run(tmp_path, optimizer="muon").train, {"ACCELERATE_USE_FSDP": "true"}, ())


TESTED = {
    "fsdp_version": 2,
    "auto_wrap_policy": "transformer_based_wrap",
    "transformer_cls_names_to_wrap": ["DraftLayer"],
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fsdp_version": 1}, "fsdp_version must be 2, got 1"),
        ({"cpu_offload": True}, "fsdp_offload_params must be False, got True"),
        ({"transformer_cls_names_to_wrap": None}, r"layer_cls_to_wrap must be \['DraftLayer'\], got None"),
        ({"transformer_cls_names_to_wrap": ["SwiGLU"]}, r"must be \['DraftLayer'\], got \['SwiGLU'\]"),
        ({"activation_checkpointing": True}, "fsdp_activation_checkpointing must be False, got True"),
        ({"cpu_ram_efficient_loading": True}, "fsdp_cpu_ram_efficient_loading must be False, got True"),
        ({"ignored_modules": "norm"}, "fsdp_ignored_modules must be None, got norm"),
    ],
)
def test_other_kinds_of_fsdp_are_refused(monkeypatch, changed, message) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # the plugin sets it
    check_fsdp(FullyShardedDataParallelPlugin(**TESTED), has_parallelism=False)
    with pytest.raises(ConfigError, match=rf"{message}.*configs/accelerate/fsdp2.yaml"):
        check_fsdp(FullyShardedDataParallelPlugin(**TESTED | changed), has_parallelism=False)


def test_other_parallelism_beside_fsdp_is_refused() -> None:
    with pytest.raises(ConfigError, match="use_parallelism_config must be False, got True"):
        check_fsdp(FullyShardedDataParallelPlugin(**TESTED), has_parallelism=True)


def test_what_is_not_spread_is_whole() -> None:
    value = torch.arange(3.0)
    assert whole(value) is value
    assert spread(value, torch.zeros(3)) is value
