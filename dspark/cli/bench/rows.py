"""What dspark bench verify measures and prints: a window's step with its stages, and a draft's whole cycles."""

from typing import Any, NamedTuple

import torch

from dspark.cli.bench.report import Report, line
from dspark.verifier import Step, Verifier, timing
from dspark.verifier.calls import Call
from dspark.verifier.drafting import Cycle, Drafter


class Rows(NamedTuple):
    """Measures one verifier after ``context`` tokens; all is kept in the report and saved as it comes."""

    verifier: Verifier
    clock: timing.Clock
    bandwidth: float
    context: int
    report: Report
    trace_NLK: torch.Tensor | None = None

    def measure(self, num_tokens: int, found: dict[str, Any]) -> None:
        """One window length, with plain and chained launches: the step, then its stages."""
        verifier, clock, context = self.verifier, self.clock, self.context
        self.report.console.rule(f"T = {num_tokens}, context {context}", align="left")
        if self.trace_NLK is not None:
            found["trace"] = timing.replay(verifier, self.trace_NLK, num_tokens)
            self.report.say(f"experts a layer (shared one included) over the trace's windows: {found['trace']}")
        hidden_TD = []
        for kind in ("plain", "chained"):
            verifier.is_chained = kind == "chained"
            timing.fill(verifier, num_tokens, context)
            step = Step(verifier, num_tokens)
            stages, eager = timing.record_step(step)
            hidden_TD.append(step().hidden_TD.clone())
            is_finite, is_equal = bool(hidden_TD[-1].isfinite().all()), torch.equal(eager.hidden_TD, hidden_TD[-1])
            timed = timing.time_step(step, clock, context)
            this = found[kind] = timed._asdict() | {"is_finite": is_finite, "is_replay_equal": is_equal, "stages": []}
            this["distinct_experts"] = timing.distinct_experts(stages)
            self.report.say(line("step", kind, this))
            self._stages(stages, this)
            this["moe_pair_microseconds"] = self._time_pairs(stages)
        found["is_chained_equal"] = torch.equal(*hidden_TD)
        self.report.say(f"with and without chained launches bit-equal: {found['is_chained_equal']}")

    def measure_cycles(self, drafter: Drafter, found: dict[str, Any]) -> None:
        """Draft, verify, accept, commit and update as one graph, at temperatures 0 and 1; then the parts, each alone.

        The greedy drafts of random weights repeat themselves, so their window visits fewer experts; drawn ones do not.
        """
        context, alone = self.context, found["chained"]["burst_microseconds"]
        for temperature in (0.0, 1.0):
            timing.fill(self.verifier, drafter.num_drafts + 1, context)
            generator = torch.Generator(self.verifier.weights.device).manual_seed(0)  # all ranks draw alike
            cycle = Cycle(self.verifier, drafter, temperature, generator)
            timed = timing.time_step(cycle, self.clock, context)
            parts = timing.time_parts(cycle, self.clock, context)
            this = found[f"cycle_temperature_{temperature:g}"] = timed._asdict() | {"parts": parts, "stages": []}
            self.report.say(line("cycle", temperature, drafter.num_drafts, this, alone))
            names = {"Draft", "Context", "Update", "Accept", "Arg-max", "Head", "Result", "Start", "Next"}
            stages = {k: calls for k, calls in timing.record_step(cycle)[0].items() if k.split()[0] in names}
            self._stages(stages, this)

    def measure_prefill(self, num_tokens: int) -> None:
        """Reading so many tokens, as one sequence and as eight."""
        peak, flops = timing.matmul_flops(self.clock), num_tokens * timing.product_flops(self.verifier.weights)
        found: dict[str, float] = {"tokens": num_tokens, "matmul_flops_per_second": peak, "product_flops": flops}
        self.report["prefill"] = found
        for num_sequences in sorted({1, min(8, num_tokens)}):
            microseconds = timing.time_prefill(self.verifier, self.clock, num_tokens, num_sequences)
            found[f"microseconds_{num_sequences}"] = microseconds
            self.report.say(line("prefill", found, num_sequences))

    def _time_pairs(self, stages: dict[str, list[Call]]) -> float | None:
        """Microseconds of an expert product up and its product down, all layers' in turn, as a step runs them."""
        pairs = zip(stages.get("MoE up", ()), stages.get("MoE down", ()), strict=True)
        calls = {"MoE up, down": [call for pair in pairs for call in pair]}
        if not calls["MoE up, down"]:
            return None
        (stage,) = timing.time_stages(self.verifier, calls, self.clock, self.context)
        share = stage.num_bytes / stage.microseconds * 1e6 / self.bandwidth
        self.report.say(f"MoE up and down in turn: {2 * stage.microseconds:.1f} us a pair, {share:.1%}")
        return 2 * stage.microseconds

    def _stages(self, stages: dict[str, list[Call]], this: dict[str, Any]) -> None:
        for stage in timing.time_stages(self.verifier, stages, self.clock, self.context):
            this["stages"].append(stage._asdict())
            self.report.say(line("stage", stage, stage.num_bytes / stage.microseconds * 1e6 / self.bandwidth))
        rows, keys = this["stages"], ("num_bytes", "microseconds")
        this["num_bytes"], total = (sum(row[key] * row["num_calls"] for row in rows) for key in keys)
        this["floor_microseconds"] = floor = this["num_bytes"] / self.bandwidth * 1e6
        self.report.say(f"sum of stages {total:.0f} us; {this['num_bytes'] / 1e9:.2f} GB, byte floor {floor:.0f} us")
