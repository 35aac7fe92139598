"""PPOv2 for one policy on current TRL and transformers. TRL removed its own trainer in 1.13, and this one is
maintained.

:class:`trl_ext.trainer.loop.PPOLoop` is the loop. This module defines its seams for one policy.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from trl_ext.chat.encoding import Tokenizer, check_length
from trl_ext.chat.stop_strings import StopStrings, ended
from trl_ext.errors import short_trace
from trl_ext.learning.audit import Built, learner_facts, source_counts
from trl_ext.learning.checks import check_apart, check_module, check_policy_model
from trl_ext.learning.config import PPOv2Config, check_args
from trl_ext.learning.learner import Learner
from trl_ext.learning.learners import Home
from trl_ext.learning.metrics import Clock, mean
from trl_ext.learning.policy import Policy
from trl_ext.learning.trained import NonFiniteError
from trl_ext.learning.trl_scripts import PolicyAndValue, TRLScriptMethods
from trl_ext.models.adapters import fault, fitted
from trl_ext.models.forward import base_of, room_of
from trl_ext.ppo.advantages import assign_advantages
from trl_ext.ppo.batch import Completion, GlobalBatch
from trl_ext.ppo.options import Decoding
from trl_ext.process import distributed
from trl_ext.process.waits import check
from trl_ext.sampling.engine import TokenEngine
from trl_ext.sampling.options import stop_ids_of
from trl_ext.sampling.own_weights import OwnWeights
from trl_ext.sampling.request import Draw, TokenRequest
from trl_ext.trainer.evaluation import PPOv2Evaluation
from trl_ext.trainer.loop import PPOLoop
from trl_ext.trainer.prompts import (
    MOST_TOKENISED,
    Prompt,
    check_columns,
    check_dataset,
    keeps_padding,
    longest_first,
    read_prompt,
    rows_of,
)
from trl_ext.trainer.resuming import Remembers
from trl_ext.trainer.reward_sources import RewardSources
from trl_ext.trainer.scoring import RESERVED, RewardFunction, check_parameters, reward_name
from trl_ext.trainer.update_batch import UpdateBatch

logger = logging.getLogger(__name__)


class Sampler(TokenEngine):
    """The base class of the engines that a program gives to the trainer, which tells them the policy.

    A subclass defines :meth:`submit`, and may override the hooks. Token ids go in, and token ids come out: what was
    sampled is what is trained on.
    """

    def attach(self, learner: Learner, args: Any) -> None:
        """Hook: get to know the policy and the options, a :class:`trl_ext.PPOv2Config`, before anything is sampled."""


class PPOv2Trainer(TRLScriptMethods, PPOv2Evaluation, PPOLoop[UpdateBatch]):  # type: ignore[misc]  # TRL's create_model_card
    """Proximal policy optimisation of one causal language model.

    The constructor takes the arguments of ``trl.experimental.ppo.PPOTrainer`` in TRL 1.12, and a few more.

    Args:
        args: a :class:`PPOv2Config`.
        processing_class: the policy's tokenizer. Its padding token may equal its EOS token.
        model: the policy: a causal language model, or a trainable ``PeftModel``.
        ref_model: the reference of the KL penalty. By default a ``PeftModel`` is read with its adapters off, and
            another model is copied and frozen.
        reward_model: a sequence-classification model with one output. It is optional if ``reward_funcs`` are given.
        train_dataset: rows with ``input_ids``, ``prompt`` (text or messages) or ``messages``. The reward functions
            receive the other columns.
        value_model: a separate critic (sequence classification). By default ``args.critic`` decides.
        data_collator: a function from the list of rows of a batch to a list of rows, or to a padded batch with an
            attention mask, such as ``DataCollatorWithPadding``.
        eval_dataset: rows for ``evaluate()``.
        optimizers: an optimizer and a scheduler. None builds them from ``args``.
        callbacks: further ``TrainerCallback`` objects.
        peft_config: wraps ``model`` in a new adapter.
        reward_funcs: one or several :data:`trl_ext.trainer.scoring.RewardFunction`, plain or async. They return a
            number, a number for each sampled token, or None for each completion.
        reward_weights: one weight for each source: first the reward model, then the functions. The default is 1.
        reward_processing_class: the reward model's tokenizer, if it differs from the policy's.
        sampler: where completions come from, such as from a vLLM server. The default samples from ``model`` here.

    Raises:
        ValueError: a data set, a source of reward or an option is missing or does not fit. The message says which.
        PromptTooLong: a prompt and its completion do not fit the model's context. Of up to 20,000 rows at even
            distances, the 200 with the longest texts are tokenised at the start, and the others when they are sampled
            from.
        WorldError: the processes are not those that the launcher started.
    """

    @short_trace
    def __init__(
        self,
        args: PPOv2Config,
        processing_class: Tokenizer,
        model: PreTrainedModel | PeftModel,
        ref_model: PreTrainedModel | None = None,
        reward_model: nn.Module | None = None,
        train_dataset: Sequence[dict] | None = None,
        value_model: nn.Module | None = None,
        data_collator: Callable[[list[dict]], Any] | None = None,
        eval_dataset: Sequence[dict] | None = None,
        optimizers: tuple = (None, None),
        callbacks: list[TrainerCallback] | None = None,
        peft_config: PeftConfig | None = None,
        reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
        reward_weights: Sequence[float] | None = None,
        reward_processing_class: Tokenizer | None = None,
        sampler: Sampler | None = None,
    ):
        check_args(args, PPOv2Config)
        check_dataset(train_dataset, "train_dataset")
        if eval_dataset is not None:
            check_dataset(eval_dataset, "eval_dataset")
        check_policy_model(model, processing_class, "model")
        check_module(ref_model, "ref_model", "load it with AutoModelForCausalLM.from_pretrained, or leave it out")
        check_module(value_model, "value_model", "load it with AutoModelForSequenceClassification.from_pretrained")
        check_module(reward_model, "reward_model", "pass a function as reward_funcs")
        check_apart(
            {"model": model, "ref_model": ref_model, "reward_model": reward_model, "value_model": value_model},
            "load each model of its own; without ref_model and value_model the trainer makes them from the policy",
        )
        if not isinstance(sampler, Sampler | None):
            raise ValueError(f"sampler: expected an object with the methods of trl_ext.Sampler, got {sampler!r:.80}")
        if reward_funcs is not None:
            check_columns(train_dataset, "train_dataset", RESERVED)
            check_columns(eval_dataset, "eval_dataset", RESERVED)
        if peft_config is not None:
            model = _adapted(model, peft_config)
        self._sources = RewardSources(
            processing_class,
            reward_funcs,
            reward_weights,
            reward_model,
            reward_processing_class,
            args.batch_rows,
        )
        if data_collator is None and train_dataset is not None:  # a collator may add columns
            columns = sorted(read_prompt(train_dataset[0], processing_class).columns)
            for function in self._sources.functions:
                check_parameters(function, columns)
        learner = Learner(
            Policy("policy", model, processing_class, args.model_adapter_name),
            args,
            critic="model" if value_model is not None else args.critic,
            value_model=value_model,
            reference=ref_model,
            ref_adapter=args.ref_adapter_name,
        )
        idle = (["critic_warmup"] if args.critic_warmup else []) + args.for_critics
        if idle and not learner.critic.gives_values:
            raise ValueError(f"{', '.join(idle)}: critic='none' has nothing to learn; choose another, or remove them")
        self._collate = data_collator or list
        self.setup(Home({"policy": learner}, optimizers), args, train_dataset, eval_dataset, callbacks)
        self.best_metric([*self._sources.names, "score", "ended"])
        updates = args.num_total_batches or 0  # setup has counted them
        if args.critic_warmup >= updates:
            raise ValueError(f"critic_warmup: only the critic would learn in all {updates} updates; lower it")
        self._sources.to(self.accelerator.device)
        self.model = PolicyAndValue(learner.model, learner.critic.kind, learner.critic.model)
        self._stop_ids = stop_ids_of(learner.model, processing_class, args.stop_token, args.stop_token_id)
        self._stop_strings = StopStrings.of(processing_class, args.stop_strings)
        rows, tokens = args.local_rollout_forward_batch_size, args.max_tokens_per_generate
        self._sampler: TokenEngine = sampler or OwnWeights(
            {learner.name: learner.policy}, rows, tokens, keep_states=False
        )
        self._sampled_version: int | None = None
        """How many updates the weights that the sampler has have had."""
        if sampler is not None:
            if sampler.tells_cut and args.compares_sampler and args.decoding.cut:
                raise ValueError(
                    f"top_p={args.top_p:g}, top_k={args.top_k}: {type(sampler).__name__} gives the log-probabilities "
                    "of what they leave, which ratio_to: sampler and engine_tis_cap would compare with those of the "
                    "whole distribution; leave them out, or sample from the whole distribution"
                )
            sampler.attach(learner, args)
        for dataset, name in ((train_dataset, "train_dataset"), (eval_dataset, "eval_dataset")):
            self._check_rows(dataset, name, collated=data_collator is not None)

    def _check_rows(self, dataset: Sequence[dict] | None, name: str, collated: bool) -> None:
        """Check the longest and the shortest prompts of a data set, because a run may come to them after hours only."""
        # a collator may shorten prompts, but it does not know what is padding in its rows either
        if not dataset:
            return
        tokenizer = self.learners["policy"].tokenizer
        numbers = longest_first(dataset)
        read = [] if collated else [*numbers[:MOST_TOKENISED], numbers[-1]]  # the shortest one may be empty
        if read:
            self._check_prompts([read_prompt(dataset[n], tokenizer) for n in read], [f"{name}[{n}], " for n in read])
        padded = next((n for n in numbers if keeps_padding(dataset[n], tokenizer)), None)
        if padded is not None and distributed.is_main():
            logger.warning(
                "%s[%d]: the prompt begins or ends with several tokens %r, which are both padding and EOS, and no "
                "attention_mask says which; they are kept in the prompt. Keep the tokenizer's attention_mask as a "
                "column, or tokenise without padding",
                name, padded, tokenizer.pad_token,
            )  # fmt: skip

    def next_batch(self, ahead: int = 0) -> UpdateBatch:
        """Return this process's rows of the next update, each ``num_generations`` times.

        They are in seeded order, without replacement in an epoch.
        """
        step = self.state.global_step
        rows = [self.train_dataset[i] for i in self.indices(len(self.train_dataset), ahead)]
        return UpdateBatch(step + 1 + ahead, step, [row for row in rows for _ in range(self.args.num_generations)])

    def collect(self, batch: UpdateBatch) -> UpdateBatch:
        """Sample one completion for each row of ``batch`` from the current policy.

        Raises:
            PromptTooLong: a prompt and its completion do not fit the model's context.
            ValueError: a row has no prompt, or a token that the model lacks.
        """
        batch.completions = self._sample(batch.examples, self.args.decoding)
        return batch

    def score(self, batch: UpdateBatch) -> UpdateBatch:
        """Give every completion its score. ``self.rewards`` keeps each source's values by name.

        Raises:
            RewardError: a reward source failed, or left a completion without a score.
            NonFiniteError: a reward is NaN or infinite.
        """
        with self.droppable():
            self._score(batch.completions)
        for name, values in self._sources.gathered().items():
            batch.metrics[f"reward/{name}"] = mean(values)
            batch.counts |= source_counts(name, values)
        return batch

    def built(self) -> Built:
        """Return the facts of the policy and of its sources of reward."""
        sources = dict(zip(self._sources.names, self._sources.weights, strict=True))
        facts = learner_facts(self.learners["policy"], self.args) | {"groups": "updates", "ends": True}
        return {"learner": {"policy": facts}, "source": {name: {"weight": weight} for name, weight in sources.items()}}

    def update(self, batch: UpdateBatch) -> UpdateBatch:
        """Train on the token batch of ``batch``.

        Raises:
            RuntimeError: a step of the loop was left out before this one.
            NonFiniteError: a loss or a gradient is NaN or infinite.
        """
        if not batch.token_batches:
            raise RuntimeError("update: the batch has no token_batches; call advantage(batch) before update(batch)")
        return super().update(batch)

    def advantage(self, batch: UpdateBatch) -> UpdateBatch:
        """Fill in the token batch of the policy, with old log-probabilities, values, advantages and returns.

        Raises:
            ValueError: a completion has no score, or a score that its ``token_scores`` contradict.
            NonFiniteError: a score, a log-probability or a value is NaN or infinite.
        """
        check_completions(batch.completions, self._vocabulary())
        critic_only = batch.number <= self.args.critic_warmup
        batches, metrics = self.learning.token_batches({"policy": batch.completions}, ["policy"] if critic_only else ())
        has_critic = self.learners["policy"].critic.gives_values
        gathered = GlobalBatch.of(batches["policy"])
        metrics["policy"] |= assign_advantages(gathered.rows, self.args, has_critic)
        batch.count(metrics)
        batch.counts |= {
            "learner/policy/due": float(not critic_only),
            "learner/policy/asked": float(len(gathered.rows)),
            "learner/policy/answered": float(len(gathered.rows)),
            "learner/policy/compared": 1.0,
            "learner/policy/differ": float(len(gathered.rows.score.unique()) > 1),
        }
        batch.token_batches = {"policy": gathered.back(batches["policy"])}
        batch.metrics |= self.named_metrics(metrics)
        return batch

    def _score(self, completions: list[Completion]) -> None:
        self._sources.score(completions, self.args.missing_eos_penalty, self.state)

    def _sample(self, batch: list[dict], decoding: Decoding) -> list[Completion]:
        learner = self.learners["policy"]
        prompts = [read_prompt(row, learner.tokenizer) for row in rows_of(self._collate(batch))]
        self._check_prompts(prompts)
        strings = tuple(self.args.stop_strings or ())
        draw = Draw(self.args.response_length, **vars(decoding), stop=strings, stop_ids=self._stop_ids)
        first = self.episodes + distributed.rank() * self.args.local_batch_size
        requests = [
            TokenRequest(learner.name, prompt.ids, draw, (self.args.seed, first + number), label=f"completion {number}")
            for number, prompt in enumerate(prompts)
        ]
        sampled = [completion.up_to(self._stop_strings) for completion in self._sampler.sample(requests)]
        self._sampler.release()
        return [
            Completion(
                prompt_ids=prompt.ids,
                response_ids=response.ids,
                ended=ended(response.ids, self._stop_ids, self._stop_strings),
                sampled_logprobs=response.logprobs,
                label=f"update {self.state.global_step + 1}, completion {number}",
                prompt=prompt,
                text=learner.tokenizer.decode(response.ids, skip_special_tokens=True),
            )
            for number, (prompt, response) in enumerate(zip(prompts, sampled, strict=True))
        ]

    def _vocabulary(self) -> int:
        return base_of(self.learners["policy"].model).config.get_text_config().vocab_size

    def _check_prompts(self, prompts: list[Prompt], places: Sequence[str] = ()) -> None:
        """Check that the model has an embedding for every token, and that prompts and completions fit its context."""
        size = self._vocabulary()
        wheres = [
            f"{place}prompt {p.prompt!r:.80}" for place, p in zip(places or [""] * len(prompts), prompts, strict=True)
        ]
        for prompt, where in zip(prompts, wheres, strict=True):
            if max(prompt.ids) >= size:
                raise ValueError(
                    f"{where}: token id {max(prompt.ids)} is outside the model's vocabulary of {size}; "
                    "tokenise with the model's own tokenizer, or call model.resize_token_embeddings(len(tokenizer))"
                )
        longest, where = max(zip(prompts, wheres, strict=True), key=lambda pair: len(pair[0].ids))
        context = room_of(base_of(self.learners["policy"].model))
        remedy = "shorten the prompt, lower response_length, or leave such rows out (Dataset.filter)"
        check_length(len(longest.ids), self.args.response_length, context, where, "the model", remedy)

    def finish_update(self, batch: UpdateBatch, clock: Clock | None = None) -> None:
        """Let the sampler take over the new weights, and record the update."""
        with self.skippable():  # a server may not answer, and who ends samples no more
            check()
            self._sync_sampler(batch.number)
        super().finish_update(batch, clock)

    def inform_samplers(self) -> None:
        """Let the sampler take over the policy's weights, unless it has them."""
        if self._sampled_version != self.state.global_step:
            self._sync_sampler(self.state.global_step)

    def _sync_sampler(self, version: int) -> None:
        with self.whole_weights():
            self._sampler.sync("policy", version)
        self._sampled_version = version

    def forget_samplers(self) -> None:
        """Let the sampler take over the weights before it samples."""
        self._sampled_version = None

    def remembering(self) -> dict[str, Remembers]:
        """Return the reward functions that say which model is behind them, such as those of a reward server."""
        functions: dict[str, object] = {reward_name(function): function for function in self._sources.functions}
        return {name: function for name, function in functions.items() if isinstance(function, Remembers)}


