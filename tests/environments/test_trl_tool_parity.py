"""A run with tools here and in TRL: the same scripted tokens through both trainers' own steps."""

import pytest
import torch
from chat_models import characters
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from user_tools import TEMPLATE, model_of, tool_call

from maporl import Agent, Debate, MultiAgentPPOConfig, MultiAgentPPOTrainer, Team
from maporl.config.schema import AdvantageConfig, BranchingSection
from maporl.engines.base import Engine
from maporl.engines.text import reply_of, token_request
from maporl.errors import ConfigError
from trl_ext.sampling.options import Sampled


class Till:
    """A class for TRL's ``environment_factory``. Reward functions read what was sold."""

    def reset(self, **row):
        self.sold, self.open = 0, True
        return " We are open."

    def buy(self, count: int) -> str:
        """Buy apples.

        Args:
            count: how many
        """
        if count > 3:
            raise ValueError("Only 3 left.")
        self.sold += count
        return f"{self.sold} sold"

    def _close(self):
        self.open = False


def price(unit: float) -> str:
    """Tell the price.

    Args:
        unit: the price of one
    """
    return f"{2 * unit}"


def sold(completions, environments, **columns):
    """What TRL's users write: a reward from the state of the environments."""
    assert all(till is None or till.open for till in environments), "environments stay open until they are scored"
    return [0.0 if till is None else till.sold / 10 for till in environments]


ROW = {"prompt": [{"role": "user", "content": "Buy."}]}
END = "<|im_end|>"
SCRIPTS = [
    [tool_call("buy", {"count": 2}), f"Two.{END}"],
    [f"None.{END}"],
    [tool_call("buy", {"count": 1}), tool_call("buy", {"count": 2}), f"Three.{END}"],
    [tool_call("buy", {"count": 9}), tool_call("price", {"unit": 1.5}), f"Too dear.{END}"],
]
"""What each of four rollouts says: calls, a call that fails, and an answer."""


def in_trl(tmp_path):
    """The batch of a GRPOTrainer whose sampling is replaced by the scripts: ids, masks and advantages of each row."""
    tokenizer = characters(TEMPLATE)
    arguments = GRPOConfig(
        output_dir=str(tmp_path / "trl"), num_generations=4, per_device_train_batch_size=4, max_completion_length=4000,
        use_cpu=True, bf16=False, report_to=[], max_tool_calling_iterations=20,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model_of(tokenizer), reward_funcs=[sold], args=arguments, train_dataset=Dataset.from_list([ROW] * 4),
        processing_class=tokenizer, environment_factory=Till, tools=[price],
    )  # fmt: skip
    step = [0]

    def said(prompt_ids, *_, **__):
        speaking = [script[step[0]] for script in SCRIPTS if len(script) > step[0]]
        step[0] += 1
        assert len(prompt_ids) == len(speaking)
        return [tokenizer.encode(line) for line in speaking], None

    trainer._generate_single_turn = said
    with torch.no_grad():
        found = trainer._generate_and_score_completions([dict(ROW) for _ in range(4)])
    rows = []
    for number in range(4):
        real = found["completion_mask"][number].bool()
        completion = found["completion_ids"][number][real].tolist()
        mask = found["tool_mask"][number][real].tolist()
        prompt = found["prompt_ids"][number][found["prompt_mask"][number].bool()].tolist()
        rows.append((prompt + completion, [0] * len(prompt) + mask, float(found["advantages"][number])))
    return rows


class Scripted(Engine):
    """Says the scripts as tokens of the policy: rollout k says script k."""

    def __init__(self, trainer):
        self.trainer = trainer

    def generate(self, requests, decoding):
        replies = []
        for request in requests:
            policy = self.trainer.team.policies[request.policy]
            asked = token_request(request, policy.voice, decoding, 1)
            rollout = int(request.label.rpartition(".")[2])
            line = SCRIPTS[rollout][sum(m["role"] == "tool" for m in request.transcript.messages)]
            replies.append(reply_of(request, policy.voice, asked, Sampled(policy.tokenizer.encode(line), None)))
        return replies


def trainer_of(tmp_path, names=("solo",), tools=None, **changes):
    """A trainer of agents that say the scripts, and play in one till together."""
    team = Team([Agent(name, model_of(tokenizer := characters(TEMPLATE)), tokenizer) for name in names])
    args = MultiAgentPPOConfig(
        str(tmp_path / "here"), per_device_train_batch_size=1, gradient_accumulation_steps=1, total_episodes=1,
        response_length=200, use_cpu=True, kl_coef=0.0, report_to=[],
    )  # fmt: skip
    parts = {"reward_funcs": [sold], "environments": {"till": Till}, "train_dataset": [ROW]} | changes
    trainer = MultiAgentPPOTrainer(
        args, team, protocol=Debate(turns=1), branching=BranchingSection(group=4), tools=tools,
        advantage=AdvantageConfig(
            returns="utterance", baseline="mean", scale="std", key=("prompt", "agent"), unit="turn", eps=1e-4
        ),
        **parts,
    )  # fmt: skip
    trainer.engines.update(dict.fromkeys(trainer.engines, Scripted(trainer)))
    return trainer


