"""An exported draft is what runtimes load, comes back unchanged, and is never half-written or for another target."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from exported import FIELDS, SMALL, edit_config, make_draft, proposals, rewrite, tables
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen3Config

from dspark.config import DraftConfig
from dspark.draft.model import DraftModel
from dspark.errors import CheckpointError, ConfigError, DraftMismatchError
from dspark.export.draft_config import FolderFields
from dspark.export.draft_folder import check_target, draft_fingerprint, draft_parameter_count, read_draft, write_draft

FORBIDDEN_KEYS = ("quantization_config", "auto_map", "num_nextn_predict_layers", "layer_group_size")
FORBIDDEN_KEYS += ("partial_rotary_factor", "rope_interleave", "speculators_model_type")
"""Keys that make a runtime take the folder for something else."""
LING_FLASH = DraftConfig(
    vocab_size=157_184,
    hidden_size=2560,
    intermediate_size=6144,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    max_position_embeddings=262_144,
    num_target_layers=42,
    target_layer_ids=(1, 11, 23, 29, 35),
    mask_token_id=156_901,
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4},
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn"},
        {"enable_confidence_head": False},
        {"confidence_head_with_markov": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("with_tables", [False, True])
def test_a_draft_read_back_proposes_the_same_tokens(tmp_path: Path, changes: dict, with_tables: bool) -> None:
    draft = make_draft(SMALL.model_copy(update=changes))
    write_draft(draft, tmp_path / "draft", FIELDS, runtime="deepspec" if with_tables else "hf")
    again = read_draft(tmp_path / "draft", tables(SMALL))
    assert again.config == draft.config
    assert proposals(again) == proposals(draft)
    assert len({tuple(ids) for ids, _ in proposals(draft)}) > 5, "the proposals say something"


def test_the_file_holds_exactly_the_canonical_tensors_in_bfloat16(tmp_path: Path) -> None:
    write_draft(make_draft(), tmp_path / "draft", FIELDS)
    layer = {
        "input_layernorm.weight": [16],
        "self_attn.q_proj.weight": [32, 16],
        "self_attn.k_proj.weight": [16, 16],
        "self_attn.v_proj.weight": [16, 16],
        "self_attn.o_proj.weight": [16, 32],
        "self_attn.q_norm.weight": [8],
        "self_attn.k_norm.weight": [8],
        "post_attention_layernorm.weight": [16],
        "mlp.gate_proj.weight": [24, 16],
        "mlp.up_proj.weight": [24, 16],
        "mlp.down_proj.weight": [16, 24],
    }
    expected = {f"layers.{index}.{name}": shape for index in range(2) for name, shape in layer.items()} | {
        "norm.weight": [16],
        "fc.weight": [16, 48],
        "hidden_norm.weight": [16],
        "markov_head.markov_w1.weight": [61, 6],
        "markov_head.markov_w2.weight": [61, 6],
        "confidence_head.proj.weight": [1, 22],
        "confidence_head.proj.bias": [1],
    }
    with safe_open(tmp_path / "draft" / "model.safetensors", framework="pt") as opened:
        found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
        assert opened.metadata() == {"format": "pt"}
    assert {name: part.get_shape() for name, part in found.items()} == expected
    assert {part.get_dtype() for part in found.values()} == {"BF16"}


def test_tied_tables_are_written_twice(tmp_path: Path) -> None:
    draft = make_draft().bfloat16()
    table_VD = tables(SMALL)[0].bfloat16()
    draft.bind(table_VD, table_VD)
    write_draft(draft, tmp_path, FIELDS, runtime="deepspec")
    weights = load_file(tmp_path / "model.safetensors")
    assert torch.equal(weights["embed_tokens.weight"], table_VD)
    assert torch.equal(weights["lm_head.weight"], table_VD)
    read_draft(tmp_path, (table_VD, table_VD))


@pytest.mark.parametrize(("kind", "names"), [("gated", "gate_proj"), ("rnn", "joint_proj")])
def test_other_markov_heads_add_one_projection(kind: str, names: str) -> None:
    extra = shapes_of(LING_FLASH.model_copy(update={"markov_head_type": kind})) - shapes_of(LING_FLASH)
    rows, columns = (256, 2816) if kind == "gated" else (768, 3072)
    assert extra == {(f"markov_head.{names}.weight", (rows, columns)), (f"markov_head.{names}.bias", (rows,))}


def shapes_of(config: DraftConfig) -> set[tuple[str, tuple[int, ...]]]:
    with torch.device("meta"):
        return {(name, tuple(tensor.shape)) for name, tensor in DraftModel(config).state_dict().items()}


def test_parameter_counts_are_those_of_published_drafts() -> None:
    tiny = LING_FLASH.model_copy(
        update={
            "hidden_size": 1536,
            "intermediate_size": 4608,
            "num_hidden_layers": 3,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "markov_rank": 512,
        }
    )
    minicpm = LING_FLASH.model_copy(
        update={
            "vocab_size": 130_560,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
        }
    )
    assert len(shapes_of(LING_FLASH)) == 62
    assert draft_parameter_count(LING_FLASH) == 558_925_825
    assert draft_parameter_count(LING_FLASH, with_tables=True) == 1_363_707_905
    assert draft_parameter_count(tiny) == 274_217_729
    assert draft_parameter_count(minicpm) == 323_776_001


def test_config_json_says_what_runtimes_read_and_nothing_that_misleads_them(tmp_path: Path) -> None:
    write_draft(make_draft(), tmp_path / "draft", FolderFields(57, 58, num_anchors=9, architecture="Qwen3DSparkModel"))
    tree = json.loads((tmp_path / "draft" / "config.json").read_text())
    wanted = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": 5,
        "mask_token_id": 60,
        "target_layer_ids": [1, 4, 6],
        "num_target_layers": 8,
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "rope_theta": 6000000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 6000000.0},
        "layer_types": ["full_attention"] * 2,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eos_token_id": 57,
        "num_anchors": 9,
    }
    assert {key: tree.get(key) for key in wanted} == wanted
    assert not {*FORBIDDEN_KEYS, "draft_vocab_size"} & tree.keys()


def test_transformers_reads_config_json_as_qwen3(tmp_path: Path) -> None:
    write_draft(make_draft(), tmp_path / "draft", FIELDS)
    config = AutoConfig.from_pretrained(tmp_path / "draft")
    assert type(config) is Qwen3Config
    assert (config.num_hidden_layers, config.head_dim, config.num_key_value_heads) == (2, 8, 2)
    assert config.rope_parameters["rope_theta"] == 6000000.0
    assert config.dtype == torch.bfloat16


@pytest.mark.parametrize("fields", [FolderFields(60), FolderFields(57, 60)], ids=["eos", "pad"])
def test_a_mask_token_that_means_something_is_refused(tmp_path: Path, fields: FolderFields) -> None:
    with pytest.raises(ConfigError, match="mask_token_id 60"):
        write_draft(make_draft(), tmp_path / "draft", fields)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["BailingMoeV3ForCausalLM"]}, "architectures"),
        ({"model_type": "bailing_hybrid"}, "model_type"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 6e6}}, "rope_scaling must be"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"dflash_config": {"block_size": 8}}, "dflash_config"),
        ({"draft_vocab_size": 32}, "draft_vocab_size"),
        ({"target_layer_ids": [1, 4, 7]}, "target_layer_ids"),
        ({"target_layer_ids": [4, 1, 6]}, "target_layer_ids"),
        ({"target_layer_ids": [-1, 4, 6]}, "target_layer_ids"),
        ({"mask_token_id": 61}, "mask_token_id"),
        ({"markov_rank": 0}, "markov_rank"),
        ({"block_size": None}, "block_size"),
    ],
    ids=str,
)
def test_a_config_for_another_network_is_refused_by_name(tmp_path: Path, changes: dict, complaint: str) -> None:
    write_draft(make_draft(), tmp_path, FIELDS)
    edit_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=complaint):
        read_draft(tmp_path, tables(SMALL))


def test_a_key_that_must_not_be_assumed_is_missed_by_name(tmp_path: Path) -> None:
    write_draft(make_draft(), tmp_path, FIELDS)
    tree = json.loads((tmp_path / "config.json").read_text())
    del tree["block_size"]
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="block_size missing"):
        read_draft(tmp_path, tables(SMALL))


def test_missing_unknown_and_misshapen_tensors_are_refused_by_name(tmp_path: Path) -> None:
    for changes, complaint in (
        ({"fc.weight": None}, r"fc\.weight is missing"),
        ({"model.fc.weight": torch.zeros(1)}, r"model\.fc\.weight is unexpected"),
        ({"fc.weight": torch.zeros(16, 32)}, r"fc\.weight must be \[16, 48\] F32, found \[16, 32\]"),
        ({"fc.weight": torch.zeros(16, 48, dtype=torch.int8)}, r"fc\.weight holds torch\.int8"),
        ({"embed_tokens.weight": torch.zeros(61, 16)}, r"lm_head\.weight is missing"),
    ):
        write_draft(make_draft(), tmp_path / "draft", FIELDS)
        rewrite(tmp_path / "draft", changes)
        with pytest.raises(CheckpointError, match=complaint):
            read_draft(tmp_path / "draft", tables(SMALL))


def test_a_draft_for_another_target_is_refused_by_name(tmp_path: Path) -> None:
    write_draft(make_draft(), tmp_path, FIELDS, runtime="deepspec")
    with pytest.raises(DraftMismatchError, match=r"embed_tokens\.weight differs"):
        read_draft(tmp_path, tables(SMALL, seed=3))
    with pytest.raises(DraftMismatchError, match=r"lm_head\.weight differs"):
        read_draft(tmp_path, (tables(SMALL)[0], tables(SMALL)[1] * 2))
    with pytest.raises(DraftMismatchError, match="vocab_size is 61 in the draft and 62 in the target"):
        read_draft(tmp_path, (torch.zeros(62, 16), torch.zeros(62, 16)))
    with pytest.raises(DraftMismatchError, match=r"hidden_size is 16 in the draft and 32.*num_target_layers is 8 .* 9"):
        check_target(tmp_path, vocab_size=61, hidden_size=32, num_layers=9)
    check_target(tmp_path, vocab_size=61, hidden_size=16, num_layers=8, fingerprint="aa")
    write_draft(make_draft(), tmp_path, FIELDS, provenance={"target_fingerprint": "aa"})
    check_target(tmp_path, vocab_size=61, hidden_size=16, fingerprint="aa")
    with pytest.raises(DraftMismatchError, match="trained for the target with fingerprint aa, this one has bb"):
        check_target(tmp_path, vocab_size=61, hidden_size=16, fingerprint="bb")


def test_damage_is_noticed(tmp_path: Path) -> None:
    write_draft(make_draft(), tmp_path, FIELDS)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:])
    with pytest.raises(CheckpointError, match="damaged: sha256"):
        read_draft(tmp_path, tables(SMALL))
    path.write_bytes(whole[:-40])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        read_draft(tmp_path, tables(SMALL))
    path.write_bytes(whole)
    (tmp_path / "provenance.json").write_text('{"made_by": "somebody else"}')
    read_draft(tmp_path, tables(SMALL))
    (tmp_path / "provenance.json").write_text('{"made_by"')
    with pytest.raises(ConfigError, match=r"provenance\.json: not valid JSON"):
        read_draft(tmp_path, tables(SMALL))
    (tmp_path / "provenance.json").unlink()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or"):
        read_draft(tmp_path, tables(SMALL))
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        read_draft(tmp_path / "nowhere", tables(SMALL))


def test_a_released_draft_in_shards_is_read(tmp_path: Path) -> None:
    draft = make_draft()
    write_draft(draft, tmp_path, FIELDS, runtime="deepspec")
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "provenance.json").unlink()
    places = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(sorted(weights))}
    for file in set(places.values()):
        save_file({name: weights[name] for name in weights if places[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert proposals(read_draft(tmp_path, tables(SMALL))) == proposals(draft)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "../fc"}}))
    with pytest.raises(CheckpointError, match="files inside the folder"):
        read_draft(tmp_path, tables(SMALL))


def test_an_earlier_draft_is_replaced_and_anything_else_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    write_draft(make_draft(seed=1), folder, FIELDS)
    first = draft_fingerprint(folder)
    write_draft(make_draft(seed=2), folder, FIELDS)
    assert draft_fingerprint(folder) != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="not a draft"):
        write_draft(make_draft(), tmp_path / "thesis", FIELDS)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


def test_nothing_but_a_draft_is_replaced_and_links_and_dots_lead_to_it(tmp_path: Path) -> None:
    """Also where a file of the user's lies in it, or config.json only mentions a draft."""
    write_draft(make_draft(seed=1), tmp_path / "draft", FIELDS)
    before = draft_fingerprint(tmp_path / "draft")
    (tmp_path / "draft" / "notes.md").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds notes\.md beside a draft"):
        write_draft(make_draft(seed=2), tmp_path / "draft", FIELDS)
    (tmp_path / "draft" / "notes.md").unlink()
    assert draft_fingerprint(tmp_path / "draft") == before
    (tmp_path / "link").symlink_to(tmp_path / "draft")
    for seed, place in ((2, tmp_path / "draft" / ".." / "draft"), (3, tmp_path / "link"), (4, tmp_path / "link")):
        write_draft(make_draft(seed=seed), place, FIELDS)
        assert proposals(read_draft(tmp_path / "draft", tables(SMALL))) == proposals(make_draft(seed=seed))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "link"]
    for content in (b'{"architectures": ["LlamaForCausalLM"], "note": "LingDSparkModel"}', b"\xff\xfe{}", b"["):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match="something that is not a draft"):
            write_draft(make_draft(), tmp_path / "other", FIELDS)
        assert (tmp_path / "other" / "config.json").read_bytes() == content


