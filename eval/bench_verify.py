"""Time a verify step of the fused verifier: the same as ``dspark bench verify``, from a clone."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dspark.cli.main import main

if __name__ == "__main__":
    sys.argv[:1] = ["dspark", "bench", "verify"]
    main()
