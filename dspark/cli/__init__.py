"""The commands, one file each."""

import os

# Read when torch is loaded: threads that wait soon sleep, or a busy CPU takes many times as long.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
