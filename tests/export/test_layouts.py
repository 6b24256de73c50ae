"""Drafts of other trainers come in as ours, bit for bit; what a file leaves open is refused and never guessed."""

import json
import math
import random
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import FIELDS, SMALL, edit_config, make_draft, proposals, tables
from safetensors.torch import load_file, save_file

from dspark.config import DraftConfig
from dspark.draft.model import DraftModel
from dspark.draft.proposal import ContextCache, extend, propose
from dspark.errors import CheckpointError, ConfigError, DraftMismatchError, DsparkError
from dspark.export.draft_config import read_layout
from dspark.export.draft_folder import read_draft, write_draft
from dspark.export.layouts import speculators_json

MHA = SMALL.model_copy(update={"num_key_value_heads": 4})
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def read_tree(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return tree


def write_tree(folder: Path, tree: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(tree))
    (folder / "provenance.json").unlink(missing_ok=True)


def as_specforge(folder: Path) -> None:
    """What SpecForge saves: the draft's own fields in a section of their own."""
    tree = read_tree(folder)
    nested = ("target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head")
    nested += ("confidence_head_with_markov",)
    section = {name: tree.pop(name) for name in nested}
    is_mha = tree["num_attention_heads"] == tree["num_key_value_heads"]
    section |= {"projector_type": "dspark", "attention_mode": "mha" if is_mha else "gqa", "confidence_head_alpha": 1.0}
    for name in ("sample_from_anchor", "own_tables", "num_anchors"):
        del tree[name]
    write_tree(folder, tree | {"architectures": ["DSparkDraftModel"], "auto_map": {}, "dflash_config": section})


def as_speculators(folder: Path) -> None:
    write_tree(folder, speculators_json(read_tree(folder), "a-target"))


def as_deepspec(folder: Path) -> None:
    tree = read_tree(folder)
    for name in ("sample_from_anchor", "own_tables"):
        del tree[name]
    write_tree(folder, tree | {"architectures": ["Qwen3DSparkModel"], "sliding_window": None, "use_cache": True})


def as_vllm(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    tree = read_tree(folder)
    tree["eagle_aux_hidden_state_layer_ids"] = [each + 1 for each in tree.pop("target_layer_ids")]
    write_tree(folder, tree)


LAYOUTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "specforge": (as_specforge, "specforge"),
    "speculators": (as_speculators, "speculators"),
    "deepspec": (as_deepspec, "flat"),
    "vllm": (as_vllm, "flat"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4}, {"markov_head_type": "rnn"}], ids=str)
def test_every_layout_comes_in_with_every_bit(tmp_path: Path, layout: str, changes: dict[str, Any]) -> None:
    draft = make_draft(SMALL.model_copy(update=changes))
    write_draft(draft, tmp_path, FIELDS)
    translate, name = LAYOUTS[layout]
    translate(tmp_path)
    assert read_layout(tmp_path)[1].name == name
    found = read_draft(tmp_path, tables(SMALL))
    assert found.config == draft.config
    assert all(torch.equal(found.state_dict()[key], tensor) for key, tensor in draft.state_dict().items())
    assert proposals(found) == proposals(draft)


@pytest.mark.parametrize("runtime", ["hf", "sglang", "vllm", "speculators", "deepspec"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"markov_head_type": "gated"},
        {"sample_from_anchor": False},
        {"rope_scaling": YARN},
        {"own_tables": True},
        {"confidence_head_with_markov": False},
    ],
    ids=str,
)
def test_what_a_runtime_can_hold_comes_back_and_the_rest_is_named(
    tmp_path: Path, runtime: Any, changes: dict[str, Any]
) -> None:
    cannot = {"own_tables": ("sglang", "speculators"), "sample_from_anchor": ("deepspec",)}
    cannot |= {"markov_head_type": ("vllm",)}
    draft = make_draft(SMALL.model_copy(update=changes))
    name = next(iter(changes), "")
    if runtime in cannot.get(name, ()):
        with pytest.raises(ConfigError, match=rf"draft\.{name}: .* is not supported by {runtime}"):
            write_draft(draft, tmp_path / "draft", FIELDS, runtime=runtime)
        assert not list(tmp_path.iterdir())
        return
    write_draft(draft, tmp_path, FIELDS, runtime=runtime)
    found = read_draft(tmp_path, tables(SMALL))
    assert found.config == draft.config
    assert proposals(found) == proposals(draft)
    once = load_file(tmp_path / "model.safetensors")
    write_draft(found, tmp_path / "again", FIELDS, runtime=runtime)
    twice = load_file(tmp_path / "again" / "model.safetensors")
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[key], twice[key]) for key in once)
    assert read_tree(tmp_path) == read_tree(tmp_path / "again")


