"""A maintained single-policy PPOv2 trainer for current TRL and transformers 5. TRL itself removed its own in 1.13.

Names are loaded on first use. Importing a light module of this package, such as ``trl_ext.ppo.options``, therefore does
not import torch.
"""

import logging
from importlib import import_module

# peft imports bitsandbytes wherever it is installed, which then warns of a kernel that only 4-bit models on a CPU use
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

_EXPORTS = {
    "Decoding": "trl_ext.ppo.options",
    "LearnerOptions": "trl_ext.ppo.options",
    "OBJECTIVES": "trl_ext.ppo.losses",
    "PPOOptions": "trl_ext.ppo.options",
    "PPOv2Config": "trl_ext.learning.config",
    "PPOv2Trainer": "trl_ext.trainer.ppov2",
    "Learner": "trl_ext.learning.learner",
    "Policy": "trl_ext.learning.policy",
    "Sampler": "trl_ext.trainer.ppov2",
    "UserError": "trl_ext.errors",
    "ValueHead": "trl_ext.learning.critics",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    """Load the module of a public name on first use.

    Raises:
        AttributeError: the package has no public name ``name``.
    """
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    from difflib import get_close_matches  # only a misspelt name needs it

    near = "".join(f"did you mean {other!r}? " for other in get_close_matches(name, __all__, 1))
    raise AttributeError(f"module 'trl_ext' has no attribute {name!r}; {near}dir(trl_ext) lists all names")


def __dir__() -> list[str]:
    """Return all public names, those included that no one has used yet, so that a notebook completes them."""
    return sorted({*globals(), *__all__})
