"""Which weights speak at which turn and which are trained, and what the critic reads."""

import shutil
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from fast_cases import some
from peft import LoraConfig, get_peft_model

from maporl import Agent, Arithmetic, Debate, MultiAgentPPOConfig, MultiAgentPPOTrainer, RewardSection, Team
from maporl.protocols.base import Protocol
from maporl.schedules import Freeze, Plan, Schedule, Span
from maporl.training.samples import samples_by_policy
from maporl.types import Ask
from maporl.validation.load import from_dict

TASK = Arithmetic(largest=9)
DEBATE = Debate(turns=3, later="{others};{question}", quote="{text}", separator=";")


def trainer_of(team, folder, schedule=None, protocol=DEBATE, **options):
    defaults = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "total_episodes": 8,
        "response_length": 4, "learning_rate": 1e-2, "value_learning_rate": 1e-2, "temperature": 1.0, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "lr_scheduler_type": "constant",
    }  # fmt: skip
    args = MultiAgentPPOConfig(**{**defaults, **options})
    reward = RewardSection(sources={"odd": 1.0})
    return MultiAgentPPOTrainer(args, team, TASK, protocol, None, reward, schedule=schedule, sources={"odd": odd})


def odd(dialogues, task):
    """A reward that random models earn now and then, so that there is something to learn."""
    return [[float(sum(u.response_ids) % 2) for u in d.utterances] for d in dialogues]


def weights(module):
    return torch.cat([p.detach().flatten().clone() for p in module.parameters()])


@pytest.fixture
def by_turn(tiny):
    """An agent with weights of its own for the first turn and for all later ones, and one with the same throughout."""

    def build():
        first, tokenizer = tiny("llama", seed=1)
        rest, _ = tiny("llama", seed=2)
        other, other_tokenizer = tiny("qwen3", seed=3)
        ann = Agent("ann", by_turn=(Agent("ann-first", first, tokenizer), Agent("ann-rest", rest, tokenizer)))
        return Team([ann, Agent("bob", other, other_tokenizer)])

    return build


def test_each_turn_is_spoken_and_learned_by_its_own_policy(by_turn, tmp_path):
    trainer = trainer_of(by_turn(), tmp_path)
    batch = trainer.score(trainer.collect(trainer.next_batch()))
    dialogues = batch.dialogues
    spoken = {(u.turn, u.policy) for d in dialogues for u in d.utterances if u.agent == "ann"}
    assert spoken == {(0, "ann-first"), (1, "ann-rest"), (2, "ann-rest")}
    rows = trainer.advantage(batch).token_batches
    assert {name: len(r) for name, r in rows.items()} == {"ann-first": 8, "ann-rest": 16, "bob": 24}
    metrics = trainer.update(batch).metrics
    assert all(abs(metrics[f"{policy}/val/first_ratio"] - 1) < 1e-5 for policy in rows)


def test_a_turn_that_is_not_trained_makes_no_rows_and_its_policy_stays_as_it_was(by_turn, tmp_path):
    trainer = trainer_of(by_turn(), tmp_path, Schedule(train_first_turn=False))
    before = {name: weights(learner.model) for name, learner in trainer.learners.items()}
    trainer.train()
    changed = {
        name: not torch.equal(before[name], weights(learner.model)) for name, learner in trainer.learners.items()
    }
    assert changed == {"ann-first": False, "ann-rest": True, "bob": True}


def test_one_turn_at_a_time_and_frozen_agents_cost_no_forward(by_turn, tmp_path):
    schedule = Schedule(cycle=[Span(1, [2])], freeze=[Freeze("bob", 1, 1)])
    trainer = trainer_of(by_turn(), tmp_path, schedule)
    batch = trainer.advantage(trainer.score(trainer.collect(trainer.next_batch())))
    rows = batch.token_batches
    assert {name: len(r) for name, r in rows.items()} == {"ann-rest": 8}
    assert all("turn 2" in label for label in rows["ann-rest"].labels)


def test_an_update_in_which_nothing_learns_passes(by_turn, tmp_path):
    trainer = trainer_of(by_turn(), tmp_path, Schedule(freeze=[Freeze("ann", 1, 9), Freeze("bob", 1, 9)]))
    before = weights(trainer.learners["bob"].model)
    trainer.train()
    assert trainer.state.global_step == 1 and torch.equal(before, weights(trainer.learners["bob"].model))


