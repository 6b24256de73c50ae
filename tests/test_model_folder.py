"""Reading a model folder: lazily, and refusing by name what is damaged or another model's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from tiny import write_tiny_ling

from dspark.errors import CheckpointError
from dspark.model_folder import INDEX_FILE, SINGLE_FILE, Checkpoint
from dspark.target.config import load_target_config
from dspark.target.model import tensor_shapes

GATE = "model.layers.1.mlp.gate.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_ling(tmp_path / "ling")


def expected(folder: Path) -> dict[str, torch.Tensor]:
    return tensor_shapes(load_target_config(folder))


def rewrite(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / SINGLE_FILE) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / SINGLE_FILE)


def split(folder: Path) -> dict[str, torch.Tensor]:
    """Replace the single file by shards with an index."""
    tensors = load_file(folder / SINGLE_FILE)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    (folder / SINGLE_FILE).unlink()
    save_torch_state_dict(copies, folder, max_shard_size=100_000)
    return copies


def test_a_complete_folder_is_accepted(folder: Path) -> None:
    Checkpoint(folder).check(expected(folder))


def test_shards_hold_what_was_saved(folder: Path) -> None:
    tensors = split(folder)
    checkpoint = Checkpoint(folder)
    checkpoint.check(expected(folder))
    assert len(checkpoint.files) >= 3
    assert all(path.stat().st_size < 130_000 for path in checkpoint.files)
    assert set(checkpoint.names) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.get(name), tensor)


@pytest.mark.parametrize("dim", [0, 1])
def test_the_slices_of_all_ranks_make_the_tensor(folder: Path, dim: int) -> None:
    checkpoint = Checkpoint(folder)
    parts = [checkpoint.get_slice(GATE, dim, rank, 4) for rank in range(4)]
    assert torch.equal(torch.cat(parts, dim), checkpoint.get(GATE))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({GATE: None}, f"{GATE} is missing"),
        ({"model.layers.1.mlp.gate.bias": torch.ones(8)}, "model.layers.1.mlp.gate.bias is unexpected"),
        ({GATE: torch.ones(32, 8, dtype=torch.bfloat16)}, rf"{GATE} must be \[8, 32\] BF16, found \[32, 8\] BF16"),
        ({GATE: torch.ones(8, 32)}, rf"{GATE} must be \[8, 32\] BF16, found \[8, 32\] F32"),
        ({GATE: torch.ones(8, 32).to(torch.float8_e4m3fn)}, rf"{GATE} must be \[8, 32\] BF16, found \[8, 32\] F8_E4M3"),
    ],
)
def test_a_tensor_that_does_not_fit_the_config_is_refused_by_name(folder: Path, changes: Any, complaint: str) -> None:
    rewrite(folder, changes)
    with pytest.raises(CheckpointError, match=complaint):
        Checkpoint(folder).check(expected(folder))


def test_what_vendor_loaders_skip_is_skipped(folder: Path) -> None:
    skipped = {"model.layers.2.attention.rotary_emb.inv_freq": torch.ones(4), "model.mtp.0.weight": torch.ones(2)}
    rewrite(folder, dict(skipped))
    Checkpoint(folder).check(expected(folder))


@pytest.mark.parametrize("lost_bytes", [1, 1000, 330_000])
def test_a_truncated_file_is_refused(folder: Path, lost_bytes: int) -> None:
    content = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(content[:-lost_bytes])
    with pytest.raises(
        CheckpointError, match=rf"{SINGLE_FILE}: truncated or damaged \({len(content) - lost_bytes} bytes"
    ):
        Checkpoint(folder)


def test_an_empty_file_is_refused(folder: Path) -> None:
    (folder / SINGLE_FILE).write_bytes(b"")
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        Checkpoint(folder)


def test_a_bit_flip_anywhere_in_the_first_entries_of_the_header_is_refused(folder: Path) -> None:
    content = bytearray((folder / SINGLE_FILE).read_bytes())
    start = content.index(b'"model.layers.0.attention.A_log"')
    specs = expected(folder)
    for place in [*range(8), *range(start, start + 200)]:
        for bit in (0, 6):
            content[place] ^= 1 << bit
            (folder / SINGLE_FILE).write_bytes(content)
            with pytest.raises(CheckpointError):
                Checkpoint(folder).check(specs)
            content[place] ^= 1 << bit


@pytest.mark.parametrize(
    "place", ["../elsewhere/model.safetensors", "/etc/model.safetensors", "sub/x.safetensors", "x.bin"]
)
def test_an_index_that_names_a_file_outside_the_folder_is_refused(folder: Path, place: str) -> None:
    split(folder)
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"][GATE] = place
    (folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"names '{place}'; expected safetensors files inside the folder"):
        Checkpoint(folder)


def test_an_index_that_disagrees_with_its_shards_is_refused(folder: Path) -> None:
    split(folder)
    index = json.loads((folder / INDEX_FILE).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][GATE] = next(file for file in files if file != index["weight_map"][GATE])
    (folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"places {GATE} in .*, which does not hold it"):
        Checkpoint(folder)
    (folder / files[0]).unlink()
    with pytest.raises(CheckpointError, match=rf"{files[0]}: no such file"):
        Checkpoint(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match="expected a JSON object with a weight_map"):
        Checkpoint(tmp_path)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"found pytorch_model\.bin, which could run code when read"):
        Checkpoint(tmp_path)


def test_a_tensor_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.x is missing"):
        Checkpoint(folder).get("model.layers.9.x")
