"""Sample several candidates for what an agent said, in the state in which it said it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from maporl.loops.rows import Row
from maporl.run import ResolvedRun
from maporl.team.agents import Policy
from maporl.types import Utterance
from trl_ext.chat.stop_strings import StopStrings, ended
from trl_ext.sampling.options import Sampling
from trl_ext.sampling.sample import sample


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
    sampled_as = [_sampling(run, policy, row, said) for row, said in states]
    each = [sampling for sampling in sampled_as for _ in range(count)]
    prompts = [row.prompt_ids for row, _ in states for _ in range(count)]
    keys = [(*key, *row.place, number) for row, _ in states for number in range(count)]
    with policy.active() as model:
        completions = sample(model, prompts, each[0], keys, own=each)
    flat = iter(completions)
    return [
        [
            replace(
                row,
                completion_ids=(ids := next(flat).ids),
                cut=not ended(ids, sampling.stop_ids, sampling.stop_strings),
                value=0.0,
            )
            for _ in range(count)
        ]
        for (row, _), sampling in zip(states, sampled_as, strict=True)
    ]


def _sampling(run: ResolvedRun, policy: Policy, row: Row, said: Utterance) -> Sampling:
    """Return how an answer is sampled in the state of ``row``."""
    config, decoding = run.config, run.config.ppo.decoding
    settings = run.sampling.of(row.agent, training=True).at(None, said.role, said.turn, decoding)
    draw = policy.voice.draw(settings, decoding, config.ppo.response_length)
    if said.temperature is not None:
        draw = replace(draw, temperature=said.temperature)
    rows = config.ppo.batch_rows
    return Sampling.of(draw, StopStrings.of(policy.tokenizer, draw.stop), rows)
