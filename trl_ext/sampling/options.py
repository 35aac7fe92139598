"""What was sampled, and what ends it."""

from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from trl_ext.chat.encoding import Tokenizer, turn_end
from trl_ext.chat.stop_strings import StopStrings


@dataclass
class Sampled:
    """A completion: its token ids, up to and including what ended it, and their log-probabilities.

    The log-probabilities are those of the whole distribution at the temperature, also where ``top_p`` and ``top_k`` cut
    what is drawn from, unless the engine can give those of the cut one alone (:attr:`TokenEngine.tells_cut`).

    With a grammar they are those among the tokens that it allows.

    ``logprobs`` is None for a greedy completion. ``version`` is how many updates the weights had had. None: those of
    the engine's last ``sync``. ``top`` has for each place the likeliest tokens that were asked for
    (:attr:`TokenRequest.top`), with their log-probabilities, the likeliest first. None: the completion is greedy, or
    the engine does not know them. ``refused`` is why its grammar cannot be followed further, or None.
    """

    ids: list[int]
    logprobs: list[float] | None = None
    version: int | None = None
    top: list[list[tuple[int, float]]] | None = None
    refused: str | None = None

    def up_to(self, stops: StopStrings | None) -> "Sampled":
        """Return the completion without the tokens after the one that completes a stop string."""
        length = None if stops is None or stops.end(self.ids) else stops.length(self.ids)
        if length is None:
            return self
        return replace(self, ids=self.ids[:length], logprobs=None if self.logprobs is None else self.logprobs[:length])


def stop_ids_of(
    model: PreTrainedModel, tokenizer: Tokenizer, stop_token: str | None, stop_id: int | list[int] | None
) -> frozenset[int]:
    """Return the token ids that end a completion.

    ``stop_id`` has precedence. ``stop_token`` "none" means that completions always have their full length, and "eos"
    means the tokenizer's EOS token. By default they are the EOS ids of the tokenizer and of the model's generation
    config, and the token with which the chat template ends an answer.

    Raises:
        ValueError: neither the tokenizer nor the generation config has an EOS id.
    """
    if stop_id is not None:
        return frozenset([stop_id] if isinstance(stop_id, int) else stop_id)
    if stop_token == "none":
        return frozenset()
    ids = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if stop_token is None:
        ids |= {*turn_end(tokenizer).ids[-1:]}
        ids |= {configured} if isinstance(configured, int) else set(configured or ())
    if not ids:
        raise ValueError(
            "no end-of-sequence id is known: the tokenizer and the model's generation config name none; "
            "set stop_token_id, or stop_token='none' to always generate the full length"
        )
    return frozenset(ids)
