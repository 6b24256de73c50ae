"""Pretrain the nano target from nothing on one GPU, for a given time, and write its checkpoint."""

import argparse
import json
import lzma
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from huggingface_hub import save_torch_state_dict
from learning import checkpoint_tensors, chosen_experts, initialise, mtp_hidden
from muon import Muon
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional

from dspark.model_folder import Checkpoint
from dspark.target.config import load_target_config
from dspark.target.experts import Router
from dspark.target.model import LingModel

END = 1
"""Id of ``<|endoftext|>``, also the filler of a window's tail."""
IGNORED = -100
FLAT_UNTIL = 0.3
"""Share of the run after which the learning rate falls linearly to 0."""


class Losses(NamedTuple):
    """Mean nats a token of both heads, nats of every row, share of right first guesses, experts of MoE layers."""

    main: torch.Tensor
    mtp: torch.Tensor
    nats_B: torch.Tensor
    hits: torch.Tensor
    expert_ids: tuple[torch.Tensor, ...]


class Heldout(NamedTuple):
    """Windows that are never trained on, and the UTF-8 bytes that each one's predicted tokens stand for."""

    rows_BT: torch.Tensor
    bytes_B: torch.Tensor


def shifted(rows_BT: torch.Tensor, by: int) -> torch.Tensor:
    """Labels ``by`` tokens ahead; IGNORED past the end and where filler follows filler."""
    labels_BT = functional.pad(rows_BT[:, by:], (0, by), value=IGNORED)
    before_BT = functional.pad(rows_BT[:, by - 1 :], (0, by - 1), value=IGNORED)
    return labels_BT.masked_fill((labels_BT == END) & (before_BT == END), IGNORED)


def losses_of(model: LingModel, rows_BT: torch.Tensor) -> Losses:
    """Cross entropy of the next token, and of the one after it through the prediction layer."""
    lengths = [rows_BT.shape[1]] * rows_BT.shape[0]
    with chosen_experts(model) as expert_ids:
        output = model(rows_BT.flatten(), lengths)
        labels_BT = shifted(rows_BT, 1)
        mtp_hidden_ND = mtp_hidden(model, labels_BT.clamp(min=END).flatten(), output.last_hidden_ND, lengths)
    logits_NV = model.logits(output.last_hidden_ND)
    nats_N = functional.cross_entropy(logits_NV, labels_BT.flatten(), ignore_index=IGNORED, reduction="none")
    mtp = functional.cross_entropy(model.logits(mtp_hidden_ND), shifted(rows_BT, 2).flatten(), ignore_index=IGNORED)
    count = (labels_BT != IGNORED).sum()
    hits = (logits_NV.detach().argmax(-1) == labels_BT.flatten()).sum() / count
    return Losses(nats_N.sum() / count, mtp, nats_N.view_as(rows_BT).sum(1), hits, tuple(expert_ids))


