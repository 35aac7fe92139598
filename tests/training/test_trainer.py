"""Teams: exact tokens, several policies at once, and the single-policy trainer's numbers for a team of one."""

import copy
import json
import math

import pytest
import torch
from notebook_runs import DEBATE, TASK, config
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from maporl import Agent, Arithmetic, Debate, MultiAgentPPOTrainer, RewardSection, Team
from maporl.config.schema import AdvantageConfig, BranchingSection
from maporl.engines.human import HumanEngine
from maporl.engines.scripted import ScriptedEngine
from maporl.errors import ConfigError
from maporl.protocols.base import Protocol
from maporl.rewards import assign_credit
from maporl.rewards.base import RewardFailure
from maporl.rewards.labels import label
from maporl.rewards.scoring import score_dialogues
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.storage.run_folder import RunExists
from maporl.types import Ask, Example, Grade
from trl_ext import PPOv2Config, PPOv2Trainer
from trl_ext.files.checkpoints import list_checkpoints
from trl_ext.files.manifest import verify
from trl_ext.learning.trained import NonFiniteError
from trl_ext.ppo import maths
from trl_ext.ppo.advantages import token_rewards
from trl_ext.ppo.options import GREEDY
from trl_ext.process.random_states import shuffled_indices


@pytest.fixture
def pair(tiny):
    """Two agents of different architectures and tokenizers."""

    def build(**options):
        ann, ann_tokenizer = tiny("llama")
        bob, bob_tokenizer = tiny("gpt_neox", alphabet="ab?;=+*:9876543210 ")
        return Team([Agent("ann", ann, ann_tokenizer, **options), Agent("bob", bob, bob_tokenizer)])

    return build


def trainer_of(team, folder, protocol=DEBATE, task=TASK, **options):
    reward = options.pop("reward", None)
    sources = options.pop("sources", None)
    callbacks = options.pop("callbacks", None)
    eval_task = Arithmetic(largest=9, split="eval")
    return MultiAgentPPOTrainer(
        config(folder, **options), team, task, protocol, eval_task, reward, sources=sources, callbacks=callbacks
    )  # fmt: skip


# -- playing ------------------------------------------------------------------------------------------------------


def test_transcripts_only_grow_and_hold_exactly_what_was_sampled(pair, tmp_path):
    trainer = trainer_of(pair(), tmp_path)
    for dialogue in trainer.collect(trainer.next_batch()).dialogues:
        for agent in ("ann", "bob"):
            tokenizer = trainer.team.policies_of[agent][0].tokenizer
            first, second = (u for u in dialogue.utterances if u.agent == agent)
            assert (
                second.prompt_ids[: len(first.prompt_ids) + len(first.response_ids)]
                == first.prompt_ids + first.response_ids
            )
            other = next(u for u in dialogue.at(0) if u.agent != agent)
            suffix = tokenizer.decode(second.prompt_ids[len(first.prompt_ids) + len(first.response_ids) :])
            closing = "" if first.stop.value == "eos" else "<eos>"
            assert suffix == f"{closing}{other.text};{dialogue.example.question}"


def test_a_human_may_take_a_seat(tiny, tmp_path):
    model, tokenizer = tiny()
    shown, typed = [], iter(["", "4", "5"] * 8)
    team = Team([Agent("ann", model, tokenizer), Agent("me", engine="human")])
    engine = HumanEngine(show=shown.append, read=lambda prompt: next(typed))
    trainer = MultiAgentPPOTrainer(config(tmp_path), team, TASK, DEBATE, engines={"human": engine})
    batch = trainer.next_batch()
    batch.examples = batch.examples[:1]
    dialogues = trainer.score(trainer.collect(batch)).dialogues
    mine = [u for u in dialogues[0].utterances if u.agent == "me"]
    assert [u.text for u in mine] == ["4", "5"] and not any(u.trainable for u in mine)
    rows = trainer.advantage(batch).token_batches
    assert set(rows) == {"ann"}
    engine.read = lambda prompt: (_ for _ in ()).throw(EOFError())
    with pytest.raises(RuntimeError, match=r"agent 'me', turn 1, dialogue .*: the input ended before this agent"):
        batch.examples = batch.examples[:1]
        trainer.collect(batch)


def test_a_protocol_that_asks_a_stranger_and_a_prompt_that_does_not_fit_are_named(pair, tmp_path):
    class Stranger(Protocol):
        def play(self, example, agents):
            yield [Ask("cy", [{"role": "user", "content": "?"}])]

    with pytest.raises(ValueError, match=r"asks agent 'cy' but agents are \['ann', 'bob'\]"):
        trainer_of(pair(), tmp_path, protocol=Stranger()).train()
    with pytest.raises(ValueError, match=r"agent 'ann', turn 1, dialogue .*: the prompt has 204 tokens .* at most 128"):
        trainer_of(pair(), tmp_path, protocol=Debate(opening="1" * 200 + "{question}")).train()