def here(trainer, agent="solo"):
    """The same of the rollouts of an agent here."""
    batch = trainer.advantage(trainer.score(trainer.collect(trainer.next_batch())))
    advantages = {}
    for policy, tokens in batch.token_batches.items():
        for i, sample in enumerate(tokens.sample.tolist()):
            utterance = batch.samples[policy][sample].utterance
            found = tokens.advantages[i][tokens.sampled_mask[i]]
            advantages.setdefault(id(utterance), set()).update(found.tolist())
    rows = []
    for dialogue in batch.dialogues:
        own = [u for u in dialogue.utterances if u.agent == agent]
        ids = own[-1].prompt_ids + own[-1].response_ids
        mask = [0] * len(ids)
        for u in own:
            assert ids[: len(u.prompt_ids)] == u.prompt_ids, "each segment goes on where the one before ended"
            mask[len(u.prompt_ids) : len(u.prompt_ids) + len(u.response_ids)] = [1] * len(u.response_ids)
        (advantage,) = set().union(*(advantages[id(u)] for u in own))
        rows.append((ids, mask, advantage))
    return rows, batch


def test_ids_masks_and_advantages_are_those_of_trl(tmp_path):
    theirs = in_trl(tmp_path)
    ours, _ = here(trainer_of(tmp_path, tools={"solo": [price, "till"]}))
    decode = characters(TEMPLATE).decode
    for (ids, mask, advantage), (own_ids, own_mask, own_advantage) in zip(theirs, ours, strict=True):
        assert decode(own_ids) == decode(ids)
        assert own_ids == ids and own_mask == mask
        assert own_advantage == pytest.approx(advantage, abs=1e-4)
    rewards = torch.tensor([0.2, 0.0, 0.3, 0.0])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert [advantage for *_, advantage in theirs] == pytest.approx(expected.tolist(), abs=1e-4)


# -- reward functions that read environments ---------------------------------------------------------------------------


def states_of(batch):
    """The tills of a batch's dialogues."""
    return [d.environments["till"].world.made for d in batch.dialogues]


def test_two_policies_share_a_till_that_is_closed_after_scoring(tmp_path):
    """The function, written for TRL, is used as it is.

    Both agents' answers earn what the till of their dialogue sold.
    """
    trainer = trainer_of(tmp_path, ("ann", "bob"), tools={"ann": [price, "till"], "bob": [price, "till"]})
    batch = trainer.collect(trainer.next_batch())
    tills = states_of(batch)
    assert [till.open for till in tills] == [True] * 4, "nobody has read them yet"
    trainer.score(batch)
    assert [till.open for till in tills] == [False] * 4
    last = [{u.agent: u.rewards["sold"] for u in d.utterances if "sold" in u.rewards} for d in batch.dialogues]
    assert last == [{"ann": n, "bob": n} for n in (0.4, 0.0, 0.6, 0.0)]
    assert trainer.player.world.take_counts()["env/till/closed"] == 4


def test_environments_are_closed_if_a_reward_fails(tmp_path):
    def broken(completions, environments):
        raise OSError("no disk")

    trainer = trainer_of(tmp_path, tools={"solo": [price, "till"]}, reward_funcs=[broken])
    batch = trainer.collect(trainer.next_batch())
    with pytest.raises(RuntimeError, match=r"reward 'broken' failed: .*OSError: no disk"):
        trainer.score(batch)
    assert [till.open for till in states_of(batch)] == [False] * 4


def test_environments_that_nobody_reads_are_closed_at_the_end_of_a_dialogue(tmp_path):
    def plain(completions, **columns):
        assert "environments" not in columns
        return [0.0] * len(completions)

    trainer = trainer_of(tmp_path, tools={"solo": [price, "till"]}, reward_funcs=[plain])
    assert [till.open for till in states_of(trainer.collect(trainer.next_batch()))] == [False] * 4


def test_several_environments_come_by_name(tmp_path):
    seen = []

    def reading(completions, environments, agents):
        seen[:] = sorted(zip(agents, map(kind, environments), strict=True))
        return [0.0] * len(completions)

    def kind(given):
        return sorted(given) if isinstance(given, dict) else type(given).__name__

    tools = {"ann": [price, "till", "other"], "bob": [price]}
    given = {"till": Till, "other": Other}
    trainer = trainer_of(tmp_path, ("ann", "bob"), tools, reward_funcs=[reading], environments=given)
    here(trainer, "ann")
    assert seen == [("ann", ["other", "till"])] * 4 + [("bob", "NoneType")] * 4, (
        "they belong to ann, whose tools name them"
    )


class Other:
    """Another class with another tool."""

    def reset(self, **row):
        return None

    def wave(self) -> str:
        """Wave."""
        return "hello"


def test_a_reader_without_environments_is_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match="reward 'sold' has the parameter environments, and the run has none"):
        trainer_of(tmp_path, tools={"solo": [price]}, environments=None)


def test_a_record_leaves_environments_out(tmp_path):
    import pickle

    from maporl.types import from_json, to_json

    trainer = trainer_of(tmp_path, tools={"solo": [price, "till"]})
    (first, *_) = trainer.collect(trainer.next_batch()).dialogues
    assert first.environments and from_json(to_json(first)) == first and "environments" not in to_json(first)
    assert pickle.loads(pickle.dumps(first)) == first and pickle.loads(pickle.dumps(first)).environments == {}
    trainer.player.world.close()
    assert not first.environments["till"].world.made.open
