"""Which texts were there before, word for word or nearly: memory for a few numbers a text, the rest on disk."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash  # type: ignore[attr-defined]

SHINGLE_WORDS, NUM_MINIMA, BAND_MINIMA, SEED = 5, 128, 4, 1
BANDS = [f"band{band}" for band in range(NUM_MINIMA // BAND_MINIMA)]
_ALONE = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(f"[{_ALONE}]|[^\\W{_ALONE}]+|[^\\w\\s]")
_MEMBER = np.uint64(2**32 - 1)


class Fingerprints:
    """Fingerprints of texts, in order, in files of an empty ``folder``: 8 bytes for all its words, 512 for MinHash.

    Case and spaces make no difference; of Chinese, Japanese and Korean, and of punctuation, every sign is a word.
    Similarity is that of the sets of five words in a row (Jaccard), by the share of 128 minima that are equal: 0.8 is
    right to 0.035.
    Source: Broder, On the resemblance and containment of documents (1997); the minima are those of the package rensa.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_texts = folder, 0
        for name in ("words", *BANDS):
            self._append(name, b"")

    def add(self, texts: Sequence[str]) -> None:
        """Take the next texts in."""
        words = [_WORD.findall(text.casefold()) or [text] for text in texts]
        joined = [" ".join(row).encode("utf-8", "surrogatepass") for row in words]
        self._append("words", b"".join(hashlib.blake2b(row, digest_size=8).digest() for row in joined))
        minima = RMinHash.digest_matrix_from_token_sets([_shingles(row) for row in words], NUM_MINIMA, SEED)
        minima_NM = np.array(minima.to_rows(), dtype=np.uint32)
        for band, minima_NJ in zip(BANDS, np.split(minima_NM, len(BANDS), 1), strict=True):
            self._append(band, np.ascontiguousarray(minima_NJ).tobytes())
        self.num_texts += len(texts)

    def find(self, similarity: float | None) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """For every text the first one before it that it repeats (-1: none), and whether only nearly.

        A text is near to another that shares a band of four minima with it and at least ``similarity`` of all (None:
        nothing is near). Only the first text of a band's group and its neighbour are looked at, so one of many alike
        may go unnoticed in a band; it has 32.
        """
        words_N = self._read("words", np.uint64, 1)[:, 0]
        _, first_N, group_N = np.unique(words_N, return_index=True, return_inverse=True)
        earlier_N = first_N[group_N].astype(np.int64)
        is_new_N = earlier_N == np.arange(self.num_texts)
        earlier_N[is_new_N] = -1
        is_near_N = np.zeros(self.num_texts, dtype=np.bool_)
        if similarity is None or not self.num_texts:
            return earlier_N, is_near_N
        pairs_P = self._candidates(np.flatnonzero(is_new_N))
        first_P, second_P = (pairs_P >> np.uint64(32)).astype(np.int64), (pairs_P & _MEMBER).astype(np.int64)
        num_equal_P = np.zeros(len(pairs_P), dtype=np.int16)
        for band in BANDS:
            minima_NJ = self._read(band, np.uint32, BAND_MINIMA)
            num_equal_P += (minima_NJ[first_P] == minima_NJ[second_P]).sum(1, dtype=np.int16)
        is_alike_P = num_equal_P >= similarity * NUM_MINIMA
        first_P, second_P = first_P[is_alike_P][::-1], second_P[is_alike_P][::-1]  # reversed: the earliest stays
        earlier_N[second_P], is_near_N[second_P] = first_P, True
        return earlier_N, is_near_N

    def _candidates(self, texts_N: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Pairs of texts that share a band, the earlier in the upper 32 bits, in order, each once."""
        found = np.zeros(0, dtype=np.uint64)
        for band in BANDS:
            halves_N2 = self._read(band, np.uint64, 2)[texts_N]
            keys_N = halves_N2[:, 0] * np.uint64(0x9E3779B97F4A7C15) ^ halves_N2[:, 1]
            order_N = np.argsort(keys_N, kind="stable")
            sorted_N, members_N = keys_N[order_N], texts_N[order_N].astype(np.uint64)
            follows_N = np.concatenate(([False], sorted_N[1:] == sorted_N[:-1]))
            start_N = np.maximum.accumulate(np.where(follows_N, 0, np.arange(len(order_N))))
            pairs = [found]
            for earlier_N in (members_N[start_N], np.roll(members_N, 1)):
                pairs.append(earlier_N[follows_N] << np.uint64(32) | members_N[follows_N])
            found = np.sort(np.concatenate(pairs))
            found = found[np.concatenate((found[:1] >= 0, found[1:] != found[:-1]))]
        return found

    def _append(self, name: str, content: bytes) -> None:
        with open(self.folder / name, "ab") as file:
            file.write(content)

    def _read(self, name: str, dtype: type[np.generic], width: int) -> NDArray[Any]:
        return np.fromfile(self.folder / name, dtype).reshape(self.num_texts, width)


def _shingles(words: list[str]) -> list[str]:
    return [" ".join(words[place : place + SHINGLE_WORDS]) for place in range(max(1, len(words) - SHINGLE_WORDS + 1))]
