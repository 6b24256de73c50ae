"""Endpoints answer every prompt once, exactly, however they fail meanwhile; what nothing mends ends the run clearly."""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import digest
from serving import Fault, Served, break_off, completion, drip, hang, made_up_ids, refuse, say, serving
from tiny import STOP_TOKEN_ID, VOCAB_SIZE, write_tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from dspark.config import DataSection
from dspark.data.chat import ChatFormat, encode_prompt
from dspark.data.conversations import Conversation
from dspark.data.endpoints import EndpointAsker, Patience, _seconds
from dspark.data.responses import Answer, Responses, ResponsesHeader, open_responses, write_responses
from dspark.data.rows import Prompt
from dspark.errors import EndpointError

KEY = "sk-secret/1"
QUICK = Patience(answer_seconds=20.0, connect_seconds=1.0, rest_seconds=0.01, longest_rest_seconds=0.04, tries=5)
NUM_ROWS, MOST = 24, 12


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return ChatFormat(PreTrainedTokenizerFast.from_pretrained(folder), (STOP_TOKEN_ID,))


class Run:
    """One run of made-up prompts against endpoints, in a folder."""

    def __init__(self, chat: ChatFormat, path: Path, *urls: str, num_rows: int = NUM_ROWS, **settings: Any) -> None:
        rows = [
            Conversation("p.jsonl", row, ({"role": "user", "content": f"é{row}"},)) for row in range(1, num_rows + 1)
        ]
        self.prompts = [Prompt.of(row, encode_prompt(chat, row).tolist(), temperature=0.7) for row in rows]
        self.data = DataSection(
            sources=("p.jsonl",), endpoints=urls, served_model="tiny", **{"concurrency": 4} | settings
        )
        self.header = ResponsesHeader(
            target="tiny",
            target_fingerprint="a" * 64,
            tokenizer_fingerprint="b" * 64,
            template_fingerprint=None,
            prompts_sha256=digest(torch.tensor(prompt.prompt_ids) for prompt in self.prompts),
            num_prompts=num_rows,
            num_left_out=0,
            asked_from="0" * 64,
            answers="target",
            thinking=(False,),
            temperatures=(0.7,),
            max_response_tokens=MOST,
            generation_batch_size=1,
            stop_token_ids=chat.stop_token_ids,
            dtype="float32",
            seed=5,
            versions={},
        )
        self.chat, self.path = chat, path / "responses.jsonl"
        self.failures: list[str] = []

    def asker(self, patience: Patience, is_leaving_out: bool = False) -> EndpointAsker:
        return EndpointAsker(
            self.data,
            self.chat,
            self.prompts,
            self.header,
            vocab_size=VOCAB_SIZE,
            end_of_turn_id=STOP_TOKEN_ID,
            patience=patience,
            jitter=random.Random(0),
            on_failure=self.failures.append,
            api_key=KEY,
            is_leaving_out=is_leaving_out,
        )

    def write(self, patience: Patience = QUICK, is_leaving_out: bool = False) -> Counter[str]:
        """Ask for what is missing."""
        ask = self.asker(patience, is_leaving_out)
        return write_responses(ask, self.chat.tokenizer, self.prompts, self.header, self.path, lambda *_: None)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def told(rows: Sequence[dict[str, Any]]) -> Counter[str]:
    """What is counted of these rows."""
    return Counter(["rows"] * len(rows) + [row["finish_reason"] for row in rows])


def reason_of(ids: Sequence[int]) -> str:
    """That of a made-up answer."""
    return "loop" if ids == [STOP_TOKEN_ID] else "stop" if ids[-1] == STOP_TOKEN_ID else "length"


