"""Responses from OpenAI-compatible endpoints: many requests at once, each repeated until it has a usable answer."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Annotated, Any, Literal

import httpx
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from dspark.config import DataSection, describe_validation
from dspark.data.chat import ChatFormat, asked_messages, encode_answer, encode_text
from dspark.data.responses import Answer, Keep, ResponsesHeader
from dspark.data.rows import Prompt, TokenId
from dspark.errors import EndpointError, PromptError

_UNTRUNCATED = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Said in every request, since servers take their defaults from the target's generation_config.json."""
_COME_BACK = {408, 425, 429}
"""Statuses below 500 that ask for another try; any other ends the run."""
_LONGEST_RETRY_AFTER_SECONDS = 3600.0
_BYTES_PER_TOKEN = 256
"""A token as an id and as escaped text, with room to spare; a longer answer is refused while it is read."""
_REASON_LENGTH = 300
AT_ONCE, FIRST_TRY, LATER = range(3)
"""When a prompt is asked: before those of a later kind."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for an endpoint, and how often to try again."""

    answer_seconds: float
    """For a whole answer; the endpoint may queue the request."""
    connect_seconds: float = 10.0
    rest_seconds: float = 1.0
    """After the first failure; twice as long after each further one in a row, with jitter."""
    longest_rest_seconds: float = 60.0
    tries: int = 30
    """After so many failures in a row at every endpoint, some 20 minutes, the run ends; so it does after as many
    unusable answers to one prompt."""


class _Message(BaseModel, strict=True):
    content: str
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(BaseModel, strict=True):
    finish_reason: Literal["stop", "length"]
    text: str | None = None
    message: _Message | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None


class _Completion(BaseModel, strict=True):
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]


class _FailedTry(Exception):
    """What another try may mend: a reason, and perhaps how many seconds the endpoint asks to wait."""


class _Unusable(_FailedTry):
    """The endpoint works, but its answer is of no use."""


