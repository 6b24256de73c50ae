"""Models of other families obey the target's protocol: states, taps, roll-back, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCAB_SIZE, write_tiny_qwen3

from dspark.errors import CheckpointError, ConfigError
from dspark.target.transformers_target import TransformersTarget, load_transformers_target

PROMPTS = [torch.tensor([5, 9, 200, 31]), torch.tensor([7]), torch.tensor([100, 2, 2, 45, 8, 19, 3])]
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}


def load(folder: Path, target_layer_ids: tuple[int, ...] = (0, 2)) -> TransformersTarget:
    return load_transformers_target(folder, target_layer_ids, torch.float64, "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("qwen3") / "model")


@pytest.fixture(scope="module")
def target(folder: Path) -> TransformersTarget:
    return load(folder)


def whole(target: TransformersTarget, rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps and last hidden states of each row read alone, without padding."""
    outputs = [target.prefill([row])[1] for row in rows]
    return torch.cat([o.taps_NLD for o in outputs]), torch.cat([o.last_hidden_ND for o in outputs])


def test_its_logits_are_those_of_transformers(target: TransformersTarget) -> None:
    _, output = target.prefill(PROMPTS[:1])
    expected_TV = target.model(PROMPTS[0][None]).logits[0]
    torch.testing.assert_close(target.logits(output.last_hidden_ND), expected_TV, **CLOSE)


def test_a_tap_is_the_output_of_its_layer(target: TransformersTarget) -> None:
    seen = {}
    handles = [
        layer.register_forward_hook(lambda _m, _i, result, index=index: seen.update({index: result}))
        for index, layer in enumerate(target.model.model.layers)
    ]
    _, output = target.prefill(PROMPTS[:1])
    for handle in handles:
        handle.remove()
    for place, layer in enumerate(target.target_layer_ids):
        result = seen[layer][0] if isinstance(seen[layer], tuple) else seen[layer]
        torch.testing.assert_close(output.taps_NLD[:, place], result.reshape(-1, target.hidden_size), **CLOSE)


def test_a_ragged_batch_gives_what_each_sequence_gives_alone(target: TransformersTarget) -> None:
    _, output = target.prefill(PROMPTS)
    taps_NLD, last_hidden_ND = whole(target, PROMPTS)
    torch.testing.assert_close(output.taps_NLD, taps_NLD, **CLOSE)
    torch.testing.assert_close(output.last_hidden_ND, last_hidden_ND, **CLOSE)


@pytest.mark.parametrize("counts", [[0, 0, 0], [3, 3, 3], [2, 0, 3], [1, 3, 0]])
def test_verify_then_commit_equals_reading_the_committed_tokens(target: TransformersTarget, counts: list[int]) -> None:
    cache, _ = target.prefill(PROMPTS)
    target.verify(torch.full((3, 5), 77), cache)  # a stage that is replaced
    staged_BT = torch.tensor([[11, 12, 13], [21, 22, 23], [31, 32, 33]])
    target.verify(staged_BT, cache)
    target.commit(cache, torch.tensor(counts))
    more_BT = torch.tensor([[41, 42], [51, 52], [61, 62]])
    output = target.verify(more_BT, cache)
    rows = [
        torch.cat([prompt, staged[:count], more])
        for prompt, staged, count, more in zip(PROMPTS, staged_BT, counts, more_BT, strict=True)
    ]
    ends = torch.tensor([len(row) for row in rows]).cumsum(0)
    last_two = torch.stack([ends - 2, ends - 1], dim=1).reshape(-1)
    torch.testing.assert_close(output.last_hidden_ND, whole(target, rows)[1][last_two], **CLOSE)


def test_a_sliding_window_sees_the_same_tokens_after_an_uneven_commit(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    target = load(write_tiny_qwen3(tmp_path / "model", **window))
    assert "sliding_attention" in target.model.config.layer_types
    cache, _ = target.prefill(PROMPTS)
    target.verify(torch.tensor([[11, 12], [21, 22], [31, 32]]), cache)
    target.commit(cache, torch.tensor([0, 2, 1]))
    output = target.verify(torch.tensor([[41], [51], [61]]), cache)
    rows = [torch.tensor([*PROMPTS[0], 41]), torch.tensor([7, 21, 22, 51]), torch.tensor([*PROMPTS[2], 31, 61])]
    expected_ND = torch.stack([target.prefill([row])[1].last_hidden_ND[-1] for row in rows])
    torch.testing.assert_close(output.last_hidden_ND, expected_ND, **CLOSE)


def test_commit_refuses_more_than_was_staged(target: TransformersTarget) -> None:
    cache, _ = target.prefill(PROMPTS[:1])
    target.verify(torch.tensor([[1, 2]]), cache)
    for counts in ([3], [-1], [1, 1]):
        with pytest.raises(ValueError, match=r"expected 1 counts in 0\.\.2, got"):
            target.commit(cache, torch.tensor(counts))


def test_no_taps_give_an_empty_tensor(folder: Path) -> None:
    _, output = load(folder, ()).prefill(PROMPTS[:1])
    assert output.taps_NLD.shape == (4, 0, 32)


def test_a_tied_model_has_one_table(tmp_path: Path) -> None:
    target = load(write_tiny_qwen3(tmp_path / "model", tie_word_embeddings=True))
    assert target.head_VD is target.embedding_VD
    assert target.head_VD.shape == (VOCAB_SIZE, 32)


def test_nothing_of_the_target_asks_for_a_gradient(target: TransformersTarget) -> None:
    cache, output = target.prefill(PROMPTS)
    assert not output.taps_NLD.requires_grad
    assert not target.logits(output.last_hidden_ND).requires_grad
    assert not target.verify(torch.ones(3, 1, dtype=torch.int64), cache).last_hidden_ND.requires_grad


def test_a_missing_weight_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = write_tiny_qwen3(tmp_path / "model") / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing_keys: model.layers.1.mlp.up_proj.weight"):
        load(tmp_path / "model")


def test_an_unknown_architecture_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    values = {"architectures": ["OtherForCausalLM"], "model_type": "other", "auto_map": {"AutoConfig": "x.Y"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="cannot build this architecture"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["MiniMax", "Rwkv"])
def test_a_model_with_a_recurrent_state_is_refused(tmp_path: Path, family: str) -> None:
    import transformers

    sizes = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "attention_hidden_size": 8,
    }
    config = getattr(transformers, f"{family}Config")(**sizes, num_key_value_heads=2, num_local_experts=2)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="only keys and values can be rolled back"):
        load(tmp_path)


def test_a_model_that_scales_its_logits_is_refused(tmp_path: Path) -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = GraniteConfig(vocab_size=20, num_key_value_heads=2, logits_scaling=8.0, initializer_range=1.0, **sizes)
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a bias, scale or soft cap"):
        load(tmp_path)
