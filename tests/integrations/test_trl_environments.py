"""Classes for TRL's ``environment_factory``: the same scripted calls through TRL and through here, and what is
added."""

import asyncio
import random
import threading

import pytest
import torch
from chat_models import characters
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from user_tools import TEMPLATE, Dice, Notes, Shop, Wordle, model_of, tool_call

from maporl.environments.base import Environment, as_result, is_trl_class
from maporl.environments.workers import Job, Workers
from maporl.errors import ConfigError
from maporl.integrations.trl import TRLEnvironment
from maporl.types import Result


def in_trl(tmp_path, factory, row, script):
    """Play ``script``, a list of ``(tool, arguments)``, in TRL's trainer. Return the prompt, observations and reward.

    Sampling is replaced by the script. All else is TRL's: the rows, ``reset``, the reading and carrying out of calls,
    and rewards.
    """
    tokenizer = characters(TEMPLATE)
    seen = {}

    def paid(completions, environments, **columns):
        seen["completions"], seen["environments"] = completions[0], environments
        return [0.0] * len(completions)

    arguments = GRPOConfig(
        output_dir=str(tmp_path), num_generations=2, per_device_train_batch_size=2, max_completion_length=4000,
        use_cpu=True, report_to=[], max_tool_calling_iterations=20,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model_of(tokenizer), reward_funcs=[paid], args=arguments, train_dataset=Dataset.from_list([row] * 2),
        processing_class=tokenizer, environment_factory=factory,
    )  # fmt: skip
    lines = [tool_call(name, given) for name, given in script] + ["Done.<|im_end|>"]
    steps = iter([tokenizer.encode(line) for line in lines])

    def said(prompt_ids, *_, **__):
        ids = next(steps)
        seen.setdefault("prompt", tokenizer.decode(prompt_ids[0]))
        return [list(ids) for _ in prompt_ids], None

    trainer._generate_single_turn = said
    rewards = []
    calculate = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *given: rewards.append(calculate(*given)) or rewards[-1]
    with torch.no_grad():
        trainer._generate_and_score_completions([dict(row), dict(row)])
    texts = [message["content"] for message in seen["completions"] if message["role"] == "tool"]
    own = [float(reward) for reward in rewards[0][0][1:]]
    return seen["prompt"], texts, own[0] if own else None, seen["environments"][0]


def here(factory, row, script, reward=None, seed=7):
    """Play the same script as an environment. Return what reset said, the observations and the reward."""
    world = TRLEnvironment(factory(), reward)
    tools = {tool.name: tool for tool in world.tools("ann")}
    said = world.reset(seed, {"id": "1", "question": row["prompt"][-1]["content"], "answer": "", **row})
    workers, texts = Workers(), []
    for name, arguments in script:
        ((outcome,),) = workers.run([[Job(lambda n=name, a=arguments: tools[n].run(**a), 5, name)]])
        assert outcome.error is None and not outcome.late
        texts.append(as_result(outcome.value).text)
    return said, texts, world.reward(), world


PROMPT = [{"role": "user", "content": "Buy three."}]
SHOPPING = [
    ("look", {}), ("buy", {"count": 2}), ("buy", {"count": 2}), ("count", {}), ("wait", {}), ("basket", {}),
    ("ask", {"what": "pears"}), ("buy", {"count": 1}), ("look", {}),
]  # fmt: skip
GUESSING = [("guess", {"word": "PLUM"}), ("guess", {"word": "PEAR"}), ("guess", {"word": "PEAR"})]