@dataclass
class _Endpoint:
    url: str
    num_failures: int = 0
    """In a row; requests that were in flight together count once."""
    has_answered: bool = False
    """So that an unusable answer is the prompt's fault."""
    rests_until: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class EndpointAsker:
    """Has prompts answered by ``data.endpoints`` (an ``Ask``); requests are seeded by the run's seed and the row alone.

    ``completions`` is given the ids that our template made, and the ids that come back are kept as they are. Where none
    come, the text is tokenised, which need not give the drawn ids, and the answer says so (``is_retokenised``); so it
    does if the endpoint left out the end-of-turn id without naming it. ``chat/completions`` is given the messages, and
    the text that comes back is encoded with our template. Not exact then: the prompt (the endpoint's template may
    differ), the response's ids, and what the endpoint strips from a text. Truncation is switched off on both routes; an
    endpoint that refuses these fields cannot be used.

    A failed try goes to the end of the queue, and its endpoint rests, longer with every failure in a row, while the
    others go on. An unusable answer of an endpoint that has given a usable one is the prompt's fault: it is asked again
    next, after a short rest. With ``is_leaving_out`` a prompt that gets unusable answers only is kept without one.
    Raises: EndpointError for a request that is refused (another 4xx, a redirect), when all endpoints failed
    ``patience.tries`` times in a row, and for a prompt with as many unusable answers.
    Source: vllm/entrypoints/openai/completion/protocol.py and vLLM's pull request 22587 (``return_token_ids`` gives
    ``token_ids`` and ``prompt_token_ids`` in a choice; ``stop_reason``), sglang/srt/entrypoints/openai/protocol.py and
    SGLang's pull request 30917 (the same names; ``matched_stop``). Both leave the stop token among the ids;
    TensorRT-LLM takes it out.
    """

    data: DataSection
    chat: ChatFormat
    prompts: Sequence[Prompt]
    header: ResponsesHeader
    vocab_size: int
    end_of_turn_id: int
    patience: Patience
    jitter: random.Random
    on_failure: Callable[[str], None]
    api_key: str = field(default="", repr=False)
    is_leaving_out: bool = False

    def __call__(self, rows_M: NDArray[np.int64], keep: Keep) -> None:
        """Returns when every row is kept."""
        asyncio.run(self._run(map(int, rows_M), keep))

    async def _run(self, rows: Iterator[int], keep: Keep) -> None:
        endpoints = [_Endpoint(url) for url in self.data.endpoints]
        num_unusable, queue = Counter[int](), asyncio.PriorityQueue[tuple[int, int]]()

        def add_first_try() -> None:  # one at a time: a million would take memory, and long to put in order
            for row in islice(rows, 1):
                queue.put_nowait((FIRST_TRY, row))

        add_first_try()
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        client = httpx.AsyncClient(
            headers={"Accept-Encoding": "identity"} | key,
            timeout=httpx.Timeout(None, connect=self.patience.connect_seconds),
            # As many connections as workers; idle ones are given up before servers close them, after some 5 s.
            limits=httpx.Limits(keepalive_expiry=2.0),
        )

        async def work(endpoint: _Endpoint) -> None:
            while True:
                await asyncio.sleep(max(0.0, endpoint.rests_until - time.monotonic()))
                place, row = await queue.get()
                if place == FIRST_TRY:
                    add_first_try()
                began, answer = time.monotonic(), None
                if began >= endpoint.rests_until:  # else it began to rest while there was no row
                    try:
                        answer = await self._ask(client, endpoint.url, row)
                        endpoint.num_failures, endpoint.has_answered = 0, True
                    except _FailedTry as failure:
                        is_unusable = isinstance(failure, _Unusable)
                        place = AT_ONCE if is_unusable and endpoint.has_answered else LATER
                        self._rest(endpoint, began, failure, is_longer=place == LATER)
                        num_unusable[row] += is_unusable
                        if num_unusable[row] >= self.patience.tries:
                            answer = self._give_up(endpoint, row)
                        elif all(each.num_failures >= self.patience.tries for each in endpoints):
                            reasons = "; ".join(each.reason for each in endpoints)
                            hint = "what is answered is kept: mend them and run again"
                            raise EndpointError(f"no endpoint answers ({reasons}); {hint}") from failure
                if answer is None:
                    queue.put_nowait((place, row))
                else:
                    keep({row: answer})
                queue.task_done()

        try:
            async with client, asyncio.TaskGroup() as group:
                workers = [group.create_task(work(endpoint)) for endpoint in endpoints * self.data.concurrency]
                await queue.join()
                for worker in workers:
                    worker.cancel()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _rest(self, endpoint: _Endpoint, began: float, failure: _FailedTry, *, is_longer: bool) -> None:
        (reason, *retry_after), now, patience = failure.args, time.monotonic(), self.patience
        if began >= endpoint.rests_until:
            rest = min(patience.rest_seconds * 2.0 ** min(endpoint.num_failures, 99), patience.longest_rest_seconds)
            endpoint.rests_until = now + rest * self.jitter.uniform(0.5, 1.0)
            endpoint.num_failures += is_longer
        if any(retry_after):  # else a late failure would hide one of a try that began before it
            endpoint.rests_until = max(endpoint.rests_until, now + sum(retry_after))
        endpoint.reason = self._line(f"{endpoint.url}: {reason}")
        self.on_failure(endpoint.reason)

    def _give_up(self, endpoint: _Endpoint, row: int) -> Answer:
        if self.is_leaving_out and endpoint.has_answered:
            return Answer(())
        what = f"{self.prompts[row].conversation.place}: {self.patience.tries} unusable answers"
        hint = "run again, or with --leave-out-unusable to go on without such prompts"
        raise EndpointError(f"{what}, the last from {endpoint.reason}; {hint}")

    async def _ask(self, client: httpx.AsyncClient, url: str, row: int) -> Answer:
        prompt, content = self.prompts[row], bytearray()
        most = 2**20 + _BYTES_PER_TOKEN * (len(prompt.prompt_ids) + self.header.max_response_tokens)
        request = client.stream("POST", f"{url}/{self.data.endpoint_route}", json=self._body(prompt, row))
        try:
            async with asyncio.timeout(self.patience.answer_seconds), request as response:
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > most:
                        raise _Unusable(f"an answer of more than {most} bytes")
        except TimeoutError as error:
            raise _FailedTry(f"no whole answer within {self.patience.answer_seconds:g} s") from error
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise _FailedTry(f"{type(error).__name__} {error}") from error
        status = response.status_code
        if status == httpx.codes.OK:
            return self._answer(prompt, bytes(content))
        reason = f"HTTP {status} {response.reason_phrase}: {content.decode(errors='replace')}"
        if status in _COME_BACK or status >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise _FailedTry(reason, _seconds(response.headers.get("Retry-After", "")))
        hint = "mend data.endpoints, data.served_model, data.endpoint_route or DSPARK_API_KEY and run again"
        raise EndpointError(f"{self._line(f'{url}: {reason}')} (asked for {prompt.conversation.place}); {hint}")

    def _body(self, prompt: Prompt, row: int) -> dict[str, Any]:
        header, seed = self.header, random.Random(f"{self.header.seed}/{row}").getrandbits(31)
        body: dict[str, Any] = {"model": self.data.served_model, "max_tokens": header.max_response_tokens, "seed": seed}
        body |= {"temperature": prompt.temperature, **_UNTRUNCATED}
        if self.data.endpoint_route == "chat/completions":
            body |= {"tools": prompt.tools} if prompt.tools else {}
            thinking = {"enable_thinking": prompt.is_thinking}
            return body | {"messages": asked_messages(prompt.conversation), "chat_template_kwargs": thinking}
        body |= {"prompt": prompt.prompt_ids, "stop_token_ids": header.stop_token_ids}
        return body | {"return_token_ids": True, "skip_special_tokens": False}

    def _answer(self, prompt: Prompt, content: bytes) -> Answer:
        most = self.header.max_response_tokens
        try:
            answer = self._read(prompt, _Completion.model_validate_json(content).choices[0])
        except ValidationError as error:
            raise _Unusable(f"an answer that cannot be read: {describe_validation(error)}") from error
        except PromptError as error:
            raise _Unusable(str(error)) from error
        if not 0 < len(answer.ids) <= most:
            raise _Unusable(f"an answer of {len(answer.ids)} tokens, expected 1 to {most}")
        if max(answer.ids) >= self.vocab_size:
            raise _Unusable(f"the token id {max(answer.ids)}, the target's vocabulary has {self.vocab_size}")
        if any(token in self.header.stop_token_ids for token in answer.ids[:-1]):
            raise _Unusable("an answer that goes on after an end-of-turn token")
        return answer

    def _read(self, prompt: Prompt, choice: _Choice) -> Answer:
        """The response's ids with its end-of-turn id. Raises: PromptError and _Unusable where they cannot be known."""
        text = choice.message.content if choice.message else choice.text
        is_stopped, most = choice.finish_reason == "stop", self.header.max_response_tokens
        if text is None or (choice.message and (choice.message.reasoning or choice.message.reasoning_content)):
            raise _Unusable("an answer without text, or with thoughts that were not asked for")
        if choice.prompt_token_ids not in (None, prompt.prompt_ids):
            raise _Unusable("an answer to another prompt than was asked")
        if self.data.endpoint_route == "chat/completions":
            ids = encode_answer(self.chat, prompt.conversation, text)
            return Answer((ids if is_stopped else ids[:-1])[:most], is_retokenised=True)
        is_retokenised = choice.token_ids is None
        ids = encode_text(self.chat, text) if choice.token_ids is None else choice.token_ids
        if is_stopped and (not ids or ids[-1] not in self.header.stop_token_ids):
            named = choice.matched_stop if choice.stop_reason is None else choice.stop_reason
            if named is not None and named not in self.header.stop_token_ids:
                raise _Unusable(f"an answer that {named!r:.40} stopped, which ends no turn")
            ids = [*ids, self.end_of_turn_id if named is None else int(named)]
            is_retokenised |= named is None
        return Answer(ids[:most] if is_retokenised else ids, is_retokenised)

    def _line(self, text: str) -> str:
        """One line of bounded length, without the key that an endpoint may repeat."""
        text = text.replace(self.api_key, "***") if self.api_key else text
        return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())[:_REASON_LENGTH]


def _seconds(retry_after: str) -> float:
    """What a Retry-After header asks for, as seconds or as a date; 0 where it says nothing that can be read."""
    try:
        seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
    except (ValueError, OverflowError):
        seconds = float(retry_after) if retry_after.isdecimal() else 0.0
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER_SECONDS)
