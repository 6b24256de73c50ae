"""The frozen description of a run and of a draft; load, override, save."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dspark.errors import ConfigError, RecordError
from dspark.files import write_whole

ModelT = TypeVar("ModelT", bound=BaseModel)


def _refuse_truth(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {value}")
    return value


def _refuse_no_folder(path: Path) -> Path:
    if path == Path() or "\0" in str(path):
        raise ValueError(f"must name a folder, got {str(path)!r}")
    return path


def _refuse_secrets(url: str) -> str:
    """A base address alone: what may hold a password is refused and never repeated."""
    found = re.fullmatch(r"https?://([\w.-]+|\[[\da-f:]+\])(:(\d{1,5}))?(/[\w.~/-]*)?", url, re.ASCII | re.IGNORECASE)
    if not found or int(found[3] or 0) > 65535:
        raise ValueError("must be like http://host:port/v1, without user, query or fragment")
    return url.rstrip("/")


def _check_values(**lists: tuple[Any, ...]) -> None:
    for name, values in lists.items():
        if len(set(values)) < len(values):
            raise ValueError(f"{name} must differ from each other, got {list(values)}")


def is_positive(value: Any) -> bool:
    """Whether it is a number above 0, and not so large that no float has it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**63


SCALED_ROPES: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Ways to stretch rotary frequencies, by their names in transformers, and the numbers that each must have."""
ROPE_CHOICES = {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
"""Numbers that they may have."""
IsNumber = BeforeValidator(_refuse_truth)
PositiveInt = Annotated[int, Field(ge=1, lt=2**63), IsNumber]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**63), IsNumber]
Width = Annotated[int, Field(ge=1, le=2**20), IsNumber]
"""A size that memory is taken for; a slip of the keyboard is refused before the memory is asked for."""
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), IsNumber]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False), IsNumber]
Fraction = Annotated[float, Field(ge=0, le=1), IsNumber]
Share = Annotated[float, Field(gt=0, le=1), IsNumber]
Beta = Annotated[float, Field(ge=0, lt=1), IsNumber]
Folder = Annotated[Path, AfterValidator(_refuse_no_folder)]
BaseUrl = Annotated[str, AfterValidator(_refuse_secrets)]


class Section(BaseModel):
    """A part of a run, of a header or of a manifest: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetSection(Section):
    """Which frozen model is drafted for."""

    path: str
    """A name (``ling-3.0-flash``, ``ling-3.0-tiny``, ``ling-3.0-nano``) or a Hugging Face folder."""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"


class DataSection(Section):
    """Where prompts come from and how the target answers them."""

    sources: tuple[str, ...]
    """JSONL or parquet files, or hub names; each row has ``messages``, ``prompt`` or ``text``. Or one YAML file that
    describes a mixture (``dspark.data.mixture``)."""
    split: str = "train"
    max_conversations: PositiveInt | None = None
    temperatures: tuple[NonNegativeFloat, ...] = (1.0,)
    thinking: tuple[bool, ...] = (False,)
    """Every prompt is answered once at every temperature, with and without thinking as this says; probes, and eval
    unless told otherwise, ask as the first says."""
    max_response_tokens: PositiveInt = 2048
    generation_batch_size: PositiveInt = 64
    endpoints: tuple[BaseUrl, ...] = ()
    """Base addresses of OpenAI-compatible servers of the target; none: the target answers in process."""
    served_model: str = ""
    """The target's name at the endpoints."""
    endpoint_route: Literal["completions", "chat/completions"] = "completions"
    """chat/completions is for servers that take text only; what is not exact then: dspark/data/endpoints.py."""
    concurrency: PositiveInt = 64
    """Requests in flight per endpoint."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.endpoints and not self.served_model:
            raise ValueError("served_model is missing: the name under which the endpoints serve the target")
        _check_values(temperatures=self.temperatures, thinking=self.thinking)
        if not (self.temperatures and self.thinking):
            raise ValueError("temperatures and thinking must each hold a value, or nothing is asked")
        if self.endpoint_route == "chat/completions" and any(self.thinking):
            raise ValueError("thinking needs endpoint_route completions, whose ids hold the thoughts in their place")
        return self


class RecordSection(Section):
    """Where the target's own words and states are stored."""

    folder: Folder
    max_tokens: PositiveInt = 4096
    """Longest sequence; a longer one is refused, never cut in silence."""
    shard_tokens: PositiveInt = 65_536
    taps: Literal["target", "float8"] = "target"
    """How the tapped states are stored: as the target says them, or in half the bytes (``dspark record --measure-fp8``
    says what that costs)."""
    ring_shards: NonNegativeInt = 0
    """Above 0, so many shards are on the disk at a time, and recorders and the trainer run together."""


