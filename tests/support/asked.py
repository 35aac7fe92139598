"""What is asked of a model, in tokens, from lists with one entry for each prompt."""

from trl_ext.sampling import sample as module
from trl_ext.sampling.request import Draw, TokenRequest


def asked(prompts, draw, keys=None, policies=None, read=None):
    """Return a request for each of ``prompts``. ``draw`` may be one for each."""
    nothing = [None] * len(prompts)
    draws = [draw] * len(prompts) if isinstance(draw, Draw) else draw
    columns = zip(policies or nothing, prompts, draws, keys or nothing, read or [0] * len(prompts), strict=True)
    return [TokenRequest(*one) for one in columns]


def sample(model, prompts, draw, keys=None, adapters=None, states=None, read=None, tokenizer=None, **options):
    """Sample a completion for each of ``prompts``. A policy has the name of its adapter in ``adapters``."""
    requests = asked(prompts, draw, keys, adapters, read)
    adapters = None if adapters is None else {name: name for name in adapters}
    return module.sample(model, requests, dict.fromkeys(adapters or [None], tokenizer), adapters=adapters,
                         states=states, **options)  # fmt: skip
