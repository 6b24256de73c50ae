"""A rank that reads a damaged checkpoint says which file and tensor, before it allocates anything."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.errors import CheckpointError
from dspark.model_folder import INDEX_FILE
from dspark.target.loading import NANO_FOLDER
from dspark.verifier import Verifier
from dspark.verifier.ranks import Ranks

SECOND = "model-00002-of-00002.safetensors"


class Second(Ranks):
    rank, world_size = 1, 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path in NANO_FOLDER.glob("*"):
        if path.suffix in {".json", ".safetensors"}:
            shutil.copy(path, tmp_path)
    return tmp_path


def says(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Verifier.load(folder, 64, (), torch.bfloat16, "cpu", Second())
    return str(caught.value)


def test_a_truncated_file_and_the_tensor_that_is_cut_are_named(folder: Path) -> None:
    tensors = load_file(folder / SECOND)
    save_file(tensors, folder / SECOND)
    content = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(content[:-1])
    text = says(folder)
    assert f"{folder / SECOND}: truncated or damaged ({len(content) - 1} bytes" in text
    assert any(f"; {name} is the first tensor cut off" in text for name in tensors)


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{not json at all", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]"])
def test_a_garbled_header_names_the_file_and_the_first_tensor_looked_for(folder: Path, content: bytes) -> None:
    (folder / SECOND).write_bytes(content)
    text = says(folder)
    assert text.startswith(f"{folder / SECOND}: truncated or damaged ({len(content)} bytes: ")
    placed = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    first = next(name for name, file in placed.items() if file == SECOND)
    assert text.endswith(f"; opened to read {first}); download it again")
    assert "\n" not in text


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    tensors = load_file(folder / SECOND)
    name = "model.norm.weight"
    save_file(tensors | {name: torch.zeros(3, dtype=torch.bfloat16)}, folder / SECOND)
    assert f"{name} must be [256] BF16, found [3] BF16" in says(folder)