class DraftConfig(Section):
    """The complete architecture of a DSpark draft (specs: Qwen3-style block draft with Markov and confidence heads)."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: Width
    num_hidden_layers: Annotated[Width, Field(le=1000)]
    num_attention_heads: Width
    num_key_value_heads: Width
    head_dim: Annotated[Width, Field(le=256)]
    max_position_embeddings: PositiveInt
    num_target_layers: PositiveInt
    target_layer_ids: tuple[NonNegativeInt, ...]
    """Zero-based target layer outputs, strictly increasing, at most num_target_layers - 2."""
    block_size: Annotated[Width, Field(le=256)] = 8
    """Tokens drafted a round; the target verifies one more row."""
    mask_token_id: NonNegativeInt
    markov_rank: Width = 256
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    rope_theta: PositiveFloat = 6_000_000.0
    rope_scaling: dict[str, Any] | None = None
    """rope_type (linear, yarn or llama3) and its numbers, as transformers names them; never the target's."""
    rms_norm_eps: PositiveFloat = 1e-6
    sample_from_anchor: bool = True
    """Whether the anchor's own slot drafts the first token. If not, a block has one row more, and its first is dropped.
    """
    own_tables: bool = False
    """Whether the draft reads an embedding and a head of its own, which its folder holds, and not the target's."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        ids, last = self.target_layer_ids, self.num_target_layers - 2
        if not ids or list(ids) != sorted(set(ids)) or ids[-1] > last:
            raise ValueError(f"target_layer_ids must be strictly increasing in 0..{last}, got {list(ids)}")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id must be below vocab_size {self.vocab_size}, got {self.mask_token_id}")
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads % groups:
            raise ValueError(f"num_attention_heads must be a multiple of num_key_value_heads, got {heads} and {groups}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if (scaling := self.rope_scaling) is not None:
            needed = SCALED_ROPES.get(str(scaling.get("rope_type")), ("a known rope_type",))
            numbers = {name: value for name, value in scaling.items() if name != "rope_type"}
            if not set(needed) <= set(numbers) <= {*needed, *ROPE_CHOICES} or not all(
                map(is_positive, numbers.values())
            ):
                known = "; ".join(f"{name} with {', '.join(names)}" for name, names in SCALED_ROPES.items())
                raise ValueError(f"rope_scaling must be {known}, got {scaling}")
        return self

    @property
    def num_rows(self) -> int:
        """Of a block that is run: its slots, and the anchor's where that one drafts nothing."""
        return self.block_size + (not self.sample_from_anchor)


class ObjectiveSection(Section):
    """Weights of the loss terms; a weight of 0 leaves the term out."""

    cross_entropy: NonNegativeFloat = 0.0
    forward_kl: NonNegativeFloat = 1.0
    total_variation: NonNegativeFloat = 0.0
    """Weight of the full sum |q - p| (DeepSpec's L1, twice the total variation)."""
    confidence: NonNegativeFloat = 1.0
    acceptance_length: NonNegativeFloat = 0.5
    """Weight of 1 - E / block_size."""
    acceptance_form: Literal["ratio", "teacher_forced"] = "ratio"
    acceptance_warmup_steps: NonNegativeInt = 100
    """Steps over which the acceptance term's weight rises linearly from 0."""
    decay_positions: PositiveFloat = 4.0
    """Slot j weighs exp(-j / decay_positions) in every term but the acceptance length."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        weights = ("cross_entropy", "forward_kl", "total_variation", "acceptance_length")
        if not any(getattr(self, weight) for weight in weights):
            raise ValueError(f"one of {', '.join(weights)} must be above 0, or the draft learns nothing")
        return self


PROBE_TOKENS = 64
"""Of a prompt in a probe at most; ``eval.max_new_tokens`` may say fewer."""


class TrainSection(Section):
    """The optimisation."""

    folder: Folder
    steps: PositiveInt
    batch_size: PositiveInt = 1
    """Sequences per process and micro-step."""
    accumulation_steps: PositiveInt = 1
    num_anchors: PositiveInt = 512
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon moves the layers' matrices, AdamW the rest, both at one learning rate."""
    learning_rate: PositiveFloat = 6e-4
    min_learning_rate_ratio: Fraction = 0.0
    warmup_ratio: Fraction = 0.04
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: a cosine, or stable and then a linear decay (wsd)."""
    decay_ratio: Fraction = 0.2
    """The last part of the steps, in which wsd decays; of no effect with cosine."""
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    max_grad_norm: PositiveFloat = 1.0
    ema_decay: Beta = 0.0
    """Above 0, the draft that is written is the moving average m <- ema_decay m + (1 - ema_decay) w of the weights."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping its activations."""
    save_every_steps: PositiveInt = 500
    log_every_steps: PositiveInt = 10
    probe_every_steps: NonNegativeInt = 0
    """Above 0, decode with the draft on the target so often, and keep the best in train.folder/best (its weights as
    they are, not their moving average)."""
    probe_prompts: PositiveInt = 8
    """The first ones of the first of eval.tasks."""
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
    init_from: str | None = None
    """An exported draft to start from."""


