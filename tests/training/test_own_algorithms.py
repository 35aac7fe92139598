"""Policies of one team that learn by different algorithms."""

import importlib
import random
import sys

import pytest
import torch
from folders import ROOT
from tiny_runs import TINY_SECTION as SMALL
from tiny_runs import one_update, scheduled_config

from maporl.config import parse_config
from maporl.config.algorithm import AdvantageConfig, Algorithm
from maporl.config.parse import read_values
from maporl.config.schema import TinySection
from maporl.errors import ConfigError
from maporl.methods.tiny_versions import tiny_version
from maporl.runs.build import build_trainer
from maporl.team.agents import Agent
from maporl.team.team import Team
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from maporl.validation.load import load
from maporl.validation.preflight import check_run
from trl_ext.files.manifest import CheckpointError

TINY = TinySection(**SMALL)
GROUPS = {
    "advantage": {"returns": "utterance", "baseline": "mean", "scale": "std", "key": ["prompt", "agent", "turn"]},
    "ppo": {"kl_coef": 0.0, "objective": "reinforce", "num_ppo_epochs": 1},
}
CRITIC = {"ppo": {"lam": 0.9, "cliprange": 0.1, "num_ppo_epochs": 3, "num_mini_batches": 2}, "critic": "head"}


def settings_of(folder, ann=None, bob=None, **sections):
    ppo = {"response_length": 3, "temperature": 1.0, "missing_eos_penalty": 1.0, **sections.pop("ppo", {})}
    sections = {"branching": {"group": 4}, "training": {"per_device_train_batch_size": 4, "use_cpu": True}} | sections
    return scheduled_config(folder, agents={"ann": ann or {}, "bob": bob or {}}, ppo=ppo, **sections)


def in_float64(settings):
    torch.manual_seed(0)
    team = Team.from_config(settings)
    for policy in team.policies.values():
        policy.model.double()
    return build_trainer(settings, team, quiet=True)


def first_gradients(trainer):
    """Return the gradient of each learner's first minibatch, and how its values would be trained."""
    batch = trainer.advantage(trainer.score(trainer.collect(trainer.next_batch())))
    found = {}
    for name, rows in batch.token_batches.items():
        learner = trainer.learners[name]
        learner.accumulate(rows, trainer.learning.minibatches(name, rows, 0, 0)[0])
        found[name] = {n: p.grad.clone() for n, p in learner.model.named_parameters() if p.grad is not None}
        if learner.value_head is not None:
            found[name] |= {n: p.grad.clone() for n, p in learner.value_head.named_parameters()}
    return found


def test_the_gradient_of_each_learner_is_that_of_a_team_in_which_all_learn_as_it_does(tmp_path):
    mixed = first_gradients(in_float64(settings_of(tmp_path / "mixed", {"algorithm": CRITIC}, {"algorithm": GROUPS})))
    for name, other, algorithm in (("ann", "bob", CRITIC), ("bob", "ann", GROUPS)):
        team = {"ppo": algorithm["ppo"], "advantage": algorithm.get("advantage", {})}
        alone = settings_of(tmp_path / name, **{other: {"trainable": False}}, **team)
        expected = first_gradients(in_float64(alone))[name]
        assert expected.keys() == mixed[name].keys() and len(expected) > 5
        for parameter, gradient in expected.items():
            torch.testing.assert_close(mixed[name][parameter], gradient, atol=1e-6, rtol=1e-6)


def test_each_learner_makes_the_steps_of_its_own_passes_and_minibatches(tmp_path):
    trainer = build_trainer(settings_of(tmp_path, {"algorithm": CRITIC}, {"algorithm": GROUPS}), quiet=True)
    one_update(trainer)
    steps = {
        name: {float(s["step"]) for s in learner.optimizer.state.values()} for name, learner in trainer.learners.items()
    }
    assert steps == {"ann": {6.0}, "bob": {1.0}}
    assert [trainer.learners[name].critic.kind for name in ("ann", "bob")] == ["head", "none"]
    assert trainer.learners["bob"].reference is None and trainer.learners["ann"].reference is not None