class Training:
    """The model with its two optimizers; ``done_seconds`` counts what earlier calls of the same run spent."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device(args.device)
        self.model = LingModel(load_target_config(args.folder), device=self.device)
        initialise(self.model, torch.Generator(self.device).manual_seed(args.seed))
        self.routers = [module for module in self.model.modules() if isinstance(module, Router)]
        names = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        is_matrix = {
            name: p.ndim >= 2 and min(p.shape[-2:]) >= 16 and "conv1d" not in name and "gate.weight" not in name
            for name, p in names.items()
        }
        tables = ("model.word_embeddings.weight", "lm_head.weight")
        self.muon = Muon([p for name, p in names.items() if is_matrix[name] and name not in tables], args.weight_decay)
        rest = [p for name, p in names.items() if not is_matrix[name] or name in tables]
        self.adam = torch.optim.AdamW(
            rest, lr=args.learning_rate, betas=(0.9, 0.95), eps=1e-10, weight_decay=0, fused=True
        )
        self.peak, self.mtp_weight, self.bias_rate = args.learning_rate, args.mtp_weight, args.bias_rate
        self.steps, self.done_seconds = 0, 0.0

    def step(self, rows_BT: torch.Tensor, progress: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One update at ``progress`` (0..1) of the whole run; returns main loss, MTP loss and gradient norm."""
        scale = min((self.steps + 1) / 200, 1.0, (1 - progress) / (1 - FLAT_UNTIL))
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            losses = losses_of(self.model, rows_BT)
        (losses.main + self.mtp_weight * losses.mtp).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.muon.step(self.peak * scale)
        for group in self.adam.param_groups:
            group["lr"] = self.peak * scale
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        self.balance(losses.expert_ids, self.bias_rate * min(1.0, 2 * scale))
        self.steps += 1
        return losses.main.detach(), losses.mtp.detach(), norm

    @torch.no_grad()
    def balance(self, expert_ids: Sequence[torch.Tensor], rate: float) -> None:
        """Raise the bias of experts chosen less often than the mean, lower that of the others.

        Source: Wang et al., auxiliary-loss-free load balancing (arXiv 2408.15664).
        """
        for router, ids_NK in zip(self.routers, expert_ids, strict=True):
            load_X = loads(ids_NK, router.expert_bias.shape[0])
            router.expert_bias.add_(torch.sign(load_X.mean() - load_X), alpha=rate)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a resumed run needs, by name; the tensors themselves, to be read or overwritten."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        found |= {f"muon.{index}": momentum for index, momentum in enumerate(self.muon.momenta)}
        for index, parameter in enumerate(self.adam.param_groups[0]["params"]):
            state = self.adam.state[parameter]
            if not state:
                state |= {"step": torch.zeros((), device=self.device)}
                state |= {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            found |= {f"adam.{index}.{key}": tensor for key, tensor in state.items()}
        return found

    def save(self, path: Path, seconds: float) -> None:
        """Write the state beside its place, then rename."""
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = {"steps": str(self.steps), "seconds": str(seconds)}
        save_file({k: v.contiguous() for k, v in self.tensors().items()}, f"{path}.partial", metadata=facts)
        Path(f"{path}.partial").replace(path)

    @torch.no_grad()
    def restore(self, path: Path) -> None:
        """Continue from a state that ``save`` wrote."""
        with safe_open(path, framework="pt", device=str(self.device)) as file:
            for name, tensor in self.tensors().items():
                tensor.copy_(file.get_tensor(name))
            self.steps, self.done_seconds = int(file.metadata()["steps"]), float(file.metadata()["seconds"])


def loads(ids_NK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How many rows chose each expert, float32 [X]."""
    ones = torch.ones(ids_NK.numel(), device=ids_NK.device)
    return torch.zeros(num_experts, device=ids_NK.device).index_add_(0, ids_NK.flatten(), ones)


def read_windows(folder: Path, device: torch.device) -> tuple[torch.Tensor, dict[str, Heldout]]:
    """Training windows [B, 512] (int16, vocabulary below 32768) and the held-out sets, in a fixed random order."""
    path = folder / "train.npy"
    if path.exists():
        windows = np.load(path)
    else:
        with lzma.open(folder / "train.npy.xz") as file:
            windows = np.lib.format.read_array(file)
    train_BT = torch.from_numpy(windows.astype(np.int16)).to(device)
    heldout = {}
    with np.load(folder / "heldout.npz") as arrays:
        for name in ("raw", "chat"):
            order = np.random.default_rng(0).permutation(len(arrays[name]))
            rows_BT = torch.from_numpy(arrays[name][order].astype(np.int64)).to(device)
            heldout[name] = Heldout(rows_BT, torch.from_numpy(arrays[f"{name}_bytes"][order]).to(device))
    return train_BT, heldout


def batches(train_BT: torch.Tensor, num_rows: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless batches int64 [num_rows, T], every window once an epoch in a fresh order."""
    generator = torch.Generator(train_BT.device).manual_seed(seed)
    while True:
        order_B = torch.randperm(len(train_BT), device=train_BT.device, generator=generator)
        for chosen_B in order_B[: len(order_B) // num_rows * num_rows].split(num_rows):
            yield train_BT[chosen_B].long()


@torch.no_grad()
def evaluate(model: LingModel, heldout: dict[str, Heldout], num_rows: int, most: int | None = None) -> dict[str, float]:
    """Bits per byte, nats a token, top-1 accuracy of both sets, on whole batches of ``num_rows``, up to ``most``."""
    result = {}
    for name, (rows_BT, bytes_B) in heldout.items():
        total = len(rows_BT) if most is None else min(most, len(rows_BT))
        total = max(total // num_rows, 1) * num_rows
        parts = [losses_of(model, rows) for rows in rows_BT[:total].split(num_rows)]
        bits = torch.cat([part.nats_B for part in parts]).sum().item() / float(np.log(2))
        result[f"{name}_bits_per_byte"] = bits / bytes_B[:total].sum().item()
        for key in ("main", "mtp", "hits"):
            result[f"{name}_{key}"] = torch.stack([getattr(part, key) for part in parts]).mean().item()
    return result


@torch.no_grad()
def continuation(model: LingModel, ids_T: torch.Tensor, count: int) -> list[int]:
    """Greedy ids after a prompt, up to the end of the turn."""
    cache, output = model.prefill([ids_T])
    ids: list[int] = []
    while len(ids) < count:
        ids.append(int(model.logits(output.last_hidden_ND[-1]).argmax()))
        if ids[-1] in (1, 2):
            break
        output = model.verify(torch.tensor([ids[-1:]], device=ids_T.device), cache)
        model.commit(cache, torch.ones(1, dtype=torch.int64, device=ids_T.device))
    return ids


def show_samples(model: LingModel, folder: Path, prompts: Path, count: int) -> None:
    """Print greedy answers to some held-out prompts."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    for row in rows[:: len(rows) // count + 1]:
        text = (
            f"<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>{row['messages'][0]['content']}"
            "<|role_end|><role>ASSISTANT</role>\n<think></think>"
        )
        ids_T = torch.tensor(tokenizer.encode(text).ids, device=model.embedding_VD.device)
        answer = tokenizer.decode(continuation(model, ids_T, 128), skip_special_tokens=False)
        print(f"=== {row['kind']} {row['source']}\n{row['messages'][0]['content']}\n--- answer\n{answer}\n", flush=True)


def benchmark(training: Training, train_BT: torch.Tensor, sizes: Sequence[int]) -> None:
    """Print tokens per second of some batch sizes (windows a step), then where the last one's time goes.

    The weights move, so nothing is kept.
    """
    for num_rows in sizes:
        feed = batches(train_BT, num_rows, seed=0)
        started = time.perf_counter()
        for step in range(8):
            if step == 3:
                synchronise(training.device)
                warm, started = time.perf_counter() - started, time.perf_counter()
            training.step(next(feed), progress=0.5)
        synchronise(training.device)
        rate = 5 * num_rows * train_BT.shape[1] / (time.perf_counter() - started)
        peak = torch.cuda.max_memory_allocated() / 1e9 if training.device.type == "cuda" else 0.0
        print(f"{num_rows} windows: {rate:,.0f} tokens/s, first 3 steps {warm:.1f} s, {peak:.1f} GB", flush=True)
    with torch.profiler.profile() as profile:
        training.step(next(feed), progress=0.5)
        synchronise(training.device)
    is_cuda = training.device.type == "cuda"
    order = "self_cuda_time_total" if is_cuda else "self_cpu_time_total"
    print(profile.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=70), flush=True)


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def warm_up(training: Training, train_BT: torch.Tensor, heldout: dict[str, Heldout], num_rows: int) -> None:
    """Compile and load every kernel that ``train`` will need, before its clock runs; changes nothing."""
    rows_BT = train_BT[:num_rows].long()
    for rows in (rows_BT, rows_BT.view(num_rows // 2, -1)):
        with torch.autocast(training.device.type, dtype=torch.bfloat16):
            losses = losses_of(training.model, rows)
        (losses.main + losses.mtp).backward()
        training.model.zero_grad(set_to_none=True)
    with torch.autocast(training.device.type, dtype=torch.bfloat16):
        print(json.dumps(evaluate(training.model, heldout, num_rows, most=num_rows)), flush=True)


def train(training: Training, train_BT: torch.Tensor, heldout: dict[str, Heldout], args: argparse.Namespace) -> float:
    """Train until the call's minutes are over; the last ``long_share`` of the run reads windows of 1024 tokens.

    Returns the seconds that the run has spent so far, this call included.
    """
    seed = args.seed + training.steps
    feeds = {
        False: batches(train_BT, args.rows, seed),
        True: batches(train_BT[: len(train_BT) // 2 * 2].view(-1, 2 * train_BT.shape[1]), args.rows // 2, seed),
    }
    started, next_log, next_eval = time.perf_counter(), 0.0, args.eval_seconds
    while (elapsed := time.perf_counter() - started) < args.minutes * 60:
        progress = (training.done_seconds + elapsed) / (args.total_minutes * 60)
        main, mtp, norm = training.step(next(feeds[progress > 1 - args.long_share]), min(progress, 1.0))
        if elapsed < next_log:
            if training.steps % 8 == 0:
                synchronise(training.device)
            continue
        row = {
            "step": training.steps,
            "progress": progress,
            "loss": main.item(),
            "mtp": mtp.item(),
            "norm": norm.item(),
        }
        assert np.isfinite(row["loss"]), f"step {training.steps}: the loss is {row['loss']}"
        next_log = elapsed + args.log_seconds
        if elapsed >= next_eval:
            next_eval = elapsed + args.eval_seconds
            with torch.autocast(training.device.type, dtype=torch.bfloat16):
                row |= evaluate(training.model, heldout, args.rows, most=512)
        print(json.dumps({k: round(v, 4) for k, v in row.items()}), flush=True)
    synchronise(training.device)
    seconds = training.done_seconds + time.perf_counter() - started
    with torch.autocast(training.device.type, dtype=torch.bfloat16):
        print(
            json.dumps({"step": training.steps, **evaluate(training.model, heldout, args.rows, most=512)}), flush=True
        )
    return seconds


def finish(training: Training, heldout: dict[str, Heldout], args: argparse.Namespace) -> None:
    """Write the shards, read them back, and say how good the written model is (float32 on its bfloat16 weights)."""
    tensors = {name: tensor.cpu() for name, tensor in checkpoint_tensors(training.model).items()}
    args.out.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(tensors, args.out, max_shard_size=12_000_000)
    model = LingModel(training.model.config, device=training.device)
    model.load_tensors(Checkpoint(args.out).get)
    sixteen = {name: Heldout(h.rows_BT, h.bytes_B) for name, h in heldout.items()}
    facts = {"steps": training.steps, **evaluate(model, sixteen, num_rows=16)}
    (args.out / "pretrain.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts, indent=2), flush=True)
    show_samples(model, args.folder, args.prompts, count=6)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=Path, required=True, help="folder with train.npy(.xz) and heldout.npz")
    parser.add_argument("--folder", type=Path, default=here, help="folder with config.json and tokenizer.json")
    parser.add_argument("--prompts", type=Path, default=here.parent / "prompts" / "heldout.jsonl")
    parser.add_argument("--out", type=Path, help="folder for the shards; without it nothing is written")
    parser.add_argument("--state", type=Path, help="file that a later call continues from; read when it exists")
    parser.add_argument("--minutes", type=float, default=9.0, help="training time of this call")
    parser.add_argument("--total-minutes", type=float, help="of all calls of the run; default: --minutes")
    parser.add_argument("--rows", type=int, default=128, help="windows of 512 tokens a step")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05, help="of the matrices that Muon moves")
    parser.add_argument("--mtp-weight", type=float, default=0.2)
    parser.add_argument("--bias-rate", type=float, default=2e-3)
    parser.add_argument("--long-share", type=float, default=0.1)
    parser.add_argument("--log-seconds", type=float, default=5)
    parser.add_argument("--eval-seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true", help="fuse the attention and feed-forward blocks")
    parser.add_argument("--benchmark", type=int, nargs="*", help="only measure these numbers of windows a step")
    args = parser.parse_args()
    args.total_minutes = args.total_minutes or args.minutes
    return args


def main() -> None:
    """Benchmark, or train and write."""
    args = parse_arguments()
    torch.backends.cuda.matmul.allow_tf32 = True
    training = Training(args)
    train_BT, heldout = read_windows(args.windows, training.device)
    print(
        f"{sum(p.numel() for p in training.model.parameters()):,} parameters, {train_BT.numel():,} tokens", flush=True
    )
    if args.compile:
        for module in training.model.modules():
            if hasattr(module, "num_history") or isinstance(module, Router):
                module.forward = torch.compile(module.forward, dynamic=False)
    if args.benchmark:
        benchmark(training, train_BT, args.benchmark)
        return
    if args.state and args.state.exists():
        training.restore(args.state)
    warm_up(training, train_BT, heldout, args.rows)
    training.done_seconds = train(training, train_BT, heldout, args)
    if args.state:
        training.save(args.state, training.done_seconds)
    if args.out:
        finish(training, heldout, args)


if __name__ == "__main__":
    main()
