"""The tensors of a checkpoint against the published sizes of Ling-3.0 and against the golden network."""

import json
from functools import cache
from typing import Any

import pytest
import torch
from published import FLASH, FLASH_31, TINY

from dspark.target.config import parse_target_config
from dspark.target.model import tensor_shapes

PUBLISHED = {"flash": FLASH, "tiny": TINY, "flash 3.1": FLASH_31}


@cache
def tensors_of(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Those of the main model and of its MTP layer."""
    config = parse_target_config(PUBLISHED[name])
    main = tensor_shapes(config)
    prefix = f"model.layers.{config.num_hidden_layers}."
    mtp = {name: main.pop(name) for name in list(main) if name.startswith(prefix)}
    return main, mtp


@pytest.mark.parametrize("name", ["flash", "tiny"])
def test_counts_equal_the_published_totals(ling_golden: dict[str, Any], name: str) -> None:
    golden = ling_golden["parameter_counts"][name]
    for part, tensors in zip(("main", "mtp"), tensors_of(name), strict=True):
        assert len(tensors) == golden[f"{part}_tensors"]
        assert sum(tensor.numel() for tensor in tensors.values()) == golden[f"{part}_params"]
        assert sum(tensor.nbytes for tensor in tensors.values()) == golden["bytes_per_rank"]["1"][part]


def test_flash_has_the_published_number_of_float32_parameters() -> None:
    tensors = [tensor for part in tensors_of("flash") for tensor in part.values()]
    assert sum(tensor.numel() for tensor in tensors if tensor.dtype == torch.float32) == 165_472


def test_the_mtp_shard_of_flash_has_the_published_size_to_the_byte(ling_golden: dict[str, Any]) -> None:
    # safetensors lays tensors by falling alignment of their dtype, then by name, and pads the header to 8 bytes
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in sorted(tensors_of("flash")[1].items(), key=lambda item: (-item[1].itemsize, item[0])):
        dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[tensor.dtype]
        end = offset + tensor.nbytes
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    header_bytes = len(json.dumps(header, separators=(",", ":")))
    assert 8 + -(-header_bytes // 8) * 8 + offset == ling_golden["parameter_counts"]["flash_mtp_file_bytes"]


def test_names_and_shapes_are_those_of_the_golden_network(ling_golden: dict[str, Any]) -> None:
    mini = ling_golden["mini_model"]
    tensors = tensor_shapes(parse_target_config(mini["config"]))
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        name: weight["shape"] for name, weight in mini["weights"].items()
    }


def test_the_larger_sister_model_counts_what_its_card_says() -> None:
    main, mtp = (sum(tensor.numel() for tensor in part.values()) for part in tensors_of("flash 3.1"))
    assert (round(main / 1e9, 1), round(mtp / 1e9, 1)) == (564.2, 8.2)