def test_a_bonus_anchors_block_has_one_row_more_and_another_meaning(tmp_path: Path) -> None:
    """In speculators' files block_size counts that row."""
    draft = make_draft(SMALL.model_copy(update={"sample_from_anchor": False}))
    write_draft(draft, tmp_path, FIELDS, runtime="speculators")
    assert (read_tree(tmp_path)["block_size"], draft.config.block_size) == (6, 5)
    assert proposals(draft) != proposals(make_draft())


def test_rotary_pairs_of_neighbours_are_put_in_halves_and_no_product_changes(tmp_path: Path) -> None:
    """Against a draft that turns neighbours: rotating permuted rows in halves is permuting rotated rows."""
    draft = make_draft()
    write_draft(draft, tmp_path, FIELDS)
    weights, half = load_file(tmp_path / "model.safetensors"), SMALL.head_dim // 2
    for name, tensor in weights.items():
        if name.split(".")[-2] in ("q_proj", "k_proj", "q_norm", "k_norm"):
            weights[name] = tensor.unflatten(0, (-1, 2, half)).transpose(1, 2).flatten(0, 2).contiguous()
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "provenance.json").unlink()
    edit_config(tmp_path, rope_is_neox_style=False)
    assert proposals(read_draft(tmp_path, tables(SMALL))) == proposals(draft)
    edit_config(tmp_path, rope_is_neox_style=True)
    assert proposals(read_draft(tmp_path, tables(SMALL))) != proposals(draft)


def test_tables_of_its_own_are_refused_unless_asked_for_and_then_read(tmp_path: Path) -> None:
    draft = make_draft()
    write_draft(draft, tmp_path, FIELDS, runtime="deepspec")
    others = tables(SMALL, seed=9)
    with pytest.raises(DraftMismatchError, match=r"embed_tokens\.weight differs from the target's.*--own-tables"):
        read_draft(tmp_path, others)
    found = read_draft(tmp_path, others, is_taking_tables=True)
    assert found.config.own_tables
    assert proposals(found) == proposals(draft)
    write_draft(found, tmp_path / "kept", FIELDS)
    assert proposals(read_draft(tmp_path / "kept", others)) == proposals(draft)
    assert not read_draft(tmp_path, tables(SMALL), is_taking_tables=True).config.own_tables


