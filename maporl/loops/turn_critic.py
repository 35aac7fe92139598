"""A critic of turns that is a language model (SWEET-RL, arXiv 2503.15478; facebookresearch/sweet_rl).

The advantage of what an agent said in a turn is the mean over its tokens of ``log p(token) - log p_ref(token)``. The
critic and its reference start from the policy's weights, and both read the right answer, which the policy is never
shown. The critic learns from pairs of dialogues of one question by ``-log sigmoid(beta (worth of the better one - worth
of the other))``, so advantages of turns are learned from what whole dialogues were worth. The worth of a dialogue is
the sum of its turns' advantages in the paper, and one mean over the tokens of all its turns in the published code.
The critic then ranks several candidates for what an agent said, which are sampled in the state in which it said it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import Trainer, TrainingArguments

from maporl.config.schema import Config
from maporl.errors import RunError
from maporl.loops.rows import Row, TrajectoryPair
from maporl.loops.section import TurnCriticStage
from maporl.loops.stages import optimizer_of, run_quietly, trainer_options
from maporl.run import ResolvedRun
from maporl.team.agents import Policy
from maporl.types import Example, Utterance
from trl_ext.chat.control_tokens import encode_words
from trl_ext.chat.encoding import Tokenizer
from trl_ext.chat.stop_strings import StopStrings, ended
from trl_ext.models.forward import accepts, base_of, completion_logprobs
from trl_ext.ppo import maths
from trl_ext.sampling.request import Draw, TokenRequest
from trl_ext.sampling.sample import sample

FOLDER = "others/turn_critic"
"""Where a stage's folder keeps the critics of turns, a folder for each policy."""

Read = tuple[list[int], list[int]]
"""What a critic reads: the ids of a prompt and of what was said after it."""


def read_by_critic(tokenizer: Tokenizer, row: Row, example: Example, privileged: str) -> Read:
    """Return what a critic reads of ``row``: the ``privileged`` text, then the tokens that the agent saw and said.

    A token for the beginning of texts stays the first.

    Raises:
        RunError: the text has the right answer, and the question comes without one.
    """
    if "{answer}" in privileged and example.answer is None:
        raise RunError(
            f"question {row.question!r}: a critic of turns reads the right answer, and this question has none; use a "
            "task with answers, or set privileged: '' for the stage"
        )
    text = encode_words(tokenizer, privileged.format(answer=example.answer)) if privileged else []
    begun = 1 if tokenizer.bos_token_id is not None and row.prompt_ids[:1] == [tokenizer.bos_token_id] else 0
    return [*row.prompt_ids[:begun], *text, *row.prompt_ids[begun:]], row.completion_ids


def turn_advantages(
    critic: Policy, reference: Policy, reads: Sequence[Read], by_reference: Sequence[Read] | None = None
) -> list[float]:
    """Return the advantage of each completion after its prompt, in nats a token.

    ``by_reference`` None: the reference reads the same.
    """
    logprobs = []
    for policy, inputs in ((critic, reads), (reference, reads if by_reference is None else by_reference)):
        with policy.active():
            logprobs.append(completion_logprobs(policy.model, inputs))
    return [(logprob - other) / len(said) for logprob, other, (_, said) in zip(*logprobs, reads, strict=True)]


def worth_of(ratios: Sequence[Any], lengths: Sequence[int], mean_over: Literal["turn", "dialogue"]) -> Any:
    """Return what a critic says a dialogue is worth, in nats.

    Args:
        ratios: for each turn, the critic's log-probability of what was said, summed over its tokens, less the
            reference's.
        lengths: the number of tokens of each turn.
        mean_over: whether the means over the tokens of each ``turn`` are added, or one is taken over the ``dialogue``.
    """
    if mean_over == "dialogue":
        return sum(ratios) / sum(lengths)
    return sum(ratio / length for ratio, length in zip(ratios, lengths, strict=True))


class TurnCriticTrainer(Trainer):
    """Trains a critic of turns on pairs of trajectories, each ``{chosen, rejected}`` with (read, reference) for every
    turn.

    ``reference`` is the log-probability of what was said under the reference's weights, summed over its tokens.
    ``mean_over`` is as for :func:`worth_of`.
    """

    def __init__(self, beta: float, mean_over: Literal["turn", "dialogue"], **options: Any):
        super().__init__(data_collator=lambda rows: {"pairs": rows}, **options)
        self.beta, self.mean_over = beta, mean_over

    def compute_loss(  # type: ignore[override]  # its other arguments are not needed
        self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any
    ) -> Any:
        """Return the mean loss of the pairs in ``inputs``."""
        gaps = [self._worth(model, pair["chosen"]) - self._worth(model, pair["rejected"]) for pair in inputs["pairs"]]
        loss = -logsigmoid(self.beta * torch.stack(gaps)).mean()
        return (loss, gaps) if return_outputs else loss

    def _worth(self, model: Any, turns: Sequence[tuple[Read, float]]) -> Tensor:
        lengths = [len(said) for (_, said), _ in turns]
        return worth_of([self._ratio(model, *turn) for turn in turns], lengths, self.mean_over)

    @staticmethod
    def _ratio(model: Any, read: Read, reference: float) -> Tensor:
        prompt, said = read
        base = base_of(model)
        ids = torch.tensor([[*prompt, *said]], device=base.device)
        options = {"logits_to_keep": len(said) + 1} if accepts(base, "logits_to_keep") else {}
        logits = model(input_ids=ids, use_cache=False, **options).logits[:, -len(said) - 1 : -1].float()
        return maths.token_logprobs(logits, ids[:, len(prompt) :]).sum() - reference