class TestAsInTRL:
    """9.1: the same scripted calls through TRL's own code and through here."""

    @pytest.mark.parametrize("stock", [3, 0])
    def test_a_shop_with_sync_and_async_methods_and_errors(self, tmp_path, stock):
        row = {"prompt": PROMPT, "stock": stock}
        prompt, texts, reward, shop = in_trl(tmp_path, Shop, row, SHOPPING)
        said, own_texts, own_reward, world = here(Shop, row, SHOPPING)
        assert own_texts == texts and own_reward == pytest.approx(reward)
        assert f"Buy three.{said or ''}<|im_end|>" in prompt
        assert (world.made.said, world.made.left) == (shop.said, shop.left) == ("Buy three.", 0)
        if stock:
            assert said == " There are 3 apples." and reward == 1.0
            assert texts == [
                "3 apples", "You have 2.", "{'error': 'Only 1 left.'}", "2", "None", "{'apples': 2}",
                "{'error': 'No pears!'}", "You have 3.", "0 apples",
            ]  # fmt: skip
        else:
            assert said is None and reward == 0.0

    def test_a_game_whose_reward_is_an_attribute(self, tmp_path):
        row = {"prompt": PROMPT, "answer": "PEAR"}
        _, texts, reward, game = in_trl(tmp_path, Wordle, row, GUESSING)
        _, own_texts, own_reward, _ = here(Wordle, row, GUESSING, reward="reward")
        assert own_texts == texts == ["GXXX", "GGGG", "{'error': 'Game over.'}"]
        assert reward is None and own_reward == game.reward == 1.0
        assert here(Wordle, row, GUESSING)[2] is None
        assert here(Wordle, row, GUESSING[:1], reward="reward")[2] == 0.1

    def test_an_async_reward_and_a_list(self, tmp_path):
        row = {"prompt": PROMPT, "seed": 7}

        class Rolling(Dice):
            def reset(self, seed, **row):
                super().reset(seed)

        script = [("roll", {"times": 0}), ("roll", {})]
        Rolling.roll = lambda self, times=1: str(Dice.roll(self, times))  # TRL passes a list on to the template
        Rolling.roll.__doc__, Rolling.roll.__annotations__, Rolling.roll.__name__ = (
            Dice.roll.__doc__,
            {"times": int},
            "roll",
        )
        _, texts, reward, _ = in_trl(tmp_path, Rolling, row, script)
        _, own_texts, own_reward, _ = here(Rolling, row, script)
        assert own_texts == texts == ["[]", "[3]"] and own_reward == pytest.approx(reward) == pytest.approx(0.3)