@pytest.mark.parametrize(
    ("layout", "changes", "complaint"),
    [
        ("specforge", {"mask_token_id": 3}, r"mask_token_id is ambiguous: mask_token_id 3, dflash_config\.mask_token"),
        ("specforge", {"rope_theta": 1.0}, r"rope_theta is ambiguous"),
        ("specforge", {"num_key_value_heads": 4}, r"attention_mode is 'gqa' with 4 and 4 heads"),
        ("specforge", {"dflash_config": {"projector_type": "dflash"}}, r"projector_type is 'dflash'"),
        ("specforge", {"dflash_config": 3}, r"dflash_config is 3, expected a mapping"),
        ("vllm", {"target_layer_ids": [2, 5, 7]}, r"target_layer_ids is ambiguous"),
        ("vllm", {"dspark_bonus_anchor": True}, r"sample_from_anchor is ambiguous"),
        ("vllm", {"is_causal": True}, r"is_causal is True"),
        ("speculators", {"sample_from_anchor": None}, r"sample_from_anchor is missing; older files mean false"),
        ("speculators", {"aux_hidden_state_layer_ids": None}, r"never guessed"),
        ("speculators", {"speculators_model_type": "eagle3"}, r"expected 'dspark'"),
        ("speculators", {"draft_vocab_size": 32}, r"draft_vocab_size 32"),
        ("deepspec", {"num_target_layers": None}, r"num_target_layers missing"),
        ("deepspec", {"markov_rank": "6"}, r"markov_rank"),
        ("deepspec", {"enable_confidence_head": "no"}, r"enable_confidence_head"),
        ("deepspec", {"rope_scaling": {"type": "linear", "factor": 2}}, r"rope_scaling is ambiguous"),
        ("deepspec", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 6e6}}, r"rope_scaling must be linear"),
        ("deepspec", {"is_neox_style": False, "rope_is_neox_style": True}, r"is_neox is ambiguous"),
        ("deepspec", {"rope_is_neox_style": 0}, r"rope_is_neox_style is 0, expected true or false"),
        ("deepspec", {"dspark_bonus_anchor": "true"}, r"dspark_bonus_anchor is 'true', expected true or false"),
        ("deepspec", {"dspark_config": {"dspark_block_size": 4}}, r"block_size is ambiguous"),
        ("deepspec", {"aux_hidden_state_layer_ids": [1, 2, 3]}, r"target_layer_ids is ambiguous"),
        ("deepspec", {"causal": True}, r"is_causal is True"),
        ("deepspec", {"layer_types": ["full_attention"]}, r"layer_types is \['full_attention'\], expected"),
        ("deepspec", {"final_logit_softcapping": 30}, r"final_logit_softcapping is 30"),
        ("deepspec", {"rope_parameters": {"rope_type": "linear", "type": "yarn"}}, r"rope_type is ambiguous"),
        ("deepspec", {"rope_parameters": YARN | {"attention_factor": math.nan}}, r"rope_scaling must be"),
        ("deepspec", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, r"rope_scaling must be"),
        ("speculators", {"target_layer_ids": [0, 1, 2]}, r"target_layer_ids is ambiguous"),
        ("speculators", {"dflash_config": {"mask_token_id": 4}}, r"mask_token_id is ambiguous"),
        ("speculators", {"rope_theta": 5.0}, r"rope_theta is ambiguous"),
        ("speculators", {"is_causal": True}, r"is_causal is True"),
    ],
    ids=str,
)
def test_what_is_ambiguous_or_never_guessed_is_named(
    tmp_path: Path, layout: str, changes: dict[str, Any], complaint: str
) -> None:
    write_draft(make_draft(), tmp_path, FIELDS)
    LAYOUTS[layout][0](tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=complaint):
        read_layout(tmp_path)