class EvalSection(Section):
    """What is measured."""

    tasks: tuple[str, ...]
    max_prompts: PositiveInt | None = None
    max_new_tokens: PositiveInt = 2048
    temperatures: tuple[NonNegativeFloat, ...] = (0.0, 1.0)
    top_k: NonNegativeInt = 0
    """Draw from the k likeliest tokens only; 0 is off."""
    top_p: Share = 1.0
    """Draw from the fewest tokens whose mass reaches this; 1 is off."""
    batch_size: PositiveInt = 1
    """Texts decoded in step."""
    turns: PositiveInt = 1
    """User turns at most; later ones follow the draft's own answers."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_values(tasks=self.tasks, temperatures=self.temperatures)
        return self


class RunConfig(Section):
    """One run, complete enough to be read alone."""

    name: str
    seed: NonNegativeInt = 0
    target: TargetSection
    data: DataSection
    record: RecordSection
    draft: DraftConfig
    objective: ObjectiveSection = ObjectiveSection()
    train: TrainSection
    eval: EvalSection

    @model_validator(mode="after")
    def _check(self) -> Self:
        longest, most = self.record.max_tokens, self.draft.max_position_embeddings
        if longest > most:
            raise ValueError(f"record.max_tokens must be at most draft.max_position_embeddings {most}, got {longest}")
        weight = self.objective.confidence
        if weight and not self.draft.enable_confidence_head:
            raise ValueError(f"objective.confidence is {weight:g} but draft.enable_confidence_head is false; mend one")
        if self.draft.own_tables:
            raise ValueError("draft.own_tables must be false: a run trains on the target's own embedding and head")
        if self.train.probe_every_steps and not self.eval.tasks:
            often = self.train.probe_every_steps
            raise ValueError(f"train.probe_every_steps is {often} but eval.tasks is empty; name a task, or set it to 0")
        return self


def load_run(path: Path | str, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Read a run from YAML and apply ``section.key=value`` overrides. Raises: ConfigError naming the file and key."""
    tree = read_yaml(Path(path), "a run, see configs/")
    for override in overrides:
        _apply(tree, override)
    return validated(RunConfig, tree, path)


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """The mapping in a YAML file. Raises: ConfigError naming the file and ``what`` was to be given, or a key that
    stands there twice.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}; give {what}")
    try:
        tree = _Loader(path.read_text(encoding="utf-8")).get_single_data()
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {_fault(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(tree).__name__}")
    return tree


def save_run(run: RunConfig, path: Path) -> None:
    """Write the resolved run as YAML that ``load_run`` reads back to an equal object."""
    write_whole(path, yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False))


def validated(model: type[ModelT], tree: Any, place: object, is_strict: bool = False) -> ModelT:
    """The tree as a model; ``is_strict``: a number is a number as in JSON, "5" or "no" is none, nor is 1 a truth.
    Raises: ConfigError naming ``place`` and every wrong field.
    """
    try:
        return model.model_validate_json(json.dumps(tree), strict=True) if is_strict else model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{place}: {describe_validation(error)}") from error


def read_back(model: type[ModelT], content: bytes, place: object, hint: str, fault: str = "{}") -> ModelT:
    """What a run wrote as JSON. Raises: RecordError of ``place``, ``fault`` with every wrong field, and ``hint``."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise RecordError(f"{place}: {fault.format(describe_validation(error))}; {hint}") from error


def describe_validation(error: ValidationError) -> str:
    """One clause per wrong field: its dotted name (none where fields disagree), what is wrong, what was found."""
    lines = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"{place} is not a known key; remove it or mend its spelling")
        elif item["type"] == "missing":
            lines.append(f"{place} is missing")
        else:
            message = item["msg"].removeprefix("Value error, ")
            found = "" if item["type"] == "value_error" else f", got {item['input']!r:.80}"
            lines.append(f"{place}: {message}{found}" if place else message)
    return "; ".join(lines)


class _Loader(yaml.SafeLoader):
    """The safe loader, which refuses a key given twice where plain YAML lets the last one win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
        return super().construct_mapping(node, deep)


def _fault(error: Exception) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    return f"line {mark.line + 1}: {problem}" if mark else " ".join(str(error).split())


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override}: expected section.key=value, for example --set train.steps=10")
    node = tree
    *parents, leaf = key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override}: {parent} is not a section")
    try:
        node[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: the value is not valid YAML: {_fault(error)}") from error
