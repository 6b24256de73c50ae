"""Operations on tensors: each folder defines one in ``reference.py`` and exposes it in ``__init__``."""

MAX_TOKENS = 16
"""Tokens of one verify step: its kernels take 1..16 of one sequence, and most pad them to 16 whatever their number."""