def prompt_ids(bodies: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
    return sorted(tuple(body["prompt"]) for body in bodies)


def test_the_ids_that_an_endpoint_draws_are_kept_and_a_request_depends_on_its_row_alone(
    chat: ChatFormat, tmp_path: Path
) -> None:
    with serving(Served()) as served:
        run = Run(chat, tmp_path, served.url)
        kinds = run.write()
    assert kinds == told(run.rows)
    bodies = {tuple(body["prompt"]): body for body in served.bodies}
    assert prompt_ids(served.bodies) == sorted(tuple(prompt.prompt_ids) for prompt in run.prompts)
    assert {header["Authorization"] for header in served.headers} == {f"Bearer {KEY}"}
    assert set(served.paths) == {"/v1/completions"}
    assert len({body.pop("seed") for body in map(dict, served.bodies)}) == NUM_ROWS
    for number, (row, prompt) in enumerate(zip(run.rows, run.prompts, strict=True)):
        body = bodies[tuple(prompt.prompt_ids)]
        assert row["prompt_ids"] == body["prompt"]
        assert row["response_ids"] == made_up_ids(body["prompt"], body["seed"], MOST)
        assert row["finish_reason"] == reason_of(row["response_ids"])
        assert "is_retokenised" not in row
        assert body["seed"] == random.Random(f"5/{number}").getrandbits(31)
        wanted = {"model": "tiny", "max_tokens": MOST, "temperature": 0.7, "stop_token_ids": [STOP_TOKEN_ID]}
        wanted |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        wanted |= {"return_token_ids": True, "skip_special_tokens": False}
        assert {key: value for key, value in body.items() if key not in {"prompt", "seed"}} == wanted
    assert {row["finish_reason"] for row in run.rows} == {"stop", "length", "loop"}
    recorded = [row for row in run.rows if row["finish_reason"] != "loop"]
    for encoded, row in zip(opened(run), recorded, strict=True):
        assert encoded.ids_T[encoded.loss_mask_T].tolist() == row["response_ids"]


FAULTS: dict[str, Fault] = {
    "HTTP 429": refuse(429, Retry_After="0"),
    "HTTP 500": refuse(500),
    "HTTP 503": refuse(503, b"\xff\x1b[31m\n" * 99),
    "no whole answer within 0.5 s": hang,
    "no whole answer within 0.5 s ": drip,
    "RemoteProtocolError": break_off,
    "Invalid JSON": say(b'{"choices": ['),
    "choices is missing": say(b"{}"),
    "choices.0.finish_reason": say(b'{"choices": [{"finish_reason": null, "text": ""}]}'),
    "choices.0.token_ids.0": say(b'{"choices": [{"finish_reason": "length", "text": "", "token_ids": [-1]}]}'),
    "the token id 320": say(b'{"choices": [{"finish_reason": "length", "text": "", "token_ids": [320]}]}'),
}


def test_a_run_with_every_fault_ends_equal_to_an_undisturbed_one(chat: ChatFormat, tmp_path: Path) -> None:
    with serving(Served()) as served:
        calm = Run(chat, tmp_path / "calm", served.url)
        calm.write()
        served.faults = [fault for fault in FAULTS.values() for _ in range(2)]
        random.Random(1).shuffle(served.faults)
        run = Run(chat, tmp_path, served.url)
        kinds = run.write(replace(QUICK, answer_seconds=0.5, tries=99))
    assert run.path.read_bytes() == calm.path.read_bytes()
    assert kinds == told(run.rows)
    assert len(run.failures) >= 2 * len(FAULTS)
    for words in FAULTS:
        assert any(f"{served.url}: " in reason and words.strip() in reason for reason in run.failures), words
    assert all(len(reason) <= 300 and reason.isprintable() for reason in run.failures)


def test_each_endpoint_has_as_many_requests_at_once_as_asked_and_never_more(chat: ChatFormat, tmp_path: Path) -> None:
    many, few = 110, 4
    for num, names in ((many, "a"), (few, "bc")):
        with ExitStack() as stack:
            servers = [stack.enter_context(serving(Served(waiting_for(num)))) for _ in names]
            run = Run(chat, tmp_path / names, *(s.url for s in servers), num_rows=num * len(names), concurrency=num)
            run.write()
        assert not run.failures
        assert [served.most_at_once for served in servers] == [num] * len(names)
    with serving(Served(seconds=0.005)) as served:
        run = Run(chat, tmp_path / "more", served.url, num_rows=60)
        run.write()
    assert served.most_at_once <= 4


def test_first_tries_do_not_wait_in_a_queue(chat: ChatFormat, tmp_path: Path) -> None:
    """Rows are taken one by one as they are asked, those that failed at once first again."""
    with serving(Served()) as served:
        run = Run(chat, tmp_path, served.url, concurrency=2)
        taken: list[tuple[int, int]] = []

        def rows() -> Iterator[int]:
            for row in range(NUM_ROWS):
                taken.append((row, len(kept)))
                yield row

        kept: dict[int, Answer] = {}
        served.faults = [refuse(500)] * 3
        asyncio.run(run.asker(QUICK)._run(rows(), kept.update))
    assert sorted(kept) == list(range(NUM_ROWS))
    assert all(row <= num_kept + len(run.failures) + 3 for row, num_kept in taken)
    assert len(run.failures) == 3


def waiting_for(num: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Nobody is answered before so many ask."""
    barrier = threading.Barrier(num)

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        barrier.wait(timeout=15)
        return completion(body)

    return answer


def test_an_endpoint_that_fails_rests_while_the_others_go_on(chat: ChatFormat, tmp_path: Path) -> None:
    with serving(Served(seconds=0.01)) as good, serving(Served()) as bad:
        bad.faults = [refuse(500)] * 999
        run = Run(chat, tmp_path, bad.url, good.url, num_rows=60)
        start = time.monotonic()
        run.write(Patience(1.0, rest_seconds=0.02, longest_rest_seconds=99.0, tries=2))
    seconds = time.monotonic() - start
    assert len(good.bodies) == 60
    rests = 1 + sum(0.01 * 2**number < seconds for number in range(20))
    assert 4 <= len(bad.bodies) <= 4 * rests


def test_what_fails_together_counts_once(chat: ChatFormat, tmp_path: Path) -> None:
    with serving(Served(waiting_for(8))) as served:
        served.faults = [refuse(503)] * 8
        run = Run(chat, tmp_path, served.url, num_rows=8, concurrency=8)
        run.write(replace(QUICK, tries=2))
    assert len(run.failures) == 8


def test_retry_after_is_waited_for(chat: ChatFormat, tmp_path: Path) -> None:
    with serving(Served()) as served:
        served.faults = [refuse(429, Retry_After="1")]
        run = Run(chat, tmp_path, served.url, num_rows=2, concurrency=1)
        run.write()
    assert served.times[1] - served.times[0] >= 1.0
    assert _seconds(formatdate(time.time() + 100, usegmt=True)) == pytest.approx(100, abs=2)
    assert [_seconds(words) for words in ("7", "soon", "-1", "nan", "", "9" * 5000)] == [7, 0, 0, 0, 0, 3600]
    assert _seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0


def test_if_all_are_down_for_long_the_run_ends_once_and_asks_later_only_for_what_is_missing(
    chat: ChatFormat, tmp_path: Path
) -> None:
    with serving(Served()) as gone:
        pass
    with serving(Served()) as served:
        calm = Run(chat, tmp_path / "calm", served.url)
        calm.write()
        served.bodies, served.seconds = [], 0.01
        healthy = served.answer

        def answer(body: dict[str, Any]) -> dict[str, Any]:
            if len(served.bodies) > 10:
                served.faults = [refuse(502)] * 99
            return healthy(body)

        served.answer = answer
        run = Run(chat, tmp_path, gone.url, served.url)
        with pytest.raises(EndpointError) as error:
            run.write()
        assert f"no endpoint answers ({gone.url}: ConnectError" in str(error.value)
        assert f"{served.url}: HTTP 502 Bad Gateway" in str(error.value)
        assert "\n" not in str(error.value)
        assert not run.path.exists()
        kept = run.path.with_suffix(".journal").read_bytes().splitlines()
        assert 10 <= len(kept) < NUM_ROWS
        served.faults, served.bodies, served.answer = [], [], healthy
        run.write()
    known = {int(line.partition(b" ")[0]) for line in kept}
    missing = [tuple(prompt.prompt_ids) for row, prompt in enumerate(run.prompts) if row not in known]
    assert prompt_ids(served.bodies) == sorted(missing)
    assert run.path.read_bytes() == calm.path.read_bytes()


@pytest.mark.parametrize("status", [400, 401, 404, 302])
def test_a_refused_request_ends_the_run_at_once_with_the_endpoints_words_and_without_the_key(
    chat: ChatFormat, tmp_path: Path, status: int
) -> None:
    words = f'{{"message": "wrong key {KEY}\nor model\x1b[2J"}}'.encode() + b" and so on" * 999
    with serving(Served()) as served:
        served.faults = [refuse(status, words, Location=served.url)] * 99
        run = Run(chat, tmp_path, served.url)
        with pytest.raises(EndpointError) as error:
            run.write()
    message = str(error.value)
    assert f"{served.url}: HTTP {status} " in message
    assert '"wrong key *** or model [2J"' in message
    assert "(asked for p.jsonl:" in message
    assert "data.served_model" in message
    assert message.isprintable()
    assert len(message) < 600
    assert KEY not in message + repr(run.__dict__)
    assert len(served.bodies) <= 4


def test_a_prompt_with_unusable_answers_only_is_named_or_left_out_when_asked(chat: ChatFormat, tmp_path: Path) -> None:
    with serving(Served()) as served:
        run = Run(chat, tmp_path, served.url)
        poison = run.prompts[3].prompt_ids
        served.answer = lambda body: {"choices": []} if body["prompt"] == poison else completion(body)
        with pytest.raises(EndpointError, match=r"p.jsonl:4: 5 unusable answers, .*: choices.*--leave-out-unusable"):
            run.write()
        kinds = run.write(is_leaving_out=True)
    assert kinds == told(run.rows)
    assert kinds["failed"] == 1
    assert (run.rows[3]["finish_reason"], run.rows[3]["response_ids"]) == ("failed", [])
    whole = [number for number, row in enumerate(run.rows, 1) if row["finish_reason"] in {"stop", "length"}]
    assert [int(each.place.rpartition(":")[2]) for each in opened(run)] == whole


def test_many_prompts_with_unusable_answers_end_no_run_that_goes_on_without_them(
    chat: ChatFormat, tmp_path: Path
) -> None:
    """Half of the prompts, more than ask at once, the last among them; a server that says nothing else is one that
    does not answer.
    """
    with serving(Served()) as served:
        run = Run(chat, tmp_path, served.url)
        poison = {tuple(prompt.prompt_ids) for prompt in run.prompts[NUM_ROWS // 2 :]}
        served.answer = lambda body: {"choices": []} if tuple(body["prompt"]) in poison else completion(body)
        kinds = run.write(is_leaving_out=True)
        assert kinds == told(run.rows)
        assert kinds["failed"] == NUM_ROWS - NUM_ROWS // 2
        run.path.unlink()
        served.answer = lambda body: {"choices": []}
        with pytest.raises(EndpointError, match=r"no endpoint answers|unusable answers"):
            run.write(is_leaving_out=True)


def opened(run: Run) -> Responses:
    return open_responses(run.path, run.header, max_tokens=999, vocab_size=VOCAB_SIZE)


def one(chat: ChatFormat, tmp_path: Path, choice: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The row that this choice makes; raises EndpointError where it is of no use."""
    with serving(Served(lambda body: {"choices": [choice]})) as served:
        run = Run(chat, tmp_path, served.url, num_rows=1, **settings)
        kinds = run.write(Patience(1.0, rest_seconds=0.001, tries=2))
    (row,) = run.rows
    assert kinds["retokenised"] == bool(row.get("is_retokenised"))
    return row | {"body": served.bodies[0], "route": served.paths[0]}


S = STOP_TOKEN_ID


@pytest.mark.parametrize(
    ("choice", "ids", "is_retokenised"),
    [
        ({"finish_reason": "stop", "token_ids": [7, 8, S]}, [7, 8, S], None),
        ({"finish_reason": "stop", "token_ids": [S], "stop_reason": None}, [S], None),
        ({"finish_reason": "length", "token_ids": [7] * MOST}, [7] * MOST, None),
        ({"finish_reason": "stop", "token_ids": [7, 8], "stop_reason": S}, [7, 8, S], None),
        ({"finish_reason": "stop", "token_ids": [7, 8], "matched_stop": S}, [7, 8, S], None),
        ({"finish_reason": "stop", "token_ids": []}, [S], True),
        ({"finish_reason": "stop", "text": "ab"}, "ab", True),
        ({"finish_reason": "length", "text": "ab"}, "ab", True),
        ({"finish_reason": "stop", "text": "ab<|role_end|>"}, "ab", True),
        ({"finish_reason": "length", "text": "abcdefghijklmnopqrst"}, "abcdefghijklmnopqrst", True),
    ],
)
def test_the_end_of_turn_belongs_to_a_response_that_stopped_and_made_ids_are_marked(
    chat: ChatFormat, tmp_path: Path, choice: dict[str, Any], ids: list[int] | str, is_retokenised: bool | None
) -> None:
    row = one(chat, tmp_path, {"text": ""} | choice)
    if isinstance(ids, str):
        ids = (chat.tokenizer(ids)["input_ids"] + [S] * (choice["finish_reason"] == "stop"))[:MOST]
    assert row["response_ids"] == ids
    assert row.get("is_retokenised") == is_retokenised
    assert row["finish_reason"] == ("loop" if ids == [S] else choice["finish_reason"])


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"token_ids": [7, S, 8]}, "goes on after an end-of-turn token"),
        ({"token_ids": [7] * (MOST + 1)}, "an answer of 13 tokens, expected 1 to 12"),
        ({"token_ids": []}, "an answer of 0 tokens"),
        ({"token_ids": [True]}, "choices.0.token_ids.0"),
        ({"token_ids": [1.0]}, "choices.0.token_ids.0"),
        ({"token_ids": ["7"]}, "choices.0.token_ids.0"),
        ({"token_ids": [7], "prompt_token_ids": [1]}, "to another prompt than was asked"),
        ({"token_ids": [7], "finish_reason": "abort"}, "choices.0.finish_reason"),
        ({"token_ids": [7], "finish_reason": "stop", "stop_reason": "###"}, "'###' stopped, which ends no turn"),
        ({"token_ids": [7], "finish_reason": "stop", "matched_stop": 300}, "300 stopped, which ends no turn"),
        ({"text": None}, "without text"),
        ({"text": "\ud800"}, "cannot be read"),
        ({"text": "x" * 2**21}, "more than 10"),
    ],
)
def test_an_answer_of_no_use_is_a_failed_try_with_its_reason(
    chat: ChatFormat, tmp_path: Path, choice: dict[str, Any], words: str
) -> None:
    with pytest.raises(EndpointError) as error:
        one(chat, tmp_path, {"text": "", "finish_reason": "length"} | choice)
    assert words in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_chat_server_is_given_messages_and_its_text_is_encoded_with_our_template(
    chat: ChatFormat, tmp_path: Path, reason: str
) -> None:
    choice = {"message": {"role": "assistant", "content": "ab"}, "finish_reason": reason}
    row = one(chat, tmp_path, choice, endpoint_route="chat/completions")
    assert row["route"] == "/v1/chat/completions"
    assert row["body"]["messages"] == [{"role": "user", "content": "é1"}]
    assert row["body"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "prompt" not in row["body"]
    assert row["response_ids"] == chat.tokenizer("ab")["input_ids"] + [S] * (reason == "stop")
    assert row["is_retokenised"] is True
    thoughts = {"message": choice["message"] | {"reasoning_content": "hm"}, "finish_reason": reason}
    with pytest.raises(EndpointError, match="thoughts that were not asked for"):
        one(chat, tmp_path / "other", thoughts, endpoint_route="chat/completions")
