"""Cut the corpus into windows of token ids, raw text and chat, and choose the prompts that are kept."""

import argparse
import gzip
import json
import lzma
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from chat_examples import Example, examples
from numpy.typing import NDArray
from tokenizers import Tokenizer

WINDOW = 512
END = 1
"""Id of ``<|endoftext|>``: closes a document or an exchange, and fills a window's tail."""
KINDS = ("body", "write", "docstring", "explain", "class", "continue_code", "continue_docs", "topic")
Ids = NDArray[np.uint16]


def rendered(example: Example) -> str:
    """The exchange in the Ling chat template without thinking."""
    return (
        f"<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>{example.prompt}<|role_end|>"
        f"<role>ASSISTANT</role>\n<think></think>{example.answer}<|role_end|>"
    )


def encoded(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[Ids]:
    """Ids of each text, in order."""
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == 512:
            yield from (np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch_fast(batch))
            batch = []
    yield from (np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch_fast(batch))


def stream_windows(texts: Iterable[Ids]) -> Ids:
    """Documents in a row, each closed by ``<|endoftext|>``, cut every 512 tokens; the last rest is dropped."""
    parts = [part for ids in texts for part in (ids, np.array([END], dtype=np.uint16))]
    stream = np.concatenate(parts)
    return stream[: len(stream) // WINDOW * WINDOW].reshape(-1, WINDOW)


def packed_windows(texts: Iterable[Ids]) -> Ids:
    """Whole exchanges; of 64 waiting ones the longest that fits comes next, and ``<|endoftext|>`` fills the tail."""
    waiting: list[Ids] = []
    source = iter(texts)
    rows = []
    while True:
        while len(waiting) < 64 and (ids := next(source, None)) is not None:
            if len(ids) < WINDOW:
                waiting.append(ids)
        if not waiting:
            return np.stack(rows)
        row = np.full(WINDOW, END, dtype=np.uint16)
        used = len(first := waiting.pop(0))
        row[:used] = first
        while fitting := [i for i, ids in enumerate(waiting) if len(ids) < WINDOW - used]:
            ids = waiting.pop(max(fitting, key=lambda i: len(waiting[i])))
            row[used + 1 : used + 1 + len(ids)] = ids
            used += 1 + len(ids)
        rows.append(row)


def bytes_per_row(tokenizer: Tokenizer, rows: Ids) -> NDArray[np.int32]:
    """UTF-8 bytes that tokens 1.. of each row stand for; special tokens count nothing."""
    texts = tokenizer.decode_batch([row[1:].tolist() for row in rows], skip_special_tokens=True)
    return np.array([len(text.encode()) for text in texts], dtype=np.int32)


def short_prompts(tokenizer: Tokenizer, found: list[Example], count: int, rng: random.Random) -> list[Example]:
    """``count`` exchanges with prompts of at most 200 tokens, as evenly over the kinds as they allow."""
    by_kind: dict[str, list[Example]] = {kind: [] for kind in KINDS}
    for example in rng.sample(found, len(found)):
        if len(by_kind[example.kind]) < count:
            by_kind[example.kind].append(example)
    chosen: list[Example] = []
    seen: set[str] = set()
    while len(chosen) < count and any(by_kind.values()):
        for kind in KINDS:
            while by_kind[kind]:
                example = by_kind[kind].pop()
                if example.prompt not in seen and len(tokenizer.encode(example.prompt).ids) <= 200:
                    seen.add(example.prompt)
                    chosen.append(example)
                    break
    return chosen[:count]


def write_prompts(path: Path, chosen: list[Example]) -> None:
    """One JSON row an exchange, without its answer."""
    with path.open("w") as out:
        for e in chosen:
            row = {"messages": [{"role": "user", "content": e.prompt}], "kind": e.kind, "source": e.source}
            out.write(json.dumps(row) + "\n")


def main() -> None:
    """Write train.npy.xz, heldout.npz, baseline.json and the prompt files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=Path, required=True, help="documents.jsonl of build_corpus.py")
    parser.add_argument("--tokenizer", type=Path, default=Path(__file__).parent / "tokenizer.json")
    parser.add_argument("--chat-share", type=float, default=1.0, help="share of the exchanges found that are kept")
    parser.add_argument("--heldout-prompts", type=int, default=120)
    parser.add_argument("--train-prompts", type=int, default=3000)
    parser.add_argument("--prompts", type=Path, required=True, help="folder for heldout.jsonl and train.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder for the windows")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    documents = [json.loads(line) for line in args.documents.open()]
    rng = random.Random(0)
    split = {name: [d for d in documents if d["split"] == name] for name in ("train", "heldout")}
    chat = {name: [e for d in rows for e in examples(d, rng)] for name, rows in split.items()}
    for name, count in (("heldout", args.heldout_prompts), ("train", args.train_prompts)):
        asked = {e.prompt for e in chat["heldout"]} if name == "train" else set()
        found = [e for e in chat[name] if e.prompt not in asked]
        write_prompts(args.prompts / f"{name}.jsonl", short_prompts(tokenizer, found, count, rng))
    kept = [e for e in chat["train"] if rng.random() < args.chat_share]
    raw = stream_windows(encoded(tokenizer, (d["text"] for d in split["train"])))
    talk = packed_windows(encoded(tokenizer, map(rendered, kept)))
    train = np.concatenate([raw[: len(raw) // 2 * 2], talk[: len(talk) // 2 * 2]])
    np.save(args.out / "train.npy", train)
    heldout = {
        "raw": stream_windows(encoded(tokenizer, (d["text"] for d in split["heldout"]))),
        "chat": packed_windows(encoded(tokenizer, map(rendered, chat["heldout"]))),
    }
    heldout |= {f"{name}_bytes": bytes_per_row(tokenizer, rows) for name, rows in heldout.items()}
    np.savez_compressed(args.out / "heldout.npz", **heldout)
    held = "".join(d["text"] for d in split["heldout"]).encode()
    facts = {
        "train_bytes": sum(len(d["text"].encode()) for d in split["train"]),
        "heldout_bytes": len(held),
        "heldout_gzip_bits_per_byte": 8 * len(gzip.compress(held, 9)) / len(held),
        "heldout_xz_bits_per_byte": 8 * len(lzma.compress(held, preset=9 | lzma.PRESET_EXTREME)) / len(held),
        "raw_windows": len(raw),
        "chat_windows": len(talk),
        "chat_fill": float((talk != END).mean()),
        "chat_examples": {kind: sum(e.kind == kind for e in kept) for kind in KINDS},
    }
    (args.out / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
