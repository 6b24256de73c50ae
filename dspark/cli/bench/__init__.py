"""dspark bench: how fast a part of the system is on this machine."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer

from dspark.cli.bench.report import Json, Report
from dspark.cli.bench.rows import Rows
from dspark.config import load_run
from dspark.errors import ConfigError, DsparkError
from dspark.kernels import MAX_TOKENS
from dspark.target.config import load_target_config
from dspark.target.loading import locate_target
from dspark.verifier import Precision, Shard, Verifier, load_mtp, load_weights, make_plan, random_mtp, random_weights
from dspark.verifier.drafting import BlockDrafter, Drafter, MtpDrafter, draft_weights, random_draft
from dspark.verifier.plan import free_bytes
from dspark.verifier.ranks import Ranks, start
from dspark.verifier.timing import Clock, read_bandwidth, read_trace, slack_tokens

CONFIGS = Path(__file__).parents[3] / "configs"
DEVICE, DTYPE, SEED = "cuda", torch.bfloat16, 0
NUM_TAPS = 5
RANDOM = "random"
PartT = TypeVar("PartT")

bench = typer.Typer(help="Measure how fast a part of the system is.", no_args_is_help=True, rich_markup_mode=None)


@dataclass(frozen=True)
class Model:
    """A target on random ``weights`` or on those in its folder; ``emulated`` is how many ranks one is part of."""

    target: str
    weights: str
    folder: Path
    emulated: int

    def shard(self, ranks: Ranks) -> Shard:
        """The part of a rank."""
        return Shard(ranks.rank, ranks.world_size) if ranks.world_size > 1 else Shard(0, self.emulated)

    def label(self, ranks: Ranks) -> str:
        """Which part of the model is measured, in words."""
        if ranks.world_size > 1:
            return f"{ranks.world_size} ranks with communication, seen by the first"
        whole = "the whole model on one GPU"
        return f"one rank of {self.emulated}, communication left out" if self.emulated > 1 else whole

    def open(self, draw: Callable[..., PartT], load: Callable[..., PartT], *part: Any, device: str) -> PartT:
        """Its weights, or those of its prediction layer; ``part``: the shard and the dtypes."""
        if self.weights == RANDOM:
            return draw(load_target_config(self.folder), *part, SEED, device)
        return load(self.folder, *part, device)


@dataclass(frozen=True)
class Job(Model):
    """What every rank measures."""

    windows: tuple[int, ...]
    context: int
    draft: str
    routing: str
    prefill: int
    json: Path | None
    precision: Precision


def verify(
    target: Annotated[str, typer.Option(help="A name (ling-3.0-flash, ...) or a Hugging Face folder.")],
    weights: Annotated[str, typer.Option(help="random, or a folder of weights.")] = RANDOM,
    tp: Annotated[int, typer.Option(min=1, help="Ranks, one GPU each, that work together.")] = 1,
    emulate_tp: Annotated[int, typer.Option(min=1, help="Measure one rank of so many, communication left out.")] = 1,
    tokens: Annotated[str, typer.Option(help="Window lengths, separated by commas.")] = "9",
    context: Annotated[int, typer.Option(min=0, max=10**7, help="Committed tokens before the window.")] = 8192,
    routing: Annotated[str, typer.Option(help="uniform, or a file of the experts that a text visited.")] = "uniform",
    draft: Annotated[str, typer.Option(help="Also time whole cycles with a draft: dspark, or mtp (NEXTN).")] = "",
    float32: Annotated[str, typer.Option(help="What is float32 and not bfloat16: router, head or router,head.")] = "",
    prefill: Annotated[int, typer.Option(min=0, help="Also time a prefill of so many tokens.")] = 0,
    json: Json = None,
) -> None:
    """Time a verify step of the fused verifier, stage by stage and whole, against this GPU's read bandwidth.

    A file of experts is a safetensors trace, expert_ids [tokens, MoE layers, picks]; a prefill is routed by the router.
    The draft named dspark is a random one of the shape that configs/TARGET.yaml has.

    Needs a CUDA GPU of compute capability 9.0 or later.
    """
    if draft not in {"", "dspark", "mtp"}:
        raise ConfigError(f"--draft: expected dspark or mtp, got {draft!r}")
    precision = Precision(DTYPE, frozenset(float32.split(",")) if float32 else frozenset())
    windows = numbers("--tokens", tokens, MAX_TOKENS)
    if draft and max(windows) == 1:
        raise ConfigError("--draft: a window of one token has no draft in it; give --tokens of 2 or more")
    if draft == "dspark" and max(windows) > (most := load_run(run_file(target)).draft.block_size + 1):
        raise ConfigError(f"--tokens: a draft of {target} and the token before it are {most} at most, got {tokens!r}")
    folder = locate_target(weights) if weights != RANDOM else config_folder(target)
    if weights != RANDOM and load_target_config(folder) != load_target_config(config_folder(target)):
        raise ConfigError(f"--weights: the config.json of {folder} is not that of {target}; give both the same target")
    if routing != "uniform":
        read_trace(Path(routing), load_target_config(folder), max(windows))
    job = Job(target, weights, folder, emulate_tp, windows, context, draft, routing, prefill, json, precision)
    on_gpus(partial(run, job=job), tp, emulate_tp)


def run(ranks: Ranks, job: Job) -> None:
    """Measure on one rank; the first one prints and writes."""
    config, device, shard = load_target_config(job.folder), torch.device(DEVICE), job.shard(ranks)
    capacity_tokens = job.context + slack_tokens(max(job.windows))
    plan = make_plan(config, shard, capacity_tokens, job.precision, device, has_mtp=job.draft == "mtp")
    wide = sorted(job.precision.float32)
    label = job.label(ranks) + (f"; {' and '.join(wide)} in float32" if wide else "")
    routing = "its own" if job.routing == "uniform" and job.weights != RANDOM else job.routing
    facts = {"target": job.target, "weights": job.weights, "routing": routing, "label": label, "float32": wide}
    report = Report(job.json, ranks.rank == 0, **facts, context=job.context, plan_bytes=plan.parts(), windows=[])
    place = f"{label}; {plan.total_bytes / 1e9:.1f} GB"
    report.console.print(f"{job.target}, {job.weights} weights, routing: {routing}, {place}")
    plan.check(free_bytes(device), torch.cuda.get_device_name(device))
    report.save()
    ranks.reserve(config.hidden_size)
    clock = Clock(device, ranks)
    report["read_bytes_per_second"] = bandwidth = read_bandwidth(clock, free_bytes(device))
    report["graph_start_microseconds"] = clock.start_microseconds
    report.say(f"read bandwidth {bandwidth / 1e12:.2f} TB/s; start of a graph {clock.start_microseconds:.1f} us")
    torch.cuda.empty_cache()
    taps = tuple(range(0, config.num_hidden_layers - 1, -(-config.num_hidden_layers // NUM_TAPS)))
    drafter_of, draft_taps = _drafters(job, shard)
    weights = job.open(random_weights, load_weights, shard, job.precision, device=DEVICE)
    verifier = Verifier(weights, capacity_tokens, draft_taps or taps, ranks=ranks)
    trace_NLK = None if job.routing == "uniform" else read_trace(Path(job.routing), config, max(job.windows))
    rows = Rows(verifier, clock, bandwidth, job.context, report, trace_NLK)
    for num_tokens in job.windows:
        found: dict[str, Any] = {"tokens": num_tokens}
        report["windows"].append(found)
        rows.measure(num_tokens, found)
        if drafter_of is not None and num_tokens > 1:
            rows.measure_cycles(drafter_of(verifier, num_tokens - 1), found)
    if job.prefill:
        rows.measure_prefill(job.prefill)


def _drafters(job: Job, shard: Shard) -> tuple[Callable[[Verifier, int], Drafter] | None, tuple[int, ...]]:
    """What makes a drafter of so many tokens for a verifier, and the layers that it taps."""
    if not job.draft:
        return None, ()
    if job.draft == "mtp":
        mtp = job.open(random_mtp, load_mtp, shard, job.precision, device=DEVICE)
        return (lambda verifier, num_drafts: MtpDrafter(verifier, mtp, num_drafts)), ()
    draft = random_draft(load_run(run_file(job.target)).draft, DTYPE, DEVICE, SEED)
    own = draft_weights(draft, shard, DTYPE, DEVICE)
    return (lambda verifier, num_drafts: BlockDrafter(verifier, own, num_drafts)), draft.config.target_layer_ids


def on_gpus(work: Callable[[Ranks], None], tp: int, emulate_tp: int) -> None:
    """Do the work on so many ranks. Raises: ConfigError and DsparkError for ranks that cannot be measured here."""
    if tp > 1 and emulate_tp > 1:
        raise ConfigError("--tp measures ranks that work together, --emulate-tp one of them alone; give only one")
    if not torch.cuda.is_available():
        raise DsparkError("dspark bench: needs a CUDA GPU, and torch finds none on this machine")
    if 1 < tp > (found := torch.cuda.device_count()):
        raise DsparkError(f"--tp {tp}: found {found} GPU{'s' * (found != 1)}; use fewer ranks or --emulate-tp {tp}")
    start(work, tp, DEVICE)


def numbers(option: str, listed: str, most: int) -> tuple[int, ...]:
    """What commas separate. Raises: ConfigError for what is no number from 1 to ``most``."""
    parts = listed.split(",")
    if not all(len(part) < 5 and part.strip().isdecimal() and 1 <= int(part) <= most for part in parts):
        raise ConfigError(f"{option}: expected numbers in 1..{most}, separated by commas, got {listed!r}")
    return tuple(map(int, parts))


def run_file(target: str) -> Path:
    """The run that says which shape a draft of the target has."""
    path = CONFIGS / f"{target}.yaml"
    if not path.is_file():
        raise ConfigError(f"--draft dspark: takes a target by a name that configs/NAME.yaml has, got {target!r}")
    return path


def config_folder(target: str) -> Path:
    """Where the target's config.json lies: shipped shapes need no weights."""
    shipped = CONFIGS / "targets" / target
    return shipped if (shipped / "config.json").is_file() else locate_target(target)