def test_agents_of_one_policy_may_be_compared_in_different_ways(tmp_path):
    """Every row has the advantage and the return that it has in a team in which all agents have its agent's way."""
    own = {"ann": {}, "bob": GROUPS["advantage"] | {"baseline": "critic", "scale": "none"}}

    def rows_of(folder, ann, bob):
        sections = {
            name: {"policy": "both", "algorithm": {"advantage": way}} for name, way in (("ann", ann), ("bob", bob))
        }
        trainer = build_trainer(settings_of(folder, **sections, ppo={"kl_coef": 0.0}), quiet=True)
        batch = trainer.advantage(trainer.score(trainer.collect(trainer.next_batch())))
        rows = batch.token_batches["both"]
        said = [batch.samples["both"][i].columns.values["agent"] for i in rows.sample.tolist()]
        marks = ("advantages", "returns", "weight", "value_mask")
        return {name: [rows.marked("assigned")[m][[a == name for a in said]] for m in marks] for name in own}, batch

    mixed, batch = rows_of(tmp_path / "mixed", **own)
    for name, way in own.items():
        alone, _ = rows_of(tmp_path / name, way, way)
        assert len(mixed[name][0]) == 16 and bool(mixed[name][0].any())
        for got, expected in zip(mixed[name], alone[name], strict=True):
            torch.testing.assert_close(got, expected)
    assert {group["name"] for group in batch.compared.values()} == {"std"}
    assert batch.metrics["both/objective/scores"] == pytest.approx(float(batch.token_batches["both"].score.mean()))


def test_a_policys_critic_may_be_read_for_one_of_its_agents_alone(tmp_path):
    ann = {"critic": "model", "advantage": {"baseline": "none"}}
    agents = {"ann": {"policy": "p", "algorithm": ann}, "bob": {"policy": "p", "algorithm": {"critic": "model"}}}
    assert any("critic model" in line for line in check_run(settings_of(tmp_path, **agents)))


def test_a_critic_may_warm_up_alone_in_one_policy(tmp_path):
    trainer = build_trainer(settings_of(tmp_path, {"algorithm": {"critic_warmup": 1}}), quiet=True)
    before = {n: {k: v.clone() for k, v in p.model.state_dict().items()} for n, p in trainer.team.policies.items()}
    one_update(trainer)
    moved = {n: any(not torch.equal(v, before[n][k]) for k, v in p.model.state_dict().items())
             for n, p in trainer.team.policies.items()}  # fmt: skip
    assert moved == {"ann": False, "bob": True} and trainer.learners["ann"].value_head.linear.weight.any()


