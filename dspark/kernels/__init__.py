"""Operations on tensors: each folder defines one in ``reference.py`` and exposes it in ``__init__``."""
