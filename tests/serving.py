"""A served target that is made up: an HTTP server in threads whose answers follow from ids and seed, with faults."""

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tiny import LEARNED_TOKENS, STOP_TOKEN_ID

Fault = Callable[[BaseHTTPRequestHandler, bytes], None]


def made_up_ids(prompt_ids: list[int], seed: int, most: int) -> list[int]:
    """One to ``most`` ids, the stop token last unless there was no room for it."""
    draw = random.Random(f"{prompt_ids}/{seed}")
    ids = [draw.randrange(LEARNED_TOKENS) for _ in range(draw.randrange(most + 4))]
    return ids[:most] if len(ids) >= most else [*ids, STOP_TOKEN_ID]


def completion(body: dict[str, Any]) -> dict[str, Any]:
    """What a server with token ids says to a request."""
    ids = made_up_ids(body["prompt"], body["seed"], body["max_tokens"])
    reason = "stop" if ids[-1] == STOP_TOKEN_ID else "length"
    choice = {"index": 0, "text": "?", "finish_reason": reason, "stop_reason": None, "token_ids": ids}
    return {"id": "cmpl-1", "choices": [choice | {"prompt_token_ids": body["prompt"]}], "usage": {"total_tokens": 1}}


class Served(ThreadingHTTPServer):
    """Remembers requests; ``faults`` are spent one a request, then every request is answered after ``seconds``."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any]] = completion, seconds: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.seconds = answer, seconds
        self.faults: list[Fault] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.most_at_once = self.num_at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """As a run names it."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, *_: Any) -> None:
        """A client that is gone is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Served

    def do_POST(self) -> None:
        served = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with served.lock:
            served.bodies.append(body)
            served.headers.append(dict(self.headers))
            served.paths.append(self.path)
            served.times.append(time.monotonic())
            fault = served.faults.pop(0) if served.faults else None
            served.num_at_once += 1
            served.most_at_once = max(served.most_at_once, served.num_at_once)
        time.sleep(served.seconds)
        content = json.dumps(served.answer(body)).encode()
        with served.lock:
            served.num_at_once -= 1
        (fault or respond)(self, content)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def announce(handler: BaseHTTPRequestHandler, content: bytes, status: int = 200, **headers: str) -> None:
    """The head of a response with this body."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()


def respond(handler: BaseHTTPRequestHandler, content: bytes, status: int = 200, **headers: str) -> None:
    """A whole response."""
    announce(handler, content, status, **headers)
    handler.wfile.write(content)


def refuse(status: int, content: bytes = b'{"error": {"message": "not now"}}', **headers: str) -> Fault:
    """Another status."""
    return lambda handler, _: respond(handler, content, status, **headers)


def say(content: bytes) -> Fault:
    """Another body."""
    return lambda handler, _: respond(handler, content)


def hang(handler: BaseHTTPRequestHandler, _: bytes) -> None:
    """Nothing comes for a while."""
    time.sleep(1.0)
    handler.close_connection = True


def drip(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    """A body that begins and never ends."""
    announce(handler, content)
    for byte in content[:12]:
        handler.wfile.write(bytes([byte]))
        time.sleep(0.1)
    handler.close_connection = True


def break_off(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    """The connection closes in the middle of the body."""
    announce(handler, content)
    handler.wfile.write(content[: len(content) // 2])
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


@contextmanager
def serving(served: Served) -> Iterator[Served]:
    """It answers until the block ends."""
    thread = threading.Thread(target=served.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        served.shutdown()
        served.server_close()
        thread.join()