def _adapted(model: Any, config: PeftConfig) -> PeftModel:
    if not isinstance(config, PeftConfig):
        raise ValueError(f"peft_config: expected a peft.PeftConfig, as peft.LoraConfig, got {type(config).__name__}")
    if isinstance(model, PeftModel):
        raise ValueError("peft_config: the model is a PeftModel already; leave it out, or pass merge_and_unload()")
    if (why := fault(config)) is not None:
        raise ValueError(f"peft_config: {why}")
    return get_peft_model(model, fitted(config, model))


def check_completions(completions: Sequence[Completion], vocabulary: int) -> None:
    """Check that every completion has token ids, and one score that its ``token_scores`` do not contradict.

    ``vocabulary`` is the number of the policy's tokens.

    Raises:
        ValueError: completions are missing, or one lacks a score, has two scores, or has ids that the policy lacks.
        NonFiniteError: a score is NaN or infinite.
    """
    if not completions:
        raise ValueError("advantage: the batch has no completions; call collect and score, or fill completions in")
    for completion in completions:
        _check_ids(completion, "prompt_ids", completion.prompt_ids, vocabulary)
        _check_ids(completion, "response_ids", completion.response_ids, vocabulary)
        _check_score(completion)


def _check_ids(completion: Completion, name: str, ids: Any, vocabulary: int) -> None:
    where = f"{completion.label}: {name}"
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise ValueError(f"{where}: expected a list of token ids, got {ids!r:.80}; a tensor has tolist()")
    if not ids:
        raise ValueError(f"{where}: expected at least one token, got none")
    if min(ids) < 0 or max(ids) >= vocabulary:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ValueError(f"{where}: token id {wrong} is outside the model's vocabulary of {vocabulary}")


def _check_score(completion: Completion) -> None:
    """Check what a completion earned."""
    # token_scores are what is trained on, so a score of its own would do nothing
    where, parts, score = completion.label, completion.token_scores, completion.score
    if parts is None and score is None:
        raise ValueError(f"{where}: has no score; call score(batch) before advantage(batch), or give it a score")
    if parts is not None and len(parts) != len(completion.response_ids):
        raise ValueError(f"{where}: expected {len(completion.response_ids)} token_scores, as tokens, got {len(parts)}")
    for name, value in [("score", score), *(("token_scores", part) for part in parts or ())]:
        if value is not None and not math.isfinite(_number(value, f"{where}: {name}")):
            raise NonFiniteError(f"{where}: {name} is {float(value)}")
    if parts is None or score is None:
        return
    earned = math.fsum(parts)
    if not math.isclose(float(score), earned, rel_tol=1e-5, abs_tol=1e-5):
        raise ValueError(
            f"{where}: score is {float(score):g}, but its token_scores have the sum {earned:g}, and these are trained "
            "on; change token_scores too, or set token_scores to None to give the whole score at the last token"
        )


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        raise ValueError(f"{where}: expected a number, got {value!r:.80}") from None
