"""``dspark prepare``: the target answers the prompts of a run."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from dspark.cli.identity import describe_origin
from dspark.cli.terminal import DEFAULT_DEVICE, Device, answer_progress
from dspark.config import load_run
from dspark.data.chat import ChatFormat, check_length, digest, encode_prompt
from dspark.data.conversations import Conversation, encode_each, read_conversations
from dspark.data.responses import RESPONSES_FILE, Prompt, ResponsesHeader, in_batches, write_responses
from dspark.decode.generation import generate
from dspark.decode.sampling import Sampling, row_uniforms
from dspark.files import claim
from dspark.target.loading import load_target, locate_target
from dspark.target.tokenizer import load_tokenizer, stop_token_ids
from dspark.types import Target


def prepare(
    config: Annotated[Path, typer.Option(help="The run's YAML file.", readable=False)],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, for a trial.")] = None,
    leave_out_unusable: Annotated[
        bool, typer.Option("--leave-out-unusable", help="Go on without the prompts that cannot be used.")
    ] = False,
    device: Device = DEFAULT_DEVICE,
) -> None:
    """Let the target answer data.sources; the responses go to record.folder. Run again to resume."""
    run = load_run(config, tuple(overrides or ()))
    folder = locate_target(run.target.path)
    tokenizer, stops = load_tokenizer(folder), stop_token_ids(folder)
    chat = ChatFormat(tokenizer, stops, run.data.is_thinking)

    def encode(conversation: Conversation) -> Prompt:
        ids_T = encode_prompt(chat, conversation)
        check_length(conversation.place, len(ids_T) + run.data.max_response_tokens, run.record.max_tokens)
        return Prompt(conversation, ids_T)

    conversations = read_conversations(run.data.sources, run.data.split, run.data.max_conversations)
    prompts = encode_each(conversations, encode, is_leaving_out=leave_out_unusable)
    prompts.sort(key=lambda prompt: len(prompt.ids_T), reverse=True)  # batches of one length; the longest run first
    header = ResponsesHeader(
        **describe_origin(run, folder, tokenizer),
        prompts_sha256=digest(prompt.ids_T for prompt in prompts),
        num_prompts=len(prompts),
        num_left_out=len(conversations) - len(prompts),
        temperature=run.data.temperature,
        max_response_tokens=run.data.max_response_tokens,
        generation_batch_size=run.data.generation_batch_size,
        stop_token_ids=stops,
        seed=run.seed,
    )
    sampling = Sampling(run.data.temperature, run.data.max_response_tokens, stops)

    @cache
    def target() -> Target[Any]:
        return load_target(folder, dtype=getattr(torch, run.target.dtype), device=device)

    def answer(ids: Sequence[torch.Tensor], first_row: int) -> list[torch.Tensor]:
        uniforms = [row_uniforms(run.seed, first_row + row) for row in range(len(ids))]
        return generate(target(), ids, sampling, uniforms)

    path = run.record.folder / RESPONSES_FILE
    with claim(run.record.folder), answer_progress(len(prompts)) as (on_rows, _):
        ask = in_batches(answer, prompts, header.generation_batch_size)
        write_responses(ask, tokenizer, prompts, header, path, on_rows)
    left_out = f", {header.num_left_out} prompts left out" if header.num_left_out else ""
    Console(soft_wrap=True).print(f"{len(prompts)} responses in {path}{left_out}", highlight=False, markup=False)
