"""Time a training step: the same as ``dspark bench train``, from a clone, and what ``accelerate launch`` can start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dspark.cli.main import main

if __name__ == "__main__":
    sys.argv[:1] = ["dspark", "bench", "train"]
    main()