# -- credit -------------------------------------------------------------------------------------------------------


def played(script, turns=2, agents=("ann", "bob")):
    specs = {name: SpeakerSpec("scripted", (name,)) for name in agents}
    engine = ScriptedEngine(lambda request: script[request.ask.agent][request.turn])
    return RolloutDriver(TASK, Debate(turns=turns), specs, {"scripted": engine}, GREEDY).play(
        [Example("e", "2+2=", "4")]
    )


def test_credit_is_the_discounted_share_of_the_teams_later_scores():
    dialogues = played({"ann": ["4", "5"], "bob": ["1", "4"]})
    score_dialogues(dialogues, TASK, {"label": label}, {"label": 1.0})
    assert [u.rewards["score"] for u in dialogues[0].utterances] == [1.0, 0.0, 0.0, 1.0]
    assign_credit(dialogues, ("ann", "bob"), RewardSection(discount=0.3))
    # ann, turn 1: (1 + 0.3 * 0.5) / 1.3; bob: (0 + 0.15) / 1.3; last turn: their own
    expected = [1.15 / 1.3, 0.15 / 1.3, 0.0, 1.0]
    assert [u.rewards["credit"] for u in dialogues[0].utterances] == pytest.approx(expected)
    assert [u.grade.correct for u in dialogues[0].utterances] == [True, False, False, True]


def unreadable(task, example, text):
    return Grade(None, None, "unreadable label") if text == "?" else Arithmetic.grade(task, example, text)


@pytest.mark.parametrize(("grade", "message"), [
    (unreadable, r"scored agent 'bob', turn 2, dialogue e\.0: label gave None.*unreadable label"),
    (lambda *_: True, r"expected a maporl\.Grade for each of 4 answers, got True"),
    (lambda *_: 1 / 0, r"grading agent 'ann', turn 1, dialogue e\.0 .*, line \d+: ZeroDivisionError"),
])  # fmt: skip
def test_a_grade_that_fails_or_is_missing_names_agent_turn_and_dialogue(grade, message):
    task = type("Odd", (Arithmetic,), {"grade": grade})()
    with pytest.raises(RewardFailure, match=message):
        score_dialogues(played({"ann": ["4", "4"], "bob": ["4", "?"]}), task, {"label": label}, {"label": 1.0})


@pytest.mark.parametrize(("source", "message"), [
    (lambda dialogues, task: [[1.0]], r"one value for each of their 4 utterances, got \[\[1.0\]\]"),
    (lambda dialogues, task: 3, r"one value for each of their 4 utterances, got 3"),
    (lambda dialogues, task: [[1.0, "high", 0.0, 0.0]], r"gave 'high' to agent 'bob', turn 1, dialogue e\.0"),
    (lambda dialogues, task: 1 / 0, "failed on arithmetic: .*ZeroDivisionError"),
    (lambda dialogues, task: [[1.0, float("nan"), 0.0, 0.0]], r"gave nan to agent 'bob', turn 1, dialogue e\.0"),
])  # fmt: skip
def test_a_source_that_raises_or_gives_what_cannot_be_is_named(source, message):
    dialogues = played({"ann": ["4", "4"], "bob": ["4", "4"]})
    with pytest.raises(RewardFailure, match=f"reward source 'odd'.* ?{message}"):
        score_dialogues(dialogues, TASK, {"odd": source}, {"odd": 1.0})


# -- learning -----------------------------------------------------------------------------------------------------


def test_one_agent_and_one_turn_reproduce_the_single_policy_trainer(tiny, tmp_path):
    """Same seed, same questions, same reward: the same weights, bit by bit."""
    options = {"num_mini_batches": 2, "kl_coef": 0.05}
    model, tokenizer = tiny()
    rows = [{"messages": [{"role": "user", "content": TASK.question(e)}], "answer": e.answer} for e in TASK]
    args = PPOv2Config(
        **{k: v for k, v in config(tmp_path / "one", **options).__dict__.items() if k in _given(options)}
    )
    alone = PPOv2Trainer(
        args, tokenizer, model, train_dataset=rows,
        reward_funcs=lambda p, c, answer, **k: [float(TASK.grade(Example("", "", a), t.strip()).correct) for t, a in zip(c, answer, strict=True)],
    )  # fmt: skip
    alone.train()
    member, tokenizer = tiny()
    team = trainer_of(Team([Agent("ann", member, tokenizer)]), tmp_path / "team", protocol=Debate(turns=1), **options)
    team.train()
    for name, value in model.state_dict().items():
        assert torch.equal(value, member.state_dict()[name]), name
    heads = alone.learners["policy"].value_head, team.learners["ann"].value_head
    assert torch.equal(heads[0].linear.weight, heads[1].linear.weight)
    assert shuffled_indices(5, 0, 3, 4)[:2] == shuffled_indices(5, 0, 3, 2)


