"""The default engine. It samples from the team's own models, with one batch for all agents of one base."""

from maporl.engines.build import EngineSetup
from maporl.engines.text import TextEngine
from trl_ext.sampling.own_weights import OwnWeights


def build(setup: EngineSetup) -> TextEngine:
    """Build the engine that :data:`maporl.engines.ENGINES` names."""
    options = setup.sampling
    tokens = OwnWeights(
        setup.policies,
        options.local_rollout_forward_batch_size,
        options.max_tokens_per_generate,
        options.keep_states,
        keep_states_gib=options.keep_states_gib,
    )
    return TextEngine(setup.policies, tokens, options.response_length)
