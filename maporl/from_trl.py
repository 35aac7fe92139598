"""What is taken from TRL, as :mod:`trl_ext.from_trl` says: its trainers for SFT, DPO, KTO and rewards.

A name is looked up when it is first imported from here, because TRL takes seconds to load.
"""

from typing import TYPE_CHECKING, Any

from trl_ext.from_trl import lacks, public

if TYPE_CHECKING:
    from trl import DPOConfig as DPOConfig
    from trl import DPOTrainer as DPOTrainer
    from trl import KTOConfig as KTOConfig
    from trl import KTOTrainer as KTOTrainer
    from trl import RewardConfig as RewardConfig
    from trl import RewardTrainer as RewardTrainer
    from trl import SFTConfig as SFTConfig
    from trl import SFTTrainer as SFTTrainer

NAMES = {
    "DPOConfig": "a stage of a loop that trains by DPO",
    "DPOTrainer": "a stage of a loop that trains by DPO",
    "KTOConfig": "a stage of a loop that trains by KTO",
    "KTOTrainer": "a stage of a loop that trains by KTO",
    "RewardConfig": "a stage of a loop that trains the verifier",
    "RewardTrainer": "a stage of a loop that trains the verifier",
    "SFTConfig": "supervised training",
    "SFTTrainer": "supervised training",
}
"""The public names, and what needs each of them."""


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return public(name, NAMES[name])


class RowsAsTheyAre:
    """Stands before a trainer of TRL that prepares its rows. They have token ids and the reference's log-probabilities.

    TRL's own preparation would encode texts again, end answers with EOS that were cut off, and ask a reference of its
    own. TRL has no public way around it, so two methods are replaced that are not public. A trainer without them is
    refused, because it would prepare rows in another way unnoticed.

    Raises:
        MissingFromTRL: the trainer lacks one of these methods.
    """

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        trainer = cls.__mro__[cls.__mro__.index(RowsAsTheyAre) + 1]
        for method in ("_prepare_dataset", "_precompute_ref_logps"):
            if not hasattr(trainer, method):
                raise lacks(f"{trainer.__name__}.{method}", "a trainer that takes rows of token ids as they are")

    def _prepare_dataset(self, dataset: Any, *arguments: Any, **options: Any) -> Any:
        return dataset

    def _precompute_ref_logps(self, dataset: Any, *arguments: Any, **options: Any) -> Any:
        return dataset