def _given(options):
    names = (
        "output_dir per_device_train_batch_size gradient_accumulation_steps total_episodes response_length "
        "learning_rate"
    )
    return {*names.split(), "temperature", "report_to", "save_strategy", "disable_tqdm", "use_cpu", *options}


def test_advantages_are_whitened_for_each_agent_and_turn(pair, tmp_path):
    trainer = trainer_of(pair(), tmp_path)
    batch = trainer.advantage(trainer.score(trainer.collect(trainer.next_batch())))
    rows, metrics = batch.token_batches, batch.metrics
    assert set(rows) == {"ann", "bob"}
    for own, groups in zip(rows.values(), ([0, 1], [2, 3]), strict=True):
        assert own.group.tolist() == groups * 8 and own.head.tolist() == [0, 1] * 8
        for group in groups:
            member = own.group == group
            values = own.advantages[member][own.sampled_mask[member]]
            assert values.mean().item() == pytest.approx(0.0, abs=1e-5)
            assert values.std().item() == pytest.approx(1.0, abs=1e-3) or values.abs().max() < 1e-3
    assert metrics["ann/policy/entropy_avg"] > 0


def test_token_rewards_may_be_whitened_within_each_agent_and_turn(pair, tmp_path):
    trainer = trainer_of(pair(), tmp_path, whiten_rewards=True, missing_eos_penalty=1.0)
    batch = trainer.advantage(trainer.score(trainer.collect(trainer.next_batch())))
    rows = batch.token_batches
    for own in rows.values():
        rewards = token_rewards(own, trainer.args)
        for group in own.group.unique():
            member = own.group == group
            rewards[member] = maths.masked_whiten(rewards[member], own.sampled_mask[member], shift_mean=False)
        _, returns = maths.gae(rewards, own.values, own.sampled_mask, trainer.args.gamma, trainer.args.lam)
        torch.testing.assert_close(own.returns, returns)


def test_each_update_moves_every_policy_and_its_critic_with_its_own_learning_rate(pair, tmp_path):
    team = pair(learning_rate=0.0)
    before = {n: copy.deepcopy(p.model.state_dict()) for n, p in team.policies.items()}
    odd = {"label": lambda dialogues, task: [[float(len(u.response_ids) % 2) for u in d.utterances] for d in dialogues]}
    trainer = trainer_of(team, tmp_path, sources=odd)
    trainer.train()
    moved = {
        n: any(not torch.equal(v, before[n][k]) for k, v in p.model.state_dict().items())
        for n, p in team.policies.items()
    }
    assert moved == {"ann": False, "bob": True}
    assert trainer.learners["bob"].value_head.linear.weight.shape == (2, 64)
    assert (trainer.learners["bob"].value_head.linear.weight.abs().sum(1) > 0).all()


def test_frozen_agents_speak_but_do_not_learn(tiny, tmp_path):
    ann, tokenizer = tiny()
    bob, other = tiny("qwen3")
    frozen = copy.deepcopy(bob.state_dict())
    trainer = trainer_of(Team([Agent("ann", ann, tokenizer), Agent("bob", bob, other, trainable=False)]), tmp_path)
    trainer.train()
    assert set(trainer.learners) == {"ann"}
    assert all(torch.equal(v, frozen[k]) for k, v in bob.state_dict().items())


def test_log_probabilities_of_an_adapter_are_its_own_whatever_is_active(tiny, tmp_path):
    model, tokenizer = tiny()
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    shared = get_peft_model(model, lora, adapter_name="ann")
    shared.add_adapter("bob", lora)
    team = Team([Agent(n, shared, tokenizer, adapter=n) for n in ("ann", "bob")])
    trainer = trainer_of(team, tmp_path, kl_coef=0.05)
    batch = trainer.advantage(trainer.score(trainer.collect(trainer.next_batch())))
    rows = batch.token_batches
    for name in ("ann", "bob"):
        shared.set_adapter("bob" if name == "ann" else "ann")
        own = rows[name]
        again = trainer.learners[name].forward(own).logprobs
        torch.testing.assert_close(own.old_logprobs[own.sampled_mask], again.detach(), atol=1e-5, rtol=0)
        shared.set_adapter(f"{name}_start")  # these adapters are not fresh, so their start is the reference
        logits = shared(own.input_ids[:1]).logits[0, :-1]
        plain = torch.log_softmax(logits, -1).gather(1, own.input_ids[0, 1:, None])[:, 0]
        mask = own.sampled_mask[0, 1:]
        torch.testing.assert_close(own.ref_logprobs[0, 1:][mask], plain[mask], atol=1e-5, rtol=0)


