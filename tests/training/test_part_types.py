"""Mistakes in parts of one's own are named in one line: the part, what it returned, and what was expected."""

from dataclasses import dataclass, field

import pytest
import torch

from maporl import Arithmetic
from maporl.advantages.slots import numbers_of
from maporl.config.schema import RewardSection
from maporl.environments.games import Game
from maporl.errors import ConfigError
from maporl.protocols import Protocol
from maporl.protocols.game import PlayGame
from maporl.rewards.base import RewardFailure
from maporl.rewards.credit import credit_by_rules
from maporl.rewards.functions import CompletionReward
from maporl.rewards.scoring import fill_in
from maporl.types import Ask, Dialogue, Example, Utterance


@dataclass
class Small(Game):
    """A game of two moves that ends as it should."""

    longest = 2
    left: int = 2

    def reset(self, rng):
        self.left = 2

    def to_move(self):
        return (self.left % 2,) if self.left else ()

    def observe(self, player):
        return "move"

    def moves(self, player):
        return ("0", "1")

    def step(self, moves):
        self.left -= 1
        return {0: 1.0}

    def success(self, player):
        return True


class Endless(Small):
    def to_move(self):
        return (0,)


class OneNumber(Small):
    def to_move(self):
        return 0


class Numbers(Small):
    def moves(self, player):
        return (0, 1)


class StepNone(Small):
    def step(self, moves):
        self.left -= 1


class PaysAName(Small):
    def step(self, moves):
        return {"guesser": 1.0}


class PaysNan(Small):
    def step(self, moves):
        return {0: float("nan")}


class NoLongest(Small):
    longest = None


def _utterance(ask, number):
    return Utterance(
        id=number, agent=ask.agent, policy=ask.agent, turn=0, order=number, messages=list(ask.messages), text="0"
    )


def _play(game):
    play = PlayGame(game=f"{__name__}:{game.__name__}").play(Example("x", "", ""), ("a", "b"))
    asks = next(play)
    for number in range(20):
        try:
            asks = play.send([_utterance(ask, number) for ask in asks])
        except StopIteration as end:
            return end.value
    raise AssertionError("the game went on for 20 moves")


@pytest.mark.parametrize(("game", "message"), [
    (Endless, "player 0 moved 3 times, but longest is 2"),
    (OneNumber, "to_move returned 0, expected a tuple of players from 0 to 1"),
    (Numbers, r"moves returned \(0, 1\), expected a tuple of texts"),
    (StepNone, "step returned None, expected {player: payment}"),
    (PaysAName, "step pays 1.0 to 'guesser'"),
    (PaysNan, "step pays nan to 0"),
])  # fmt: skip
def test_a_game_that_breaks_its_contract_is_named(game, message):
    with pytest.raises(ConfigError, match=message):
        _play(game)


def test_a_game_without_longest_is_refused():
    with pytest.raises(ValueError, match="has no longest; set it to the most moves of a player"):
        PlayGame(game=f"{__name__}:NoLongest")


def _asked(agent="a", content="q"):
    return Ask(agent, [{"role": "user", "content": content}])


class YieldsAnAsk(Protocol):
    def play(self, example, agents):
        yield _asked()


class ReturnsAList(Protocol):
    def play(self, example, agents):
        return [_asked()]


class TextForMessages(Protocol):
    def play(self, example, agents):
        yield [Ask("a", "a text")]


class Said:
    """As OpenAI's client returns it."""

    role, content = "assistant", "4"


class ObjectOfAClient(Protocol):
    def play(self, example, agents):
        yield [Ask("a", [Said()])]


class Unpacks(Protocol):
    def play(self, example, agents):
        first, second, third = agents
        yield [_asked(first), _asked(second), _asked(third)]


@dataclass
class _Task:
    examples: list = field(default_factory=list)

    def question(self, example):
        return example.question

    def show_meta(self, example):
        return {}


