"""What the estimator, the checks and the trainer must know of a return, a baseline and a scale beside its function.

The dicts ``RETURNS``, ``BASELINES`` and ``SCALES`` hold these objects. A plain function in them is a slot with the
defaults. A configuration may also name one of the user's own, as ``MODULE:OBJECT``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor

from maporl.advantages.batch import TurnBatch
from maporl.config.imports import look_up, must_take, told
from maporl.errors import ConfigError
from trl_ext.copies import is_users, own_copy

Over = Literal["nothing", "group", "agent", "batch"]
"""Which rows are compared: none, those of the configuration's key, those of one agent, or all."""


@dataclass(frozen=True)
class Return:
    """A return: the number that an utterance earns before it is compared with others.

    Args:
        compute: the function ``(batch, config) -> [N]``. None means that the trainer computes one number per token.
        needs: the columns that it reads.
        along: what it looks ahead through: only the utterance itself, the agent's later turns, all later utterances of
            the dialogue, or those of the tree of forked dialogues.
        needs_critic: whether it reads and subtracts a critic's values.
        two_levels: for a return per token, whether GAE runs over whole utterances first, and then within each of them.
    """

    takes: ClassVar[tuple[str, ...]] = ("batch", "config")
    compute: Callable[..., Tensor] | None
    needs: tuple[str, ...] = ()
    along: Literal["utterance", "agent", "dialogue", "tree"] = "utterance"
    needs_critic: bool = False
    two_levels: bool = False

    @property
    def per_token(self) -> bool:
        """Whether it is one number for each token, and not for each utterance."""
        return self.compute is None


@dataclass(frozen=True)
class Baseline:
    """A baseline: the number that is subtracted from a return.

    Args:
        compute: the function ``(returns, groups, weights, batch, config, state) -> [N]``.
        over: the rows that it compares. Fewer than two of them are an error, or get advantage 0.
        needs_critic: whether it reads a critic's values.
        remembers: whether it keeps a number for each key between updates.
        scales_mean: whether return minus baseline is that of the group's mean times a factor, so that a scale undoes
            it.
        reads_after: whether the critic's value is that of the utterance's last token, which has read the utterance, and
            not that of the state before it. The critic is then trained there.
    """

    takes: ClassVar[tuple[str, ...]] = ("returns", "groups", "weights", "batch", "config", "state")
    compute: Callable[..., Tensor]
    over: Over = "nothing"
    needs_critic: bool = False
    remembers: bool = False
    scales_mean: bool = False
    reads_after: bool = False


@dataclass(frozen=True)
class Scale:
    """A scale: the number by which an advantage is divided.

    Args:
        compute: the function ``(advantages, returns, groups, weights, batch, config) -> [N]``.
        over: the rows that it compares. Fewer than two of them are an error, or get advantage 0.
        needs: the columns that it reads.
    """

    takes: ClassVar[tuple[str, ...]] = ("advantages", "returns", "groups", "weights", "batch", "config")
    compute: Callable[..., Tensor]
    over: Over = "nothing"
    needs: tuple[str, ...] = ()


def numbers_of(where: str, compute: Callable[..., Any], *arguments: Any, like: Tensor, finite: bool = True) -> Tensor:
    """Call a part of an advantage, and return what it gives, if it is a number for each of those in ``like``.

    Raises:
        ConfigError: it failed, or returned something else, or with ``finite`` a number that is NaN or infinite. The
            message begins with ``where``.
    """
    if is_users(compute, "maporl"):  # a baseline may change its state, and nothing else
        arguments = tuple(own_copy(a) if isinstance(a, Tensor | TurnBatch) else a for a in arguments)
    try:
        result = compute(*arguments)
    except (TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ConfigError(f"{where} failed: {told(error)}") from error
    got = f"a tensor {list(result.shape)}" if isinstance(result, Tensor) else f"{result!r:.80}"
    if got == f"a tensor {list(like.shape)}" and not result.is_complex():
        if not finite or bool(result.isfinite().all()):
            return result.to(like.dtype)
        got = "NaN or infinite numbers"
    expected = f"a tensor {list(like.shape)} of finite numbers{', one for each row' if like.dim() == 1 else ''}"
    raise ConfigError(f"{where} returned {got}; expected {expected}")


Slot = TypeVar("Slot", Return, Baseline, Scale)


def find(slots: Mapping[str, Any], kind: type[Slot], name: str, where: str) -> Slot:
    """Return the slot called ``name``. A plain function becomes a slot of ``kind``, with the defaults.

    Raises:
        ConfigError: the name is unknown, or the object is not a slot of this kind. The message begins with ``where``.
    """
    slot = look_up(name, slots, where)
    if isinstance(slot, kind):
        return slot
    must_take(slot, kind.takes, f"{where}: {name}")
    return kind(slot)
