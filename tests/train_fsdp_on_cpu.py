"""train.py itself, in CPU processes that accelerate takes for GPU ones: it refuses FSDP2 on CPUs, torch does not."""

import runpy
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import DistributedType

if __name__ == "__main__":
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    runpy.run_path(str(Path(__file__).parent.parent / "train.py"), run_name="__main__")