@pytest.mark.parametrize(("protocol", "message"), [
    (YieldsAnAsk, "its play yielded Ask.*expected a list of Ask"),
    (ReturnsAList, "its play returned list, expected a generator"),
    (TextForMessages, "what it asks agent 'a' cannot be read: expected a list of messages, as .*, got 'a text'"),
    (ObjectOfAClient, r"message 1 is an object of a client, test_part_types\.Said, and no dict; write \{'role': mes"),
    (Unpacks, r"its play failed: .*test_part_types.py, line \d+: ValueError: not enough values to unpack"),
])  # fmt: skip
def test_a_protocol_that_breaks_its_contract_is_named(protocol, message):
    from maporl.rollout.driver import RolloutDriver
    from maporl.rollout.episode import SpeakerSpec
    from trl_ext.ppo.options import GREEDY

    driver = RolloutDriver(_Task(), protocol(), {"a": SpeakerSpec("e", ("a",))}, {}, GREEDY)
    with pytest.raises(ConfigError, match=message):
        driver.open(Example("x", "q", ""), 0)


def returns_none(dialogues, credits):
    return None


def one_too_few(dialogues, credits):
    return credits[:-1]


def pays_nan(dialogues, credits):
    return [dict.fromkeys(own, float("nan")) for own in credits]


def pays_agents(dialogues, credits):
    return [{"ann": 1.0} for own in credits]


@pytest.mark.parametrize(("rule", "message"), [
    ("returns_none", "returns_none: returned None; expected a list of {utterance id: credit}"),
    ("one_too_few", "one_too_few: returned 1 of them for 2 dialogues"),
    ("pays_nan", "pays_nan: returned the credit nan"),
    ("pays_agents", "pays_agents: returned the utterance 'ann'"),
])  # fmt: skip
def test_a_rule_that_returns_no_credits_is_named(rule, message, monkeypatch):
    import maporl.rewards.credit as credit

    monkeypatch.setattr(credit, "build_rules", lambda rules, update: [globals()[rule]])
    u = _utterance(_asked(), 0)
    u.rewards["score"] = 1.0
    dialogues = [Dialogue(Example("x", "q", ""), [u]), Dialogue(Example("x", "q", ""), [u])]
    with pytest.raises(ConfigError, match=message):
        credit_by_rules(dialogues, RewardSection(rules=[rule]))


@pytest.mark.parametrize(("result", "message"), [
    (None, "Clamp: apply returned None"),
    (torch.zeros(2), r"Clamp: apply returned a tensor \[2\]; expected a tensor \[3\] of finite numbers, one for each row"),
    (torch.full((3,), float("nan")), "Clamp: apply returned NaN"),
])  # fmt: skip
def test_a_transform_that_returns_no_advantages_is_named(result, message):
    with pytest.raises(ConfigError, match=message):
        numbers_of("advantage.post: adv:Clamp: apply", lambda: result, like=torch.zeros(3))


def _divides(*_):
    return 1 / 0


HERE = rf"test_part_types\.py, line {_divides.__code__.co_firstlineno + 1}: ZeroDivisionError: division by zero"


def test_errors_in_a_rule_or_a_reward_source_say_file_and_line(monkeypatch):
    monkeypatch.setattr("maporl.rewards.credit.build_rules", lambda entries, update: [_divides])
    said = Utterance(0, "ann", "ann", 0, 0, (), "4")
    dialogues = [Dialogue(Example("e", "2+2=", "4"), [said])]
    with pytest.raises(ConfigError, match=rf"^reward\.rules: mine: it failed: .*{HERE}$"):
        credit_by_rules(dialogues, RewardSection(rules=["mine"]))
    with pytest.raises(RewardFailure, match=r"^reward source 'mine' failed on arithmetic"):
        fill_in(dialogues, Arithmetic(), {"mine": _divides})
    with pytest.raises(RewardFailure, match=rf"^reward '_fails' failed: .*{HERE}$"):
        CompletionReward(_fails)(dialogues, Arithmetic())


def _fails(completions):
    return _divides()
