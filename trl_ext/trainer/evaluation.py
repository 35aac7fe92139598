"""Evaluation, recorded completions and the model card of :class:`trl_ext.PPOv2Trainer`."""

import json
import os
from pathlib import Path
from typing import Any

from trl_ext.learning.learner import Learner
from trl_ext.learning.metrics import Metrics, mean
from trl_ext.models.forward import base_of
from trl_ext.ppo.batch import Completion
from trl_ext.ppo.options import GREEDY, Decoding
from trl_ext.process import distributed
from trl_ext.trainer.model_card import model_card
from trl_ext.trainer.prompts import check_dataset
from trl_ext.trainer.resuming import COMPLETIONS
from trl_ext.trainer.reward_sources import RewardSources
from trl_ext.trainer.scoring import Reward


class PPOv2Evaluation:
    """The part of :class:`trl_ext.PPOv2Trainer` that evaluates the policy and records what it answers."""

    args: Any
    state: Any
    control: Any
    callback_handler: Any
    eval_dataset: Any
    folder: Path
    learners: dict[str, Learner]
    episodes: int
    _sources: RewardSources
    sampling_weights: Any
    log: Any

    def _sample(self, batch: list[dict], decoding: Decoding) -> list[Completion]:
        raise NotImplementedError

    def _score(self, completions: list[Completion]) -> None:
        raise NotImplementedError

    @property
    def rewards(self) -> dict[str, list[Reward]]:
        """Return what each reward source gave each completion that was scored last, by the source's name."""
        return self._sources.rewards

    def evaluate(self, eval_dataset: Any = None, ignore_keys=None, metric_key_prefix="eval") -> Metrics:
        """Return every reward source's mean over greedy completions of the evaluation set. The weights do not change.

        Raises:
            ValueError: the evaluation set is missing or empty.
            RewardError: a reward source failed, or left a completion without a score.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        check_dataset(dataset, "eval_dataset")
        rows = [dataset[i] for i in range(distributed.rank(), len(dataset), distributed.size())]
        with self.sampling_weights():
            completions = self._sample(rows, GREEDY) if rows else []
            self._score(completions)
        scored = distributed.all_gather_lists([(c.score, float(c.ended)) for c in completions])
        metrics = {f"{metric_key_prefix}_{name}": mean(v) for name, v in self._sources.gathered().items()}
        metrics[f"{metric_key_prefix}_score"] = mean([score for score, _ in scored])
        metrics[f"{metric_key_prefix}_ended"] = mean([ended for _, ended in scored])
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log_completions(self) -> None:
        """Write greedy completions of the evaluation set, and what they earned, to a file.

        This happens ``num_sample_generations`` times in a run.

        Raises:
            RewardError: a reward source failed, or left a completion without a score.
        """
        times = self.args.num_sample_generations
        every = max(1, self.args.num_total_batches // times) if times > 0 else 0
        if self.eval_dataset is None or not every or (self.state.global_step - 1) % every:
            return
        with self.sampling_weights():
            completions = self._sample([self.eval_dataset[i] for i in range(len(self.eval_dataset))], GREEDY)
        distributed.on_main(lambda: self._record(completions))  # a reward that fails there ends every process

    def _record(self, completions: list[Completion]) -> None:
        self._score(completions)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / COMPLETIONS).open("a", encoding="utf-8") as file:
            for number, done in enumerate(completions):
                rewards = {name: values[number] for name, values in self.rewards.items()}
                record = {"step": self.state.global_step, "prompt": done.prompt.prompt, "completion": done.text}
                record |= {"score": done.score, "rewards": rewards}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def create_model_card(  # type: ignore[override]
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the model card ``README.md`` into the output folder. ``push_to_hub`` calls this.

        Args:
            model_name: the policy's name. By default it is the output folder's.
            dataset_name: the data set's name on the hub.
            tags: further tags.
        """
        if not distributed.is_main():
            return
        learner, args = self.learners["policy"], self.args
        base = base_of(learner.model).config._name_or_path
        facts = {"updates": self.state.global_step, "episodes": self.episodes, "learner": learner, "args": args}
        on_hub = base if base and not os.path.exists(base) else None
        more = [tags] if isinstance(tags, str) else tags or []
        self.folder.mkdir(parents=True, exist_ok=True)
        card = model_card(model_name or self.folder.resolve().name, on_hub, dataset_name, more, facts)
        card.save(self.folder / "README.md")
