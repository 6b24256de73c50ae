"""What ranks say to each other: alone, as processes on CPUs, or on GPUs over peer memory."""

from dspark.verifier.ranks.alone import ALONE, Ranks
from dspark.verifier.ranks.launch import start
from dspark.verifier.ranks.processes import Processes

__all__ = ["ALONE", "Processes", "Ranks", "start"]
