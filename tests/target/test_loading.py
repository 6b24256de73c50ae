"""From a name to a target: the golden network through the real loader, dispatch, tables, facts and fingerprints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from tiny import PAD_TOKEN_ID, STOP_TOKEN_ID, write_tiny_ling, write_tiny_qwen3

from dspark.errors import CheckpointError, ConfigError, DsparkError
from dspark.target import loading
from dspark.target.config import parse_target_config
from dspark.target.loading import load_tables, load_target, locate_target, target_facts, target_fingerprint
from dspark.target.model import LingModel, tensor_shapes
from dspark.target.transformers_target import TransformersTarget


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_ling(tmp_path / "ling")


@pytest.fixture(scope="module")
def golden_folder(tmp_path_factory: pytest.TempPathFactory, ling_golden: dict[str, Any]) -> Path:
    """The golden network as a checkpoint of three shards."""
    mini, folder = ling_golden["mini_model"], tmp_path_factory.mktemp("golden")
    specs = tensor_shapes(parse_target_config(mini["config"]))
    tensors = {
        name: (torch.tensor(weight["int"], dtype=torch.float64) / weight["den"])
        .reshape(weight["shape"])
        .to(specs[name].dtype)
        for name, weight in mini["weights"].items()
    }
    save_torch_state_dict(tensors, folder, max_shard_size=10_000)
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    (folder / "config.json").write_text(json.dumps(mini["config"] | {"eos_token_id": 0}))
    return folder


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_the_golden_checkpoint_gives_the_golden_logits(
    golden_folder: Path, ling_golden: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    mini = ling_golden["mini_model"]
    target = load_target(golden_folder, target_layer_ids=(0, 3), dtype=dtype)
    cache, output = target.prefill([torch.tensor(mini["prompt"])])
    close = {"rtol": 0, "atol": tolerance}
    torch.testing.assert_close(target.logits(output.last_hidden_ND), torch.tensor(mini["logits"], dtype=dtype), **close)
    residuals = torch.tensor(mini["residual_stream_last_position_after_each_layer"], dtype=dtype)
    torch.testing.assert_close(output.taps_NLD[-1], residuals[[0, 3]], **close)
    for token, expected in zip(mini["decode_tokens"], mini["decode_logits"], strict=True):
        output = target.verify(torch.tensor([[token]]), cache)
        target.commit(cache, torch.tensor([1]))
        torch.testing.assert_close(
            target.logits(output.last_hidden_ND)[0], torch.tensor(expected, dtype=dtype), **close
        )


def test_architectures_choose_the_code(folder: Path, tmp_path: Path) -> None:
    assert isinstance(load_target(folder), LingModel)
    assert isinstance(load_target(write_tiny_qwen3(tmp_path / "qwen3")), TransformersTarget)


def test_a_loaded_target_is_frozen_and_keeps_decays_in_float32(folder: Path) -> None:
    model = load_target(folder, dtype=torch.bfloat16)
    assert isinstance(model, LingModel)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    stored = load_file(folder / "model.safetensors")
    state = model.state_dict()
    for name in ("model.layers.0.attention.A_log", "model.layers.1.mlp.gate.expert_bias", "lm_head.weight"):
        assert state[name].dtype == stored[name].dtype
        assert torch.equal(state[name], stored[name])


@pytest.mark.parametrize("family", [write_tiny_ling, write_tiny_qwen3])
@pytest.mark.parametrize("layers", [(1, 1), (-1,), "last"])
def test_impossible_taps_are_refused(tmp_path: Path, family: Any, layers: Any) -> None:
    folder = family(tmp_path / "model")
    last = target_facts(folder).num_layers - 1
    with pytest.raises(ConfigError, match=rf"target_layer_ids must be distinct and in 0\.\.{last - 1}"):
        load_target(folder, target_layer_ids=(last,) if layers == "last" else layers)


def test_weights_are_checked_against_the_config_before_they_are_used(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.attention.A_log"] = tensors["model.layers.0.attention.A_log"].bfloat16()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"A_log must be \[2\] F32, found \[2\] BF16"):
        load_target(folder)


def test_another_architecture_of_the_same_model_type_is_not_taken_for_ling(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"model_type": "renamed"}))
    assert isinstance(load_target(folder), LingModel)
    (folder / "config.json").write_text(json.dumps(values | {"architectures": ["BailingMoeV2_5ForCausalLM"]}))
    with pytest.raises(DsparkError) as refusal:
        load_target(folder)
    assert "architectures must be" not in str(refusal.value), "it was taken for Ling-3.0"


def test_a_name_that_is_nowhere_says_where_it_looked_and_how_to_fetch_it() -> None:
    with pytest.raises(CheckpointError, match=r"hub cache .* hf download inclusionAI/Ling-3\.0-flash$"):
        locate_target("ling-3.0-flash")
    with pytest.raises(CheckpointError, match=r"^some/model: .* hf download some/model$"):
        locate_target("some/model")
    with pytest.raises(CheckpointError, match=r"^no such folder: no folder .* one of ling-3\.0-flash"):
        locate_target("no such folder")


def test_looking_for_a_target_asks_nothing_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(*address: Any, **_: Any) -> None:
        asked.append(address)
        raise OSError("no network in tests")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    with pytest.raises(CheckpointError):
        locate_target("some/model")
    assert not asked


def test_the_nano_target_lies_beside_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (Path(__file__).parents[2] / "data" / "nano") == loading.NANO_FOLDER
    monkeypatch.setattr(loading, "NANO_FOLDER", folder)
    assert locate_target("ling-3.0-nano") == folder
    monkeypatch.setattr(loading, "NANO_FOLDER", folder / "absent")
    with pytest.raises(CheckpointError, match="which a clone of this repository holds"):
        locate_target("ling-3.0-nano")


def test_a_downloaded_repository_is_found_without_network(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "hub"
    snapshot = cache / "models--inclusionAI--Ling-3.0-tiny" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (cache / "models--inclusionAI--Ling-3.0-tiny" / "refs").mkdir()
    (cache / "models--inclusionAI--Ling-3.0-tiny" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    assert locate_target("ling-3.0-tiny") == snapshot
    assert locate_target("inclusionAI/Ling-3.0-tiny") == snapshot


@pytest.mark.parametrize("family", [write_tiny_ling, write_tiny_qwen3])
def test_the_tables_are_those_of_the_loaded_target(tmp_path: Path, family: Any) -> None:
    folder = family(tmp_path / "model")
    embedding_VD, head_VD = load_tables(folder)
    target = load_target(folder, dtype=embedding_VD.dtype)
    assert torch.equal(embedding_VD, target.embedding_VD)
    assert torch.equal(head_VD, target.head_VD)
    assert not torch.equal(embedding_VD, head_VD)


def test_tied_tables_are_one(tmp_path: Path) -> None:
    embedding_VD, head_VD = load_tables(write_tiny_qwen3(tmp_path / "model", tie_word_embeddings=True))
    assert embedding_VD is head_VD


def test_a_table_of_another_size_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.ones(16, 32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight must be \[320, 32\] by config\.json, found \[16, 32\]"):
        load_tables(folder)


def test_facts_are_read_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    facts = target_facts(folder)
    assert (facts.vocab_size, facts.hidden_size, facts.num_layers) == (320, 32, 6)
    assert facts.architecture == "BailingMoeV3ForCausalLM"
    assert (facts.stop_token_ids, facts.pad_token_id, facts.bos_token_id) == ((STOP_TOKEN_ID,), PAD_TOKEN_ID, None)


def test_the_fingerprint_tells_a_fine_tune_from_its_parent(folder: Path, tmp_path: Path) -> None:
    fingerprint = target_fingerprint(folder)
    assert fingerprint == target_fingerprint(write_tiny_ling(tmp_path / "copy"))
    others = {
        target_fingerprint(write_tiny_ling(tmp_path / "seed", seed=1)),
        target_fingerprint(write_tiny_ling(tmp_path / "config", routed_scaling_factor=2.0)),
        target_fingerprint(write_tiny_ling(tmp_path / "width", hidden_size=64)),
    }
    assert len(others - {fingerprint}) == 3
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"model.norm.weight", b"model.norm.weighs"))
    assert target_fingerprint(folder) not in {fingerprint, *others}