def test_two_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    write_draft(make_draft(), tmp_path, FIELDS)
    weights = load_file(tmp_path / "model.safetensors")
    weights["logit_head.markov_w1.weight"] = weights["markov_head.markov_w1.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"are one tensor; keep the one that is right"):
        read_draft(tmp_path, tables(SMALL))
    del weights["markov_head.markov_w1.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "provenance.json").unlink()
    assert proposals(read_draft(tmp_path, tables(SMALL))) == proposals(make_draft())


VALUES = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7,
    10**30,
    2**63,
    1.5,
    -0.0,
    1e308,
    "",
    "6",
    "no",
    "vanilla",
    [],
    [1],
    [-1, 4],
)
VALUES += (
    [1, 4, 6.0],
    [True],
    [[1]],
    {},
    {"rope_type": "yarn"},
    {"a": {"b": []}},
    float("nan"),
    float("inf"),
    "\ud800x",
)


def test_two_hundred_mutated_configs_end_in_one_clear_error_or_mean_what_they_say(tmp_path: Path) -> None:
    """Types, signs, missing, extra, nested, huge. What loads has each of the draft's fields just as the file says it,
    or, where the file says none, the one value that stands for it.
    """
    folders = {}
    for layout, (translate, _) in LAYOUTS.items():
        folders[layout] = tmp_path / layout
        write_draft(make_draft(), folders[layout], FIELDS)
        translate(folders[layout])
    draw, num_loaded = random.Random(0), 0
    for number in range(220):
        folder = folders[list(LAYOUTS)[number % len(LAYOUTS)]]
        tree = original = read_tree(folder)
        tree = mutated(deepcopy(tree), draw)
        (folder / "config.json").write_text(json.dumps(tree))
        with suppress(DsparkError):
            found = read_draft(folder, tables(SMALL)).config
            num_loaded += 1
            assert found == expected_config(tree), tree
        (folder / "config.json").write_text(json.dumps(original))
    assert 20 < num_loaded < 150


def mutated(tree: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """One field changed, removed or added, anywhere."""
    place = draw.choice([tree, tree, *(value for value in tree.values() if isinstance(value, dict) and value)])
    key = draw.choice(list(place))
    if draw.random() < 0.15:
        del place[key]
    elif draw.random() < 0.1:
        place[draw.choice(["dspark_markov_rank", "is_causal", "dspark_config", "mask_token", "d2t"])] = draw.choice(
            VALUES
        )
    else:
        place[key] = draw.choice(VALUES)
    return tree


def expected_config(tree: dict[str, Any]) -> DraftConfig:
    """What a mutated file says, read without a look at our reader: the sections opened, ids and rows counted down."""
    section = tree.get("dflash_config") or tree.get("transformer_layer_config") or {}
    said = tree | {key: value for key, value in section.items() if value is not None}
    if "speculators_model_type" in tree:
        said |= {key: tree[key] for key in ("block_size", "markov_rank", "mask_token_id") if key in tree}
        said["block_size"] = tree["block_size"] - (not tree["sample_from_anchor"])
        said["target_layer_ids"] = [each - 1 for each in tree["aux_hidden_state_layer_ids"]]
    elif "eagle_aux_hidden_state_layer_ids" in tree and tree["eagle_aux_hidden_state_layer_ids"] is not None:
        said["target_layer_ids"] = [each - 1 for each in tree["eagle_aux_hidden_state_layer_ids"]]
    rope = said.get("rope_parameters") or {}
    said["rope_theta"] = said["rope_theta"] if said.get("rope_theta") is not None else rope["rope_theta"]
    told = {key: said[key] for key in DraftConfig.model_fields if said.get(key) is not None}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    if scaling.get("rope_type", "default") != "default":
        told["rope_scaling"] = scaling
    for key, value in told.items():
        assert type(value) is not str or key == "markov_head_type", key
    return DraftConfig.model_validate(told)


def test_a_block_whose_anchor_drafts_nothing_is_trained_as_it_is_decoded() -> None:
    """Slot j under teacher forcing is what the draft says at slot j when the text's own tokens are picked."""
    config = SMALL.model_copy(update={"sample_from_anchor": False})
    draft: DraftModel = make_draft(config)
    generator = torch.Generator().manual_seed(4)
    ids_T, taps_TLD = torch.randint(61, (20,), generator=generator), torch.randn(20, 3, 16, generator=generator)
    anchors_A = torch.tensor([3, 9, 12])
    said = draft(ids_T, torch.arange(20), taps_TLD, torch.zeros(3).long(), anchors_A)
    for block, anchor in enumerate(anchors_A.tolist()):
        cache = ContextCache(draft)
        extend(draft, cache, taps_TLD[:anchor])
        rest = partial(next, iter(ids_T[anchor + 1 :].tolist()))
        proposal = propose(draft, cache, int(ids_T[anchor]), lambda _, rest=rest: rest())
        logits_KV = draft.base_logits(said.hidden_AKD[block]) + said.mixed_AKR[block] @ said.markov_VR.T
        torch.testing.assert_close(proposal.logits_KV, logits_KV, atol=1e-4, rtol=1e-4)
