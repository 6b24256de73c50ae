"""config.json of an exported draft: what is written for which runtime, what never, what is understood when read."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

from dspark.config import DraftConfig, read_yaml, validated
from dspark.errors import CheckpointError, ConfigError
from dspark.export.layouts import Layout, recognise, speculators_json
from dspark.files import read_json

Runtime = Literal["hf", "sglang", "vllm", "speculators", "deepspec"]
Architecture = Literal["LingDSparkModel", "Qwen3DSparkModel"]
READABLE_ARCHITECTURES = ("LingDSparkModel", "Qwen3DSparkModel", "DSparkDraftModel")
_LAYOUT = read_yaml(Path(__file__).with_name("layout.yaml"), "the layout of config.json")


def architecture_for(target_architecture: str) -> Architecture:
    """The tag of a draft for this target: runtimes know Ling's drafts by a name of their own."""
    return "LingDSparkModel" if target_architecture.startswith("Bailing") else "Qwen3DSparkModel"


class FolderFields(NamedTuple):
    """What config.json says beside the architecture of the draft: the target's three ids, the anchors of its training,
    and the tag by which a runtime picks its class.
    """

    eos_token_id: int
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    num_anchors: int = 512
    architecture: Architecture = "LingDSparkModel"


def config_json(config: DraftConfig, fields: FolderFields, runtime: Runtime = "hf", target: str = "") -> dict[str, Any]:
    """The mapping to write as config.json: ``layout.yaml`` with what differs from draft to draft. ``target`` is where
    the speculators package finds the target.
    Raises: ConfigError when the mask token is the target's end or padding token, which a slot reads as a real one, or
    naming the field that the runtime has no room for.
    """
    mask = config.mask_token_id
    if mask in (fields.eos_token_id, fields.pad_token_id):
        raise ConfigError(f"draft.mask_token_id {mask} is the target's end or padding token; choose another id")
    for name in unsupported(config, runtime):
        found = f"draft.{name}: {getattr(config, name)!r} is not supported by {runtime}"
        raise ConfigError(f"{found}; export for another runtime")
    own = {
        # vLLM may not know the Ling tag yet, and DeepSpec does not.
        "architectures": ["Qwen3DSparkModel" if runtime in ("vllm", "deepspec") else fields.architecture],
        "rope_parameters": (config.rope_scaling or {"rope_type": "default"}) | {"rope_theta": config.rope_theta},
        "layer_types": ["full_attention"] * config.num_hidden_layers,
    }
    others = fields._asdict()
    del others["architecture"]
    tree = {**_LAYOUT["written"], **own, **others, **config.model_dump(mode="json", exclude={"rope_scaling"})}
    return speculators_json(tree, target) if runtime == "speculators" else tree


def unsupported(config: DraftConfig, runtime: Runtime) -> list[str]:
    """The fields that have a value which the runtime does not read, or reads and does not compute."""
    return [name for name, values in _LAYOUT["cannot"].get(runtime, {}).items() if getattr(config, name) in values]


def read_layout(folder: Path, num_target_layers: int | None = None) -> tuple[DraftConfig, Layout]:
    """The architecture, and the layout in which it stands. ``num_target_layers``: the target's, for a file without it.
    Raises: CheckpointError without a config.json; ConfigError naming a key that is missing, ambiguous or not computed
    here.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; expected the folder of an exported draft (dspark export)")
    layout = recognise(path, read_json(path))
    tree = layout.tree
    _refuse_other_networks(path, tree)
    known = {key: tree[key] for key in DraftConfig.model_fields if tree.get(key) is not None}
    if num_target_layers is not None:
        known.setdefault("num_target_layers", num_target_layers)
    needed = {"block_size", "markov_rank", "markov_head_type", "enable_confidence_head", "rms_norm_eps"}
    needed |= {"rope_theta", "num_target_layers"}
    absent = sorted(key for key in needed if key not in known)
    if absent:
        raise ConfigError(f"{path}: {', '.join(absent)} missing at the top level; runtimes and we never assume it")
    config = validated(DraftConfig, known, path, is_strict=True)
    kinds, layers = tree.get("layer_types"), ["full_attention"] * config.num_hidden_layers
    if kinds not in (None, layers):
        raise ConfigError(f"{path}: layer_types is {kinds}, expected {layers}")
    return config, layout


def _refuse_other_networks(path: Path, tree: dict[str, Any]) -> None:
    tags = tree.get("architectures")
    if not isinstance(tags, list) or not any(tag in READABLE_ARCHITECTURES for tag in tags):
        raise ConfigError(f"{path}: architectures is {tags}, expected one of {', '.join(READABLE_ARCHITECTURES)}")
    for key, values in _LAYOUT["understood"].items():
        if tree.get(key) not in values:
            raise ConfigError(f"{path}: {key} is {tree[key]!r}, only {values[0]!r} is supported in a DSpark draft")
    if (tree.get("draft_vocab_size") or tree.get("vocab_size")) != tree.get("vocab_size"):
        raise ConfigError(f"{path}: draft_vocab_size {tree['draft_vocab_size']} differs from vocab_size")
