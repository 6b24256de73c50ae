"""Train the nano target's byte-level BPE and write its tokenizer files in Hugging Face layout."""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
SPECIAL_TOKENS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|role_end|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<role>",
    "</role>",
    "<|mask|>",
)
"""Ids 0 to 9, in this order; ``<|mask|>`` is never seen by the target and is what a draft puts into empty slots."""
PATTERN = r" ?[A-Za-z]+|[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\n *| +(?! \S)| +|\s+"
"""Words and signs with one leading space; a newline with all the indentation after it is one piece."""


def texts(documents: Path, share: float) -> Iterator[str]:
    """A fixed random share of the training documents; all of the documentation."""
    rng = random.Random(0)
    with documents.open() as lines:
        for line in lines:
            row = json.loads(line)
            if row["split"] == "train" and (row["kind"] == "doc" or rng.random() < share):
                yield row["text"]


def main() -> None:
    """Write tokenizer.json and tokenizer_config.json into --folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=Path, required=True, help="documents.jsonl of build_corpus.py")
    parser.add_argument("--share", type=float, default=0.15, help="share of the Python files read")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(args.documents, args.share), trainer)
    tokenizer.save(str(args.folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|startoftext|>",
        "eos_token": "<|role_end|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (args.folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