class TestReset:
    def test_a_seed_is_given_where_it_is_named(self):
        first, again, other = (here(Dice, {"prompt": PROMPT}, [("roll", {"times": 5})], seed=s) for s in (7, 7, 8))
        assert first[1] == again[1] == ["[3, 2, 4, 6, 1]"] and other[1] != first[1]
        assert first[2] == pytest.approx(1.6)

    def test_all_columns_are_given_to_a_class_that_takes_any(self):
        _, _, _, world = here(Notes, {"prompt": PROMPT, "level": 3}, [])
        assert world.made.row == {"id": "1", "question": "Buy three.", "answer": "", "prompt": PROMPT, "level": 3}

    def test_a_column_of_the_name_seed_is_the_column(self):
        world = TRLEnvironment(Dice())
        world.reset(7, {"seed": 8})
        assert world.made.rng.random() == random.Random(8).random()

    def test_a_missing_column_is_named(self):
        with pytest.raises(ConfigError, match=r"environment Wordle: reset wants 'answer'; the questions have \['id"):
            TRLEnvironment(Wordle()).reset(1, {"id": 1, "prompt": PROMPT})

    @pytest.mark.parametrize(("said", "message"), [
        (3, "reset returned 3, expected a text or None"),
        ([{"type": "image", "image": 1}], "returned content of the type 'image'; only text can be shown"),
    ])  # fmt: skip
    def test_what_is_no_text_is_refused(self, said, message):
        class Odd:
            def reset(self):
                return said

        with pytest.raises(ConfigError, match=message):
            TRLEnvironment(Odd()).reset(1, {})

    def test_text_blocks_are_text(self):
        class Blocks:
            def reset(self):
                return [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]

            def show(self) -> list:
                """Show."""
                return [{"type": "text", "text": "a"}, {"type": "image", "image": 0}]

            def tell(self) -> list:
                """Tell."""
                return [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

        world = TRLEnvironment(Blocks())
        assert world.reset(1, {}) == "one two"
        show, tell = world.tools("ann")
        assert tell.run() == "ab"
        shown = show.run()
        assert shown.error == "raised" and "of the type 'image'; only text can be shown" in shown.text


class TestWhatIsAdded:
    def test_the_caller_is_known_to_a_shared_instance(self):
        world = TRLEnvironment(Notes())
        world.reset(1, {})
        (ann,), (bob,) = world.tools("ann"), world.tools("bob")
        assert ann.name == "write"
        ann.run(text="a")
        bob.run(text="b")
        assert ann.run(text="c") == "ann: a; bob: b; ann: c"

    def test_a_fork_goes_its_own_way(self):
        world = TRLEnvironment(Notes())
        world.reset(1, {"prompt": PROMPT})
        world.tools("ann")[0].run(text="a")
        fork = world.fork()
        fork.tools("ann")[0].run(text="b")
        assert (len(world.made.notes), len(fork.made.notes)) == (1, 2)
        assert world.forks == fork.forks == "copy" and TRLEnvironment(Shop()).forks == "no"

    def test_it_is_closed(self):
        world = TRLEnvironment(Notes())
        world.close()
        assert world.made.ends == ["_close", "close"]
        TRLEnvironment(Shop()).close()

        class Documented(Notes):
            def close(self):
                """Close the notes."""
                return "closed by the agent"

        tools = {tool.name for tool in TRLEnvironment(Documented()).tools("ann")}
        assert tools == {"close", "write"}  # as in TRL

    def test_an_async_close_and_reward_run_in_the_loop_of_the_tools(self):
        threads = []

        class Remote:
            def reset(self):
                pass

            async def fetch(self) -> str:
                """Fetch."""
                threads.append(threading.current_thread().name)
                return "x"

            async def get_reward(self):
                threads.append(threading.current_thread().name)
                return 0.5

            async def _close(self):
                threads.append(threading.current_thread().name)

        world = TRLEnvironment(Remote())
        ((outcome,),) = Workers().run([[Job(lambda: world.tools("ann")[0].run(), 5, "fetch")]])
        assert outcome.value == "x" and world.reward() == 0.5
        world.close()
        assert threads == ["maporl adapters"] * 3

    def test_a_call_that_takes_too_long_is_cancelled(self):
        ended = threading.Event()

        class Slow:
            def reset(self):
                pass

            async def sleep(self) -> str:
                """Sleep."""
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    ended.set()
                    raise

        ((outcome,),) = Workers().run([[Job(lambda: TRLEnvironment(Slow()).tools("ann")[0].run(), 0.2, "sleep")]])
        assert outcome.late and ended.wait(5)

    def test_a_result_of_ones_own_passes(self):
        class Paid:
            def reset(self):
                pass

            def earn(self) -> str:
                """Earn."""
                return Result("paid", reward=2.0)

        assert TRLEnvironment(Paid()).tools("ann")[0].run() == Result("paid", reward=2.0)


class TestWhatIsRefused:
    @pytest.mark.parametrize(("source", "message"), [
        ("def look(self): ...", "tool Odd.look: it has no docstring"),
        ("def look(self, x):\n        '''Look.\n\n        Args:\n            x: y\n        '''", "x is missing a type"),
        ("def look(self, x: int):\n        '''Look.'''", "no description for the argument 'x'"),
        ("async def reset(self): ...", "Odd: reset is a coroutine function, never await"),
    ])  # fmt: skip
    def test_a_class_that_trl_refuses(self, source, message):
        names = {}
        exec(f"class Odd:\n    def reset(self): ...\n    {source}", names)
        names["Odd"].__qualname__ = "Odd"
        with pytest.raises(ConfigError, match=message):
            TRLEnvironment(names["Odd"]())

    def test_what_is_not_such_a_class(self):
        assert is_trl_class(Shop()) and not is_trl_class(object()) and not is_trl_class(Environment())
        with pytest.raises(ConfigError, match="environment object: expected a class with a method reset"):
            TRLEnvironment(object())

    def test_a_reward_that_is_not_there(self):
        with pytest.raises(ConfigError, match="get_reward pays already; remove reward"):
            TRLEnvironment(Shop(), "bought")
        with pytest.raises(ConfigError, match="no attribute 'points' at its end"):
            TRLEnvironment(Wordle(), "points").reward()
