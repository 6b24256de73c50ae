"""The tensor list against the published sizes of Ling-3.0 and against the golden network."""

import json
from typing import Any

import pytest
import torch
from published import FLASH, FLASH_31, TINY

from dspark.target.checkpoint.shapes import TensorSpec, mtp_prefix, parameter_counts, tensor_shapes
from dspark.target.config import parse_target_config


@pytest.mark.parametrize(("name", "values"), [("flash", FLASH), ("tiny", TINY)])
def test_counts_equal_the_published_totals(ling_golden: dict[str, Any], name: str, values: dict[str, Any]) -> None:
    golden, config = ling_golden["parameter_counts"][name], parse_target_config(values)
    for world_size, expected in golden["bytes_per_rank"].items():
        counts = parameter_counts(config, int(world_size))
        assert (counts.main_tensors, counts.mtp_tensors) == (golden["main_tensors"], golden["mtp_tensors"])
        assert (counts.main_params, counts.mtp_params) == (golden["main_params"], golden["mtp_params"])
        assert (counts.main_bytes, counts.mtp_bytes) == (expected["main"], expected["mtp"])


def test_flash_has_the_published_number_of_float32_parameters() -> None:
    specs = tensor_shapes(parse_target_config(FLASH)).values()
    assert sum(torch.Size(spec.shape).numel() for spec in specs if spec.dtype == torch.float32) == 165_472


def test_the_mtp_shard_of_flash_has_the_published_size_to_the_byte(ling_golden: dict[str, Any]) -> None:
    config = parse_target_config(FLASH)
    specs = {name: spec for name, spec in tensor_shapes(config).items() if name.startswith(mtp_prefix(config))}
    # safetensors lays tensors by falling alignment of their dtype, then by name, and pads the header to 8 bytes
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in sorted(specs.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[spec.dtype]
        end = offset + spec.num_bytes()
        header[name] = {"dtype": dtype, "shape": spec.shape, "data_offsets": [offset, end]}
        offset = end
    header_bytes = len(json.dumps(header, separators=(",", ":")))
    assert 8 + -(-header_bytes // 8) * 8 + offset == ling_golden["parameter_counts"]["flash_mtp_file_bytes"]


def test_names_and_shapes_are_those_of_the_golden_network(ling_golden: dict[str, Any]) -> None:
    mini = ling_golden["mini_model"]
    specs = tensor_shapes(parse_target_config(mini["config"]))
    assert {name: list(spec.shape) for name, spec in specs.items()} == {
        name: weight["shape"] for name, weight in mini["weights"].items()
    }


def test_the_larger_sister_model_counts_what_its_card_says() -> None:
    counts = parameter_counts(parse_target_config(FLASH_31))
    assert round(counts.main_params / 1e9, 1) == 564.2
    assert round(counts.mtp_params / 1e9, 1) == 8.2


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 ranks do not divide dimension 0 of model\.word_embeddings\.weight"):
        parameter_counts(parse_target_config(FLASH), 3)


def test_a_replicated_tensor_weighs_the_same_on_every_rank() -> None:
    assert TensorSpec((6, 4), torch.float32).num_bytes(2) == 96
    assert TensorSpec((6, 4), torch.float32, shard_dim=0).num_bytes(2) == 48
