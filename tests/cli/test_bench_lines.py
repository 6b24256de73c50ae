"""What a bench prints is what its JSON holds, in the units that it names."""

from pathlib import Path

from dspark.cli.bench.report import line
from dspark.config import load_run
from dspark.verifier.timing.clock import StageTime

STEP = {"microseconds": 3490.4, "burst_microseconds": 3501.2, "num_launches": 571, "distinct_experts": [5, 8]}
ROW = {"name": "a row", "milliseconds": 50.0, "least_milliseconds": 40.0, "most_milliseconds": 60.5}


def test_a_step_and_a_cycle_say_their_times() -> None:
    said = line("step", "plain", STEP | {"is_finite": True, "is_replay_equal": False})
    assert said == (
        "plain launches: whole step 3490 us, back to back 3501 us, 571 launches, 6.5 experts a layer "
        "(shared one included), finite: True, replay equals eager: False"
    )
    said = line("cycle", 1.0, 8, STEP | {"parts": {"draft": 400.4, "verify": 3000.0}}, 3601.2)
    assert said == (
        "cycle at temperature 1, 8 drafts: back to back 3501 us, -100 to the step alone, 571 launches; "
        "draft 400, verify 3000"
    )


def test_a_stage_and_a_prefill_say_what_they_read_and_compute() -> None:
    said = line("stage", StageTime("Head", 2, 3.0, 4_500_000, 10.25), 0.876)
    assert " ".join(said.split()) == "Head x2 3 launches 4.50 MB 10.25 us 87.6% 20 us in all"
    found = {"tokens": 1000, "matmul_flops_per_second": 8e14, "product_flops": 4e12, "microseconds_8": 10_000.0}
    assert line("prefill", found, 8) == (
        "prefill of 1000 tokens as 8: 10.0 ms, 100000 tokens/s, 400 TFLOP/s of products with weights: "
        "50.0% of 800 TFLOP/s, measured"
    )


def test_training_says_rate_and_memory_where_there_is_one() -> None:
    bare = ROW | {"flops": 20 * 10**12, "share_of_matmul": None, "peak_bytes": None}
    said = "a row 50.00 ms (40.00 - 60.50) 20.00 TFLOP 400.0 TFLOP/s"
    assert " ".join(line("work", bare).split()) == said
    full = line("work", bare | {"share_of_matmul": 0.5, "peak_bytes": 7_250_000_000})
    assert " ".join(full.split()) == f"{said} 50.0% 7.25 GB"
    assert line("speed", {"tokens_per_second": 73_000.4}, 4) == "73,000 tokens/s"
    said = line("speed", {"tokens_per_second": 73_000.4, "share_in_micro_steps": 0.914}, 4)
    assert said == "73,000 tokens/s; 4 x the first row are 91.4% of the step"
    facts = {"mixed_precision": "bf16", "processes": 2, "distributed": "multi_gpu"}
    facts["provenance"] = {"versions": {"python": "3", "torch": "2.13", "triton": "3.7"}, "commit": "abc"}
    run = load_run(Path(__file__).parents[2] / "configs" / "nano.yaml")
    first, second = line("training", run, facts, "a CPU").splitlines()
    assert first.startswith("nano: 5 layers of 256, vocabulary 4096, 48 blocks of 8 at most in 1024 tokens, ")
    assert second == "2 x a CPU, distributed: multi_gpu; torch 2.13, triton 3.7; commit abc"
