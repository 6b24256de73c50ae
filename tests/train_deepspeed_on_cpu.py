"""train.py itself, where DeepSpeed sums over gloo: it would compile an op of its own for that, in a minute."""

import runpy
from pathlib import Path

import deepspeed

if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    runpy.run_path(str(Path(__file__).parent.parent / "train.py"), run_name="__main__")
