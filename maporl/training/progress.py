"""The progress bar of a team's training."""

from tqdm.auto import tqdm
from transformers import TrainerCallback

from maporl.report.metric_panels import bar_text


class TeamProgress(TrainerCallback):
    """Shows the updates, the accuracy of each turn, the reward, sampled tokens per second and the time left."""

    def __init__(self):
        self.bar = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Open the bar on the main process."""
        if state.is_world_process_zero:
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc="update", dynamic_ncols=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the metrics of an update. The metrics of an evaluation are not shown."""
        if self.bar is not None and logs and "tokens_per_second" in logs:  # only updates have this metric
            self.bar.set_postfix_str(bar_text(logs), refresh=False)

    def on_step_end(self, args, state, control, **kwargs):
        """Advance the bar to the present update."""
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def close(self) -> None:
        """Close the bar, so that what is printed next begins a line."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
