"""``check_environment``: what it returns of a sound environment, and each fault that it finds."""

import itertools
import os
import random

import numpy as np
import pytest
from user_tools import Dice, Notes, Shop

from maporl import Environment, Result, Tool, check_environment
from maporl.environments.rooms import EnvironmentFailure
from maporl.errors import ConfigError


class Stock(Environment):
    """Sells a stock that depends on its seed."""

    forks = "replay"
    live = 0

    def reset(self, seed, row):
        Stock.live += 1
        self.left, self.bought = row["stock"] + random.Random(seed).randrange(3), {}
        return f"{self.left} left"

    def tools(self, agent):
        def buy(count: int) -> Result:
            """Buy pieces.

            Args:
                count: how many
            """
            if count > self.left:
                raise ValueError(f"only {self.left} left")
            self.left -= count
            self.bought[agent] = self.bought.get(agent, 0) + count
            return Result(f"{self.left} left", reward=0.1 * count)

        return [Tool.of(buy)]

    def fork(self):
        copy = type(self)()
        copy.left, copy.bought = self.left, dict(self.bought)
        Stock.live += 1
        return copy

    def reward(self):
        return {agent: float(count) for agent, count in self.bought.items()}

    def close(self):
        Stock.live -= hasattr(self, "left")


CALLS = [("ann", "buy", {"count": 2}), ("bob", "buy", {"count": 99}), ("ann", "buy", {"count": "1"})]


def tried(environment=Stock, calls=CALLS, agents=("ann", "bob"), **options):
    Stock.live = 0
    try:
        return check_environment(environment, calls, {"stock": 3}, agents, **options)
    finally:
        assert Stock.live == 0, "what was opened was closed"


def variant(**changed):
    return type("Odd", (Stock,), changed)


class TestASoundOne:
    @pytest.mark.parametrize("forks", ["no", "replay", "copy"])
    def test_it_says_what_happened(self, forks):
        trial = tried(variant(forks=forks), seed=0)
        left = int(trial.said["ann"].split()[0])
        assert trial.said == {"ann": f"{left} left", "bob": f"{left} left"} and left in (3, 4, 5)
        assert trial.results == [
            Result(f"{left - 2} left", reward=0.2),
            Result(f"ValueError: only {left - 2} left", error="raised"),
            Result(f"{left - 3} left", reward=0.1),
        ]
        assert trial.paid == {"ann": 3.0}

    def test_its_seed_decides(self):
        begun = [tried(seed=seed).said["ann"] for seed in range(8)]
        assert begun == [tried(seed=seed).said["ann"] for seed in range(8)] and len(set(begun)) > 1

    def test_classes_for_trl(self):
        row = {"prompt": [{"role": "user", "content": "?"}], "stock": 3}
        calls = [("ann", "buy", {"count": 2}), ("ann", "look", {}), ("ann", "buy", {"count": 2})]
        trial = check_environment(Shop, calls, row)
        assert trial.said == {"ann": " There are 3 apples."}
        assert [r.text for r in trial.results] == ["You have 2.", "1 apples", "{'error': 'Only 1 left.'}"]
        assert trial.paid == {"ann": pytest.approx(2 / 3)}
        notes = check_environment(Notes, [(name, "write", {"text": name}) for name in "ab"], agents="ab")
        assert [r.text for r in notes.results] == ["a: a", "a: a; b: b"]
        assert check_environment(Dice, [("ann", "roll", {})], {"seed": 7}).results[0].text == "[3]"


def _buy_with(work, answer=lambda: "x"):
    def tools(self, agent):
        def buy(count: int) -> str:
            """Buy.

            Args:
                count: how many
            """
            work(self)
            return answer()

        return [Tool.of(buy)]

    return tools


TURNS = itertools.count()


def _shares_state(self):
    copy = type(self)()
    copy.__dict__ = self.__dict__
    return copy


def _hoard(self):
    raise MemoryError


class TestFaultsThatItFinds:
    @pytest.mark.parametrize(("work", "part"), [
        (lambda self: random.random(), "Python's global random generator"),
        (lambda self: np.random.random(), "NumPy's global random generator"),
        (lambda self: np.random.seed(3), "NumPy's global random generator"),
        (lambda self: os.chdir("/"), "the working folder"),
    ])  # fmt: skip
    def test_a_call_that_changes_what_instances_share(self, work, part, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        np.random.seed(4)
        odd = variant(tools=_buy_with(work))
        with pytest.raises(
            EnvironmentFailure, match=rf"call 1, buy\(\) changed {part}, which .* or set concurrent = False"
        ):
            tried(odd)
        os.chdir(tmp_path)
        assert tried(variant(tools=_buy_with(work), concurrent=False)).results[0].text == "x"

    @pytest.mark.parametrize(("changed", "calls", "message"), [
        ({"reset": lambda self, seed, row: random.seed(seed)}, [], r"reset\(\) changed Python's"),
        ({"reward": lambda self: random.random()}, CALLS, r"reward\(\) or close\(\) changed Python's"),
        ({"forks": "copy", "fork": _shares_state}, CALLS, r"call 2 gave .* in a fork after 0 calls, and then .* in itself"),
        ({"forks": "copy", "fork": Environment.fork}, CALLS, r"fork\(\): .*NotImplementedError"),
        ({"reset": lambda self, seed, row, turns=TURNS: f"{next(turns)}", "tools": _buy_with(lambda self: None)}, CALLS,
         r"reset\(\) told \{'ann': '1', 'bob': '1'\}, not \{'ann': '0', 'bob': '0'\}, by a seed"),
        ({"tools": _buy_with(lambda self: None, itertools.count().__next__)}, CALLS, r"does not replay: call 1, buy\(count=2\), gave"),
        ({"tools": lambda self, agent: [] if hasattr(self, "left") else Stock.tools(self, agent)}, CALLS,
         r"tools\('ann'\) returned other tools after reset\(\)"),
        ({"tools": lambda self, agent: Stock.tools(self, agent) * 2}, CALLS, r"tools\('ann'\) has two tools called 'buy'; rename one of them"),
        ({"tools": _buy_with(_hoard)}, CALLS, r"call 1, buy\(\): it does not answer any more"),
        ({"observe": lambda self, agent: 3}, CALLS, r"observe\('ann'\) returned 3, expected a text or None"),
        ({"tools": lambda self, agent: 3}, CALLS, r"tools\('ann'\): .*TypeError"),
        ({}, [("cy", "buy", {})], "call 1: agent unknown 'cy'; known: ann, bob"),
        ({}, [("ann", "by", {})], r"call 1: tool unknown 'by'; did you mean 'buy'\?"),
        ({}, [("ann", "buy", {})], "call 1, buy: count is missing"),
    ])  # fmt: skip
    def test_each_fault_is_named(self, changed, calls, message):
        with pytest.raises((EnvironmentFailure, ConfigError), match=message):
            check_environment(variant(**changed), calls, {"stock": 3}, ("ann", "bob"))

    def test_one_that_does_not_close(self, capsys):
        def close(self):
            if hasattr(self, "left"):
                raise OSError("still open")

        with pytest.raises(EnvironmentFailure, match=r"close\(\) failed; the reason was printed"):
            check_environment(variant(close=close, forks="no"), CALLS, {"stock": 3}, ("ann", "bob"))
        assert "still open" in capsys.readouterr().err

    def test_what_is_no_environment(self):
        with pytest.raises(ConfigError, match="expected a class or a function that makes an environment"):
            check_environment(3)
        with pytest.raises(ConfigError, match=r"expected a maporl\.Environment, or a class"):
            check_environment(dict)
