"""Runs that end before their end."""

from transformers import TrainerCallback


class StopAfter(TrainerCallback):
    """Ends training after update ``step``; with None it goes on to its end."""

    def __init__(self, step: int | None):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_training_stop or state.global_step == self.step
