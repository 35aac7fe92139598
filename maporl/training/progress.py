"""The progress bar of a team's training."""

from tqdm.auto import tqdm
from transformers import TrainerCallback


class TeamProgress(TrainerCallback):
    """Shows updates, accuracy per turn, reward, sampled tokens per second and the time left."""

    def __init__(self):
        self.bar = None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc="update", dynamic_ncols=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.bar is None or not logs or "tokens_per_second" not in logs:
            return
        turns = sorted(k for k in logs if k.startswith("accuracy/turn_") and k.count("/") == 1)
        self.bar.set_postfix_str(
            "accuracy " + " ".join(f"{logs[k]:.0%}" for k in turns)
            + f", reward {logs['reward/score']:.2f}, {logs['tokens_per_second']:.0f} tokens/s",
            refresh=False,
        )  # fmt: skip

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()
            self.bar = None
