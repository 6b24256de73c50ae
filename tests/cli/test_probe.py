"""What a probe needs is loaded before training, or refused with what is wrong."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import VOCAB_SIZE, write_tiny_ling
from training_run import TAPS, run_fields

from dspark.cli.probe import load_probe
from dspark.config import RunConfig
from dspark.errors import ConfigError, PromptError
from dspark.model_folder import Checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    write_tiny_ling(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "add"}\n{"text": "def add("}\n{"prompt": "more"}\n')
    tasks = {"eval": {"tasks": [str(tmp_path / "prompts.jsonl"), "none"], "max_new_tokens": 100}}
    return RunConfig.model_validate(run_fields(tmp_path, probe_every_steps=5, probe_prompts=2) | tasks)


def test_a_probe_reads_the_first_prompts_of_the_first_task(run: RunConfig) -> None:
    probe = load_probe(run, CPU)
    assert len(probe.prompts) == 2
    assert (probe.sampling.temperature, probe.sampling.max_new_tokens, probe.seed) == (1.0, 64, run.seed)
    assert (probe.target.target_layer_ids, probe.target.head_VD.dtype) == (TAPS, torch.float32)
    short = run.model_copy(update={"eval": run.eval.model_copy(update={"max_new_tokens": 3})})
    assert load_probe(short, CPU).sampling.max_new_tokens == 3


def test_a_target_that_the_machine_cannot_hold_is_refused_with_both_sizes(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = sum(tensor.numel() for tensor in load_file(tmp_path / "target" / "model.safetensors").values())
    assert Checkpoint(tmp_path / "target").num_parameters == numbers
    monkeypatch.setattr(Checkpoint, "num_parameters", 124_000_000_000)
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": 4_000_000, "SC_PAGE_SIZE": 4096}[name])
    with pytest.raises(ConfigError, match=r"train.probe_every_steps: .*target takes 496.0 GB, cpu has 16.4 GB; set it"):
        load_probe(run, CPU)


def test_prompts_that_the_target_does_not_answer_are_refused(run: RunConfig, tmp_path: Path) -> None:
    stop = {"eos_token_id": list(range(VOCAB_SIZE))}
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps(stop))
    with pytest.raises(PromptError, match=r"all 2 texts of .*prompts.jsonl stop at their first token"):
        load_probe(run, CPU)
