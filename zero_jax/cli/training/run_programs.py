"""What a run executes: the program of its step, or those of its slices, compiled ahead of the first step."""


from zero_jax.cli.training.loop import plain_metrics
from zero_jax.cli.training.run_head import memory_bytes
from zero_jax.cli.training.slice_programs import SlicePrograms
from zero_jax.diloco.step import DiLoCoStep
from zero_jax.step.compiled import CompiledStep
from zero_jax.step.disk.step import DiskTrainStep
from zero_jax.step.step import ZeroTrainStep
from zero_jax.typing import Batch


class OneProgram:
    """The program of a `ZeroTrainStep`, compiled ahead of time for its memory analysis: the step would compile again.

    Attributes:
        run: takes a step: (state, batch) to (new state, metrics).
        alone: the program, as data.
        memory_bytes: that it needs on each device.
        module: its name in a trace.
        read: the metrics of a step as numbers.
    """

    module, read = "jit__step", staticmethod(plain_metrics)

    def __init__(self, step: ZeroTrainStep, batch: Batch):
        """Compiles; a step whose states are in files runs by itself, for its program does not read them."""
        if isinstance(step, DiskTrainStep):
            self.run, self.alone = step, step.compiled_step(batch)
        else:
            self.run = step.lower(batch).compile()
            self.alone = CompiledStep(self.run.as_text() or "", self.run.memory_analysis(), step.layout(batch),
                                      step.contract(batch))
        self.memory_bytes = memory_bytes(self.alone)

    def head_lines(self, steps: int) -> list[str]:
        """What the head of a run says of its programs beside the step's own lines."""
        return []


def programs_of(step: ZeroTrainStep | DiLoCoStep, batch: Batch, *, after: int) -> OneProgram | SlicePrograms:
    """The programs of a run. after: the steps that its state has taken."""
    return SlicePrograms(step, batch, after=after) if isinstance(step, DiLoCoStep) else OneProgram(step, batch)