def test_a_non_finite_weight_names_agent_turn_and_dialogue_and_spares_the_checkpoint(pair, tmp_path):
    team = pair()
    trainer = trainer_of(team, tmp_path, save_strategy="steps", save_steps=1, total_episodes=24)
    finish = trainer.finish_update

    def poison(*arguments):
        finish(*arguments)
        if trainer.state.global_step == 2:
            trainer.learners["bob"].value_head.linear.bias.data.fill_(math.nan)

    trainer.finish_update = poison
    with pytest.raises(
        NonFiniteError, match=r"policy 'bob': a value is not finite at update 3, agent 'bob', turn 1, dialog"
    ):
        trainer.train()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2"]
    verify(tmp_path / "checkpoint-2")


# -- the run folder -----------------------------------------------------------------------------------------------


def test_a_run_leaves_metrics_dialogues_and_folders_that_load(pair, tmp_path):
    team = pair()
    trainer = trainer_of(team, tmp_path, eval_strategy="steps", eval_steps=2)
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2]
    assert {
        "accuracy/turn_1",
        "accuracy/turn_2/bob",
        "reward/credit/ann",
        "ann/objective/kl",
        "bob/grad_norm",
        "lr",
    } <= set(lines[0])
    assert "eval_majority/turn_2" in lines[2]
    records = [json.loads(line) for line in (tmp_path / "dialogues.jsonl").read_text().splitlines()]
    assert len(records) == 8 and records[0]["utterances"][0]["grade"]["reason"]
    trainer.save_model(str(tmp_path / "final"))
    for name, policy in team.policies.items():
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final" / name)
        assert all(torch.equal(v, reloaded.state_dict()[k]) for k, v in policy.model.state_dict().items())
        assert name in (tmp_path / "final" / name / "README.md").read_text()
    with pytest.raises(RunExists, match="holds another run; --resume"):
        trainer_of(pair(), tmp_path).train()


def test_evaluation_does_not_disturb_the_run(pair, tmp_path):
    weights = []
    for folder, evaluate in (("a", False), ("b", True)):
        team = pair()
        trainer = trainer_of(team, tmp_path / folder, eval_temperature=1.0)
        if evaluate:
            trainer.measure()
        trainer.train()
        weights.append(team.policies["ann"].model.state_dict())
    assert all(torch.equal(v, weights[1][k]) for k, v in weights[0].items())


def test_a_team_in_which_nobody_learns_is_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match="no policy of the team is trainable"):
        trainer_of(Team([Agent("ann", *tiny(), trainable=False)]), tmp_path)


def test_reward_rules_reach_the_trainer(pair, tmp_path):
    trainer = trainer_of(
        pair(), tmp_path, reward=RewardSection(sources={"label": 2.0}, horizon="current", share="individual")
    )
    for u in (u for d in trainer.score(trainer.collect(trainer.next_batch())).dialogues for u in d.utterances):
        assert u.rewards["credit"] == 2.0 * u.rewards["label"]


def test_a_trainer_made_in_python_refuses_what_its_parts_cannot_bear_as_a_configuration_does(pair, tmp_path):
    def build(reward, advantage, how="tree", group=2):
        branching = BranchingSection(how=how, group=group)
        parts = config(tmp_path, kl_coef=0.0), pair(), TASK, DEBATE, None, RewardSection(**reward)
        MultiAgentPPOTrainer(*parts, advantage=AdvantageConfig(**advantage), branching=branching)

    plain = {"baseline": "mean", "key": ("prompt", "agent", "turn", "state")}
    with pytest.raises(ConfigError, match=r"trainer: .*reward.horizon: discounted_sum looks at what follows an answer"):
        build({"horizon": "discounted_sum"}, {"returns": "utterance", **plain})
    with pytest.raises(ConfigError, match=r"trainer: advantage.returns: reward_to_go looks at other turns"):
        build({"rules": ["own"]}, {"returns": "reward_to_go", **plain})
    with pytest.raises(ConfigError, match=r"^trainer: advantage: .* a single member"):
        build({}, {"returns": "utterance", "baseline": "mean", "key": ("prompt", "agent", "turn")}, "independent", 1)
    build({"rules": ["own"]}, {"returns": "utterance", **plain})