@pytest.mark.parametrize(("policy_per", "names"), [
    ("agent", ["ann", "bob"]),
    ("turn", ["ann-turn1", "ann-turn2", "ann-turn3", "bob-turn1", "bob-turn2", "bob-turn3"]),
    ("first_and_rest", ["ann-first", "ann-rest", "bob-first", "bob-rest"]),
])  # fmt: skip
def test_layouts_of_a_configuration_share_one_base_under_their_adapters(policy_per, names, tiny, tmp_path):
    model, tokenizer = tiny("llama")
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    agent = {"model": str(tmp_path / "base"), "lora": {"r": 2}, "policy_per": policy_per}
    config = from_dict(
        {
            "output_dir": "x", "task": {"name": "toy_sum"}, "agents": {"ann": agent, "bob": agent},
            "protocol": {"name": "debate", "turns": 3},
        }
    )  # fmt: skip
    team = Team.from_config(config)
    assert list(team.policies) == names
    assert len({id(p.model) for p in team.policies.values()}) == 1
    assert [p.name for p in team.policies_of["ann"]] == [n for n in names if n.startswith("ann")]


def test_agents_may_share_weights_in_any_layout(tiny, tmp_path):
    model, tokenizer = tiny("llama")
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    agent = {"model": str(tmp_path / "base"), "lora": {"r": 2}, "policy_per": "first_and_rest", "policy": "all"}
    values = {"output_dir": "x", "task": {"name": "toy_sum"}, "agents": {"ann": agent, "bob": agent}}
    team = Team.from_config(from_dict(values))
    assert {n: p.agents for n, p in team.policies.items()} == {"all-first": ["ann", "bob"], "all-rest": ["ann", "bob"]}


# -- critics ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tiny):
    def build():
        ann, ann_tokenizer = tiny("llama", context=256)
        bob, bob_tokenizer = tiny("qwen3", seed=1, context=256)
        return Team([Agent("ann", ann, ann_tokenizer), Agent("bob", bob, bob_tokenizer)])

    return build


@pytest.mark.slow
def test_the_critic_of_every_turn_learns(pair, tmp_path):
    trainer = trainer_of(pair(), tmp_path, detach_critic=True)
    assert not trainer.learners["ann"].value_head.linear.weight.any()
    trainer.train()
    moved = trainer.learners["ann"].value_head.linear.weight.abs().sum(-1)
    assert moved.shape[0] == 3 and bool((moved > 0).all())


@dataclass(frozen=True)
class Relay(Protocol):
    """A protocol of a user: says nothing of its number of turns, and ann speaks twice where bob speaks once."""

    def play(self, example, agents):
        question = [{"role": "user", "content": example.question}]
        (first,) = yield [Ask("ann", question)]
        (second,) = yield [Ask("bob", [{"role": "user", "content": f"{first.text}{example.question}"}])]
        yield [Ask("ann", [{"role": "user", "content": second.text}])]
        return "done"


@pytest.mark.slow
def test_a_protocol_that_names_no_number_of_turns_trains(pair, tmp_path):
    trainer = trainer_of(pair(), tmp_path, protocol=Relay())
    before = {name: weights(policy.model) for name, policy in trainer.team.policies.items()}
    trainer.train()
    assert all(not torch.equal(before[name], weights(p.model)) for name, p in trainer.team.policies.items())
    assert trainer.learners["ann"].value_head.linear.weight.shape[0] == 1  # one critic for whatever turns there are


def test_what_each_critic_reads(pair, tmp_path):
    trainer = trainer_of(pair(), tmp_path)
    (dialogue,) = trainer.score(trainer.collect(trainer.next_batch())).dialogues[:1]
    last = dialogue.at(2)[0]
    tokenizer = trainer.learners["ann"].tokenizer

    def read(context):
        options = {"ann": SimpleNamespace(critic_context=context, critic_per_turn=True, ratio="token")}
        answers = samples_by_policy([dialogue], {"ann": tokenizer}, Plan(), 1, 3, options)["ann"]
        return answers[-1].critic_prompt_ids

    assert read("dialogue") is None
    assert read("answer") == dialogue.at(0)[0].prompt_ids
    joint = tokenizer.decode(read("joint"))
    earlier = [u.text for u in dialogue.utterances if u.turn < 2]
    assert len(earlier) == 4 and all(text in joint for text in earlier) and last.policy == "ann"