REFUSED = [
    ({"ppo": {"temperature": 0.5}}, {}, "agents.ann.algorithm.ppo.temperature: belongs to no single policy"),
    ({"ppo": {"klcoef": 0.5}}, {}, "unknown key 'agents.ann.algorithm.ppo.klcoef'; did you mean 'kl_coef'"),
    ({"branching": {"group": 2}}, {}, "unknown key 'agents.ann.algorithm.branching'"),
    ({"ppo": {"kl_in": "loss"}}, {}, "agents.ann.algorithm: kl_in: loss needs kl_estimator k2 or k3"),
    ({"critic": "none", "advantage": {"returns": "turn_gae"}}, {}, "agents.ann.algorithm.*'ann' has none"),
    (GROUPS | {"critic": "head"}, {}, "agents.ann.algorithm.critic: 'ann' reads no critic's values"),
    (GROUPS | {"advantage": GROUPS["advantage"] | {"key": ["prompt", "rollout", "agent"]}}, {}, "has a single member"),
    (GROUPS, {"training": {"critic": "central", "per_device_train_batch_size": 4}},
     "training.critic: 'central' is one critic of bob and ann, and ann reads no values"),
    ({"value_learning_rate": 0.1}, {"training": {"critic": "central", "per_device_train_batch_size": 4}},
     "'central' is one critic, but 'ann' and 'bob' differ in value_learning_rate: 0.1 and None"),
    ({"ppo": {"num_mini_batches": 3}}, {}, "agents.ann.algorithm.ppo.num_mini_batches: 3 does not divide the 4 questions"),
    ({"critic": "none"}, {"ann": {"critic": "head"}}, "agents.ann.critic: 'head' and algorithm.critic: 'none' differ"),
    ({"ppo": {"kl_coef": 0.2}}, {"ann": {"policy": "p"}, "bob": {"policy": "p"}},
     "'ann' and 'bob' share policy 'p' but differ in kl_coef: 0.2 and None"),
    ({"ppo": {"value_loss": "hl_gauss"}}, {"reward": {"sources": {"label": 1.0, "length": 1.0}}}, "value_range: hl_gauss"),
    ({"ppo": {"lam": 0.5}}, {"advantage": {"returns": "token_chain_gae"}},
     "ppo.lam: returns token_chain_gae runs through the answers of ann and bob, which have 0.5 and 0.95"),
    ({"lr_scheduler_type": "sometimes"}, {}, "agents.ann.algorithm.lr_scheduler_type: unknown 'sometimes'"),
    ({"ppo": {"objective": "grpo"}}, {}, "^agents.ann.algorithm.ppo.objective: unknown 'grpo'"),
    ({"advantage": {"key": ["prompt", "agnt"]}}, {}, "agents.ann.algorithm.advantage.key: names the column 'agnt'"),
    ({}, {"ann": {"advantage": {}}}, "unknown key 'agents.ann.advantage'; did you mean 'algorithm.advantage'"),
    ({"critic_warmup": 9}, {}, "agents.ann.algorithm.critic_warmup: only the critics would learn in all 3 updates"),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "changes", "told"), REFUSED)
def test_what_cannot_be_learned_by_is_refused_before_models_load(tmp_path, algorithm, changes, told):
    agents = {"ann": {"algorithm": algorithm, **changes.get("ann", {})}, "bob": changes.get("bob", {})}
    with pytest.raises((ConfigError, ValueError), match=told):
        check_run(settings_of(tmp_path, **agents, **{k: v for k, v in changes.items() if k not in agents}))


def test_agents_may_differ_in_lambda_where_returns_run_through_their_own_tokens(tmp_path):
    told = check_run(
        settings_of(tmp_path, {"algorithm": {"ppo": {"lam": 0.5}}}, advantage={"returns": "token_agent_gae"})
    )
    assert any("of its own: lam 0.5" in line for line in told)


def test_an_option_that_the_learners_of_one_algorithm_do_not_read_is_told_where_it_stands(tmp_path):
    ann, bob = ({"algorithm": GROUPS | {"ppo": GROUPS["ppo"] | {"vf_coef": 0.3}}}, {"algorithm": {"ppo": {"lam": 0.5}}})
    said = check_run(settings_of(tmp_path, ann, bob, ppo={"cliprange_value": 0.4}))
    unread = [line for line in said if "nothing reads it" in line]
    assert unread == ["warning: agents.ann.algorithm.ppo.vf_coef: it is set, and nothing reads it: no policy has a critic; "
                      "remove it"]  # fmt: skip


LOOP = {"loop": {"rounds": 1, "stages": [{"train": "sft", "build": {"threshold": {"above": 0.5}}}]}}


@pytest.mark.parametrize(
    ("section", "sections", "why"),
    [({"trainable": False}, {}, "ann is not trained"), ({}, LOOP, "no stage of the loop trains by ppo")],
)
def test_an_algorithm_that_nothing_learns_by_is_told(tmp_path, section, sections, why):
    sections = {"training": {"per_device_train_batch_size": 4, "use_cpu": True, "save_steps": 0}} | sections
    told = check_run(settings_of(tmp_path, section | {"algorithm": GROUPS}, **sections))
    assert f"warning: agents.ann.algorithm: it is set, and nothing reads it: {why}; remove it" in told


