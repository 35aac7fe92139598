"""The default engine. It samples from the team's own models, with one batch for all agents of one base."""

from collections.abc import Mapping

from maporl.engines.build import EngineSetup
from maporl.engines.text import TextEngine
from maporl.team.agents import Policy
from trl_ext.ppo.options import PPOOptions
from trl_ext.sampling.own_weights import OwnWeights


def build(setup: EngineSetup) -> TextEngine:
    """Build the engine that :data:`maporl.engines.ENGINES` names."""
    tokens = own_weights(setup.policies, setup.sampling)
    return TextEngine(setup.policies, tokens, setup.sampling.response_length)


def own_weights(policies: Mapping[str, Policy], options: PPOOptions) -> OwnWeights:
    """Return what samples from the models of ``policies`` in this process, with the batch sizes of ``options``."""
    rows, tokens = options.local_rollout_forward_batch_size, options.max_tokens_per_generate
    return OwnWeights(policies, rows, tokens, options.keep_states, keep_states_gib=options.keep_states_gib)