@pytest.mark.parametrize("context", some(["answer", "joint"], 1))
@pytest.mark.parametrize("critic", ["head", "model", "adapter"])
def test_a_critic_of_other_words_reads_only_them_and_learns(context, critic, tiny, tmp_path):
    model, tokenizer = tiny("llama", context=512)
    options = {"target_modules": ["q_proj", "v_proj"], "r": 4, "task_type": "CAUSAL_LM"}
    team = Team([Agent("ann", get_peft_model(model, LoraConfig(**options)), tokenizer, critic=critic)])
    debate = Debate(turns=2, alone="{question}")
    trainer = trainer_of(team, tmp_path, critic_context=context, protocol=debate, num_mini_batches=2)
    learner = trainer.learners["ann"]
    learner.checked = True  # the test changes words after their log-probabilities are computed
    batch = trainer.advantage(trainer.score(trainer.collect(trainer.next_batch())))
    rows = batch.token_batches
    own = rows["ann"]
    assert own.critic is not None and own.critic.sampled_mask.sum() == own.sampled_mask.sum()
    torch.nn.init.normal_(learner.value_head.linear.weight)
    with torch.no_grad():
        values = learner.forward(own).values
        own.input_ids[:, 0] = 5  # the policy's words; the critic does not see them
        assert torch.equal(learner.forward(own).values, values)
        own.critic.input_ids[:, 0] = 5
        assert not torch.equal(learner.forward(own).values, values)
    metrics = trainer.update(batch).metrics
    assert metrics["ann/loss/value_avg"] > 0


def test_restating_asks_the_untrained_weights_and_leaves_what_was_sampled_alone(pair, tmp_path):
    trainer = trainer_of(pair(), tmp_path, restate="base_model", kl_coef=0.1)
    conversations = [[{"role": "user", "content": "1+1="}]]
    before = trainer.player.untrained.generate("ann", conversations, 5)
    with torch.no_grad():
        for parameter in trainer.learners["ann"].model.parameters():
            parameter.add_(torch.randn_like(parameter))
    assert trainer.player.untrained.generate("ann", conversations, 5) == before
    trainer.player.untrained.generate = lambda policy, conversations, most: ["7" for _ in conversations]
    batch = trainer.score(trainer.collect(trainer.next_batch()))
    dialogues = batch.dialogues
    restated = [u for d in dialogues for u in d.utterances if u.restated is not None]
    assert restated and all(u.grade.answer == "7" for u in restated)
    for u in restated:
        decoded = trainer.learners[u.policy].tokenizer.decode(u.response_ids, skip_special_tokens=True).strip()
        assert u.text == decoded


# -- references and critics of adapters ---------------------------------------------------------------------------


def lora_pair(tiny):
    """Two LoRA agents on one base, as a configuration would load them."""
    model, tokenizer = tiny("llama")
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    shared = get_peft_model(model, lora, adapter_name="ann")
    shared.add_adapter("bob", lora)
    return [Agent(name, shared, tokenizer, adapter=name) for name in ("ann", "bob")]


def test_the_reference_of_an_adapter_that_is_not_fresh_is_a_frozen_copy_of_it(tiny, tmp_path):
    agents = lora_pair(tiny)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in agents[0].model.named_parameters():
            if "lora_B.bob" in name:
                parameter.add_(torch.randn_like(parameter))
    trainer = trainer_of(Team(agents), tmp_path, kl_coef=0.1)
    assert [trainer.learners[n].policy.ref_adapter for n in ("ann", "bob")] == [None, "bob_start"]
    metrics = trainer.advantage(trainer.score(trainer.collect(trainer.next_batch()))).metrics
    assert abs(metrics["ann/objective/kl"]) < 1e-5 and abs(metrics["bob/objective/kl"]) < 1e-5
    start = {n: p.clone() for n, p in agents[0].model.named_parameters() if ".bob_start." in n}
    trainer.train()
    assert start and all(torch.equal(p, dict(agents[0].model.named_parameters())[n]) for n, p in start.items())


@pytest.mark.slow
def test_critic_models_of_adapters_on_one_base_are_their_own_and_resume(tiny, tmp_path):
    def build(folder):
        torch.manual_seed(5)
        return trainer_of(
            Team(lora_pair(tiny)), folder, critic="model", save_strategy="steps", save_steps=1, total_episodes=16
        )

    trainer = build(tmp_path)
    assert {n: list(x.critic.model.peft_config) for n, x in trainer.learners.items()} == {
        "ann": ["ann"],
        "bob": ["bob"],
    }
    trainer.train()
    expected = {n: weights(x.critic.model) for n, x in trainer.learners.items()}
    shutil.rmtree(tmp_path / "checkpoint-2")
    again = build(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert all(torch.equal(expected[n], weights(x.critic.model)) for n, x in again.learners.items())