def test_numbers_that_are_codes_or_too_large_for_bfloat16_are_refused(tmp_path: Path) -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        write_draft(make_draft(), tmp_path / "draft", FIELDS)
        rewrite(tmp_path / "draft", {"norm.weight": torch.ones(16).to(dtype)})
        with pytest.raises(CheckpointError, match=r"norm\.weight holds torch\.float8"):
            read_draft(tmp_path / "draft", tables(SMALL))
    draft = make_draft()
    draft.norm.weight.data[0] = 3.4e38  # infinite when it is rounded
    with pytest.raises(CheckpointError, match=r"norm\.weight holds numbers that are not finite in bfloat16"):
        write_draft(draft, tmp_path / "large", FIELDS)


def test_weights_that_are_not_finite_are_never_exported(tmp_path: Path) -> None:
    draft = make_draft()
    with torch.no_grad():
        draft.fc.weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"fc\.weight holds numbers that are not finite"):
        write_draft(draft, tmp_path / "draft", FIELDS)
    assert not list(tmp_path.iterdir())


def test_a_killed_export_leaves_the_earlier_draft_whole(tmp_path: Path) -> None:
    write_draft(make_draft(seed=1), tmp_path / "draft", FIELDS)
    before = draft_fingerprint(tmp_path / "draft")
    program = (
        "import sys, time; from pathlib import Path; import dspark.export.draft_folder as room\n"
        "real = room.save_tensors\n"
        "def slow(*arguments, **options):\n"
        "    real(*arguments, **options); Path(sys.argv[1], 'written').touch(); time.sleep(60)\n"
        "room.save_tensors = slow\n"
        "from exported import FIELDS, make_draft\n"
        "room.write_draft(make_draft(seed=2), Path(sys.argv[1], 'draft'), FIELDS)\n"
    )
    search = os.pathsep.join(map(str, Path(__file__).parents[1:3]))
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env=os.environ | {"PYTHONPATH": search})
    deadline = time.monotonic() + 60
    while not (tmp_path / "written").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "written").exists(), "the export was killed while it wrote"
    assert draft_fingerprint(tmp_path / "draft") == before
    write_draft(make_draft(seed=2), tmp_path / "draft", FIELDS)
    assert draft_fingerprint(tmp_path / "draft") != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "written"]