def train_turn_critic(
    config: Config,
    stage: TurnCriticStage,
    critic: Policy,
    pairs: Sequence[TrajectoryPair],
    scratch: Path,
    quiet: bool = False,
) -> dict[str, float]:
    """Train ``critic`` in place, which has the weights of its reference.

    Args:
        config: the run's configuration, for its device, precision and seed.
        stage: the options.
        critic: the critic, which starts with the policy's weights.
        pairs: the pairs of the policy.
        scratch: a folder that may be written into.
        quiet: whether to hide progress.

    Returns:
        The number of pairs, the mean loss, and the share of the pairs that the critic decides rightly after the stage.

    Raises:
        RunError: a question has no right answer for the critic to read.
    """
    reads = [
        [
            [read_by_critic(critic.tokenizer, row, pair.example, stage.privileged) for row in side]
            for side in (pair.chosen, pair.rejected)
        ]
        for pair in pairs
    ]
    flat = [read for pair in reads for side in pair for read in side]
    with critic.active():
        logprobs = completion_logprobs(critic.model, flat)
        values = iter(zip(flat, logprobs, strict=True))
        data = [dict(zip(("chosen", "rejected"), [[next(values) for _ in s] for s in p], strict=True)) for p in reads]
        options = trainer_options(config, stage, critic.adapter, scratch, quiet)
        del options["max_length"]
        options |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": stage.batch_size}
        trainer = TurnCriticTrainer(
            0.1 if stage.beta is None else stage.beta,
            stage.mean_over,
            model=critic.model,
            args=TrainingArguments(remove_unused_columns=False, **options),
            train_dataset=data,  # type: ignore[arg-type]  # a list serves
            optimizers=(optimizer_of(config, critic.model, options["learning_rate"]), None),
        )
        loss = run_quietly(trainer, quiet)
        after = iter(completion_logprobs(critic.model, flat))
    before = iter(logprobs)
    gaps = []
    for pair in reads:
        better, worse = (
            worth_of([next(after) - next(before) for _ in side], [len(said) for _, said in side], stage.mean_over)
            for side in pair
        )
        gaps.append(better - worse)
    return {"pairs": len(pairs), "loss": loss, "pair_accuracy": sum(gap > 0 for gap in gaps) / len(gaps)}


def sample_candidates(
    run: ResolvedRun, policy: Policy, states: Sequence[tuple[Row, Utterance]], count: int, key: tuple[Any, ...]
) -> list[list[Row]]:
    """Return ``count`` candidates for each of ``states``, as rows without a value.

    Args:
        run: the run. Candidates are sampled as its training samples the agent's answers.
        policy: the policy that speaks. Its stop ids are known.
        states: what was said in each state, as a row and as the utterance that it was made of.
        count: the number of candidates of a state.
        key: begins the keys of all random numbers.
    """
    draws = [_draw(run, policy, row, said) for row, said in states]
    requests = [
        TokenRequest(policy.name, row.prompt_ids, draw, (*key, *row.place, number))
        for (row, _), draw in zip(states, draws, strict=True)
        for number in range(count)
    ]
    with policy.active() as model:
        completions = sample(model, requests, {policy.name: policy.tokenizer}, run.config.ppo.batch_rows)
    flat = iter(completions)
    return [
        [
            replace(
                row,
                completion_ids=(ids := next(flat).ids),
                cut=not ended(ids, draw.stop_ids, StopStrings.of(policy.tokenizer, draw.stop)),
                value=0.0,
            )
            for _ in range(count)
        ]
        for (row, _), draw in zip(states, draws, strict=True)
    ]


def _draw(run: ResolvedRun, policy: Policy, row: Row, said: Utterance) -> Draw:
    """Return how an answer is drawn in the state of ``row``."""
    config, decoding = run.config, run.config.ppo.decoding
    settings = run.sampling.of(row.agent, training=True).at(None, said.role, said.turn, decoding)
    draw = policy.voice.draw(settings, decoding, config.ppo.response_length)
    return draw if said.temperature is None else replace(draw, temperature=said.temperature)