def test_a_tiny_version_keeps_the_algorithms_with_smaller_sizes(tmp_path):
    file = tmp_path / "team.yaml"
    own = "{extends: vapo, ppo: {num_mini_batches: 16}, critic_warmup: 50, warmup_steps: 10}"
    file.write_text(
        "task: {name: toy_sum}\nprotocol: {name: debate}\nagent_defaults: {algorithm: {ppo: {lam: 0.5}}}\n"
        f"agents: {{ann: {{algorithm: {own}}}, bob: {{}}}}\n"
    )
    agents = parse_config(tiny_version(str(file), str(tmp_path))).agents
    ann = agents["ann"].algorithm
    assert agents["bob"].algorithm == Algorithm(ppo={"lam": 0.5})
    assert (ann.ppo["num_mini_batches"], ann.ppo["lam"], ann.critic_warmup) == (2, 0.5, 1)
    assert (ann.learning_rate, ann.warmup_steps, ann.value_learning_rate) == (None, None, 2e-6)
    assert ann.ppo["lam_alpha"] == pytest.approx(0.05 * 512 / 6)


def test_the_run_says_of_each_policy_what_it_learns_by(tmp_path):
    trainer = build_trainer(settings_of(tmp_path, {"algorithm": CRITIC}, {"algorithm": GROUPS}), quiet=True)
    policies = [line for line in trainer.learns_from if line.startswith("policy ")]
    assert [line.split(":")[0] for line in policies] == ["policy ann", "policy bob"]
    assert policies[0].endswith("; of its own: num_ppo_epochs 3, num_mini_batches 2, cliprange 0.1, lam 0.9")
    told = check_run(trainer.record.config)
    assert [line for line in told if line.startswith("policy ")] == policies


def test_an_algorithm_of_a_recipe_is_what_a_policy_can_have_of_it(tmp_path, capsys):
    file = tmp_path / "team.yaml"
    file.write_text(
        "output_dir: x\ntask: {name: toy_sum}\nagents: {ann: {tiny: {}, algorithm: {extends: dr_mas, ppo: {kl_coef: 0.3}}}}\n"
    )
    algorithm = parse_config(read_values(file)).agents["ann"].algorithm
    assert algorithm.advantage["key"] == ("prompt", "agent") and algorithm.ppo["kl_coef"] == 0.3
    assert algorithm.of_learner == {"learning_rate": 1e-6, "lr_scheduler_type": "constant"}
    assert (
        "what recipe dr_mas says of the whole run is not taken: ppo.response_length, ppo.temp"
        in capsys.readouterr().err
    )
    with pytest.raises(ConfigError, match=r"agents.ann.algorithm.extends: as a recipe unknown 'dr_mass'; did you mean"):
        read_values(file, ["agents.ann.algorithm.extends=dr_mass"])


def test_agents_of_a_program_have_algorithms_too(tmp_path):
    tokenizer = build_tiny_tokenizer(TINY)

    def agent(name, **options):
        torch.manual_seed(0)
        return Agent(name, build_tiny_model(TINY, tokenizer), tokenizer, **options)

    own = Algorithm(advantage=AdvantageConfig(baseline="none"), ppo={"lam": 0.5}, critic="none")
    assert own.advantage["returns"] == "token_gae" and own.of_policy == {"lam": 0.5, "critic": "none"}
    team = Team([agent("ann", algorithm=own), agent("bob", learning_rate=1e-3)])
    assert team.policies["bob"].algorithm.of_policy == {"learning_rate": 1e-3}
    team.save(tmp_path / "team")
    again = Team.from_pretrained(tmp_path / "team")
    assert {n: p.algorithm.of_policy for n, p in again.policies.items()} == {
        n: p.algorithm.of_policy for n, p in team.policies.items()
    }
    assert again.agents["ann"].learns_by.advantage == own.advantage
    saved = tmp_path / "team/config.yaml"
    saved.write_text(saved.read_text().replace("algorithm:\n", "algorithm:\n      extends: grpo\n", 1))
    with pytest.raises(ConfigError, match=r"agents.ann.algorithm.extends='grpo': the configuration of .* is whole"):
        Team.from_pretrained(tmp_path / "team")
    with pytest.raises(ValueError, match=r"agent 'ann': algorithm: expected an Algorithm, got {'critic': 'none'}"):
        Team([agent("ann", algorithm={"critic": "none"})])
    with pytest.raises(ValueError, match=r"agent 'bob': speaks with the weights of ann \(policy 'p'\) and learns by"):
        Team([agent("ann", policy="p"), agent("bob", policy="p", algorithm=own)])
    with pytest.raises(ValueError, match=r"temperature: belongs to no single policy"):
        Algorithm(ppo={"temperature": 1.0})


def test_the_hinter_and_the_guesser_of_the_example_learn_as_their_file_says(tmp_path):
    changes = [f"output_dir={tmp_path}/run", "updates=1", "warm_start.steps=0", "evaluation.questions=0"]
    trainer = build_trainer(load(str(ROOT / "examples/hint_and_guess/mixed.yaml"), changes), quiet=True)
    assert [trainer.learners[name].critic.kind for name in ("hinter", "guesser")] == ["head", "none"]
    answers, _, _ = one_update(trainer)
    assert len(answers) == 128 and {u.agent for one in answers for u in one.utterances} <= {"hinter", "guesser"}
    steps = [{float(s["step"]) for s in learner.optimizer.state.values()} for learner in trainer.learners.values()]
    assert all(step == {float(count)} for step, count in zip(steps, (4, 1), strict=True) if step)


def test_the_game_of_the_example_pays_what_is_left_of_the_guesses():
    sys.path.insert(0, str(ROOT / "examples/hint_and_guess"))
    game = importlib.import_module("hint_and_guess").HintAndGuess()
    game.reset(random.Random(0))
    assert game.observe(0) == "4" and game.step({0: "b"}) == {} and game.to_move() == (1,)
    paid = {}
    for guess in ("456", "146", "564", "123"):
        game.guesses = None
        paid[guess] = game.step({1: guess}), game.success(1)
    third = pytest.approx(1 / 3)
    assert paid == {
        "456": ({0: 1.0, 1: 1.0}, True), "146": ({0: 2 / 3, 1: 2 / 3}, False), "564": ({0: third, 1: third}, False),
        "123": ({0: 0.0, 1: 0.0}, False),
    }  # fmt: skip
    assert all("2" in guess for guess in game.taught(1)) and len(game.taught(1)) == 60 and len(game.moves(1)) == 120


def test_a_resumed_run_has_the_algorithms_of_its_checkpoint(tmp_path):
    def settings(bob, updates=2):
        training = {"per_device_train_batch_size": 4, "use_cpu": True, "save_steps": 1}
        return settings_of(tmp_path, bob={"algorithm": bob}, training=training, updates=updates)

    build_trainer(settings(GROUPS, 1), quiet=True).train()
    for changed, told in (
        (GROUPS | {"ppo": GROUPS["ppo"] | {"entropy_coef": 0.1}}, r"'entropy_coef': 0.1"),
        (GROUPS | {"advantage": GROUPS["advantage"] | {"scale": "none"}}, r"'scale': 'none'"),
        ({}, r"algorithms was \{'bob': .* and is \{\}"),
    ):
        with pytest.raises(CheckpointError, match=f"was made with other options .*{told}"):
            build_trainer(settings(changed), quiet=True).train(resume_from_checkpoint=True)
    trainer = build_trainer(settings(GROUPS), quiet=True)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2
