"""Rewards and published numbers, from the dialogue to the advantage, as the recipes' and experiments' own files say."""

import string
from collections import Counter

import pytest
from fast_cases import some
from folders import ROOT
from scripted_training import played, recipe_values, rows, scripted_trainer

from maporl.config.parse import read_yaml
from maporl.errors import ConfigError
from maporl.methods.tiny_versions import tiny_version
from maporl.protocols import turns_of
from maporl.run import ResolvedRun
from maporl.team.memory import estimate
from maporl.validation.load import from_dict, load
from maporl.validation.preflight import check_run

# -- G-RA --------------------------------------------------------------------------------------------------------------

LENGTHS = (2, 8, 1, 9)
"""Of each rollout, the tokens of its answer with the one that ends it. Of ten tokens, brevity is .8 .2 .9 .1."""


def brief_or_not():
    """Return a script by which the first two rollouts of a question are right, and the others wrong."""
    rollouts: Counter[str] = Counter()

    def script(request):
        rollout = rollouts[request.example.id]
        rollouts[request.example.id] += 1
        length = LENGTHS[rollout] - 1
        return request.example.answer.rjust(length, "0") if rollout < 2 else "x" * length

    return script


def g_ra(folder, **reward):
    """Return the credit and the advantage of the four rollouts of a question, which are the same for all questions."""
    values = recipe_values("g_ra", folder, branching={"group": 4}, task={"largest": 4}, ppo={"response_length": 10})
    values["reward"] |= {"brevity": {"tokens": 10}} | reward
    found = {}
    for row in rows(played(scripted_trainer(values, brief_or_not()))):
        pair = (round(row.utterance.rewards["credit"], 6), round(row.advantage, 6))
        found.setdefault(len(row.utterance.response_ids), set()).add(pair)
    assert [len(found[length]) for length in LENGTHS] == [1] * 4
    return [pair for length in LENGTHS for pair in found[length]]


@pytest.mark.parametrize(
    ("reward", "credits", "advantages"),
    [
        ({}, [1.8, 1.2, 0, 0], [1.1667, 0.5, -0.8333, -0.8333]),
        ({"sources": {"label": 1.0, "brevity": 1.0}, "rules": ["own"]}, [1.8, 1.2, 0.9, 0.1], [1.1314, 0.2828, -0.1414, -1.2728]),
        ({"sources": {"label": 1.0}, "rules": ["own"]}, [1, 1, 0, 0], [0.8660, 0.8660, -0.8660, -0.8660]),
    ],
    ids=["gate", "sum", "label"],
)  # fmt: skip
def test_g_ra_gates_brevity_by_the_label(tmp_path, reward, credits, advantages):
    """The recipe's file, its sum without the gate, and the label alone: three different methods on its own task."""
    got = g_ra(tmp_path, **reward)
    assert [credit for credit, _ in got] == pytest.approx(credits)
    assert [advantage for _, advantage in got] == pytest.approx(advantages, abs=1e-4)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"rules": [{"gate": {"order": ["label", "format"]}}], "sources": {"label": 1, "format": 0}}, "'format' never varies behind 'label'"),
        ({"rules": [{"gate": {"order": ["f1", "format"]}}], "sources": {"f1": 1, "format": 0}}, "'format' never varies behind 'f1'"),
        ({"rules": [{"gate": {"order": ["label", "label"]}}]}, "'label' never varies behind 'label'"),
        ({"rules": [{"gate": {"order": []}}]}, "expected the names of rewards"),
        ({"rules": [{"gate": {"order": ["label", "brief"]}}]}, "gate reads the reward 'brief', which nothing gives here"),
        ({"rules": [{"mix": {"weights": {"callees/format": 0.1}}}]}, "mix reads the reward 'format', which nothing gives"),
        ({"rules": ["inherit"]}, "inherit needs callers, but protocol 'debate' records no callers"),
        ({"sources": {"label": 1, "brevity": 0}, "brevity": None}, r"reward.brevity: the source 'brevity' needs it; for example"),
    ],
)  # fmt: skip
def test_a_lower_reward_that_cannot_act_is_refused(tmp_path, reward, message):
    values = tiny_version("g_ra", str(tmp_path))
    values["reward"] = {"sources": {"label": 1.0}, "rules": ["own"], **reward}
    with pytest.raises(ConfigError, match=message):
        from_dict(values)


def test_behind_an_open_gate_the_lower_reward_varies(tmp_path):
    """Below a negative threshold a wrong answer passes too, so the form of the answer does vary."""
    values = tiny_version("g_ra", str(tmp_path))
    values["reward"] |= {"sources": {"label": 1, "format": 0}, "rules": [{"gate": {"order": ["label", "format"], "threshold": -1}}]}  # fmt: skip
    assert from_dict(values).reward.rules == ({"gate": {"order": ["label", "format"], "threshold": -1}},)


# -- MAPoRL's numbers --------------------------------------------------------------------------------------------------

CONFIGS = ROOT / "configs" / "ppo"
PUBLISHED = {
    "ppo.kl_coef": 0.002, "ppo.vf_coef": 0.1, "ppo.num_ppo_epochs": 4, "ppo.num_mini_batches": 8, "ppo.cliprange": 0.2,
    "ppo.gamma": 1.0, "ppo.lam": 0.95, "ppo.response_length": 300, "ppo.temperature": 0.7,
    "training.learning_rate": 1e-5, "training.max_grad_norm": 0.0, "questions": 256, "updates": 50,
    "reward.horizon": "discounted_sum", "reward.share": "all", "reward.discount": 0.3, "reward.bonus": None,
    "lora": [(8, 16)], "policy_per": ["first_and_rest"], "policy": ["team"], "schedule.train_first_turn": False,
    "schedule.preset": "all_turns", "agents": 2, "turns": 3,
}  # fmt: skip
ONES = [1.0, 1.0, 1.0, 1.0]
EXPERIMENTS = {
    # two turns, labels alone: 4 passes of one minibatch of 32 questions; the alphas of later turns have no later turn
    "2x2_label": {"turns": 2, "ppo.num_mini_batches": 1, "questions": 32, "updates": 400, "reward.bonus.alpha": [1.0, 1.0, 0.0, 0.0]},
    "2x3": {},
    "2x3_turnwise": {"policy_per": ["turn"], "schedule.preset": "one_turn_at_a_time", "updates": 100},
    "3x3_verifier": {"agents": 3, "reward.bonus.alpha": ONES},
    "hetero": {"turns": 2, "policy": ["one", "two"]},
    "hetero_llama": {"turns": 2, "policy": ["one", "two"]},
}  # fmt: skip


def numbers(config, keys):
    """Return the values of ``keys`` in a configuration: paths into it, or one of the sums below."""
    agents = list(config.agents.values())
    found = {
        "questions": config.questions_per_update(), "agents": len(agents), "turns": turns_of(config),
        "lora": sorted({(a.lora.r, a.lora.alpha) for a in agents}),
        **{key: sorted({getattr(a, key) for a in agents}) for key in ("policy", "policy_per")},
    }  # fmt: skip
    for key in keys - found.keys():
        value = config
        for part in key.split("."):
            value = getattr(value, part)
        found[key] = value
    return {key: found[key] for key in keys}


def published(changes):
    """Return the published numbers with an experiment's own."""
    table = PUBLISHED | changes
    if "reward.bonus.alpha" in changes:
        del table["reward.bonus"]
    return table


@pytest.mark.parametrize("name", [*(f"gsm8k_{name}" for name in EXPERIMENTS), "anli_3x3"])
def test_the_experiments_have_the_published_numbers(name):
    expected = published(EXPERIMENTS.get(name.removeprefix("gsm8k_"), {"agents": 3}))
    assert numbers(load(CONFIGS / f"maporl_{name}.yaml"), expected.keys()) == expected


def test_the_recipe_maporl_has_the_published_numbers():
    expected = published({"agents": 3, "updates": 200})
    assert numbers(load("maporl"), expected.keys()) == expected


def maporl_label(folder, **changes):
    """Return the values of the label experiment with tiny models and sums; sizes apart, they are the file's own."""
    values = read_yaml(CONFIGS / "maporl_gsm8k_2x2_label.yaml")
    tiny = {"hidden_size": 32, "layers": 1, "heads": 2, "context": 4096, "alphabet": string.printable[:95] + "\n"}
    values["agent_defaults"] = {k: values["agent_defaults"][k] for k in ("policy", "policy_per", "lora")} | {
        "tiny": tiny
    }
    values["ppo"]["response_length"] = values["reward"]["penalties"]["min_tokens"] = 6
    values["training"] |= {"gradient_accumulation_steps": 1, "use_cpu": True, "save_steps": 0}
    values |= {"task": {"name": "toy_sum", "largest": 9}, "updates": 1, "output_dir": str(folder / "run")}
    return values | {"evaluation": {"questions": 0}} | changes


def persuaded(request):
    """One agent is right from the start, and the other after it has read that."""
    wrong = str(int(request.example.answer) + 1)
    return wrong if request.ask.agent == "two" and request.turn == 0 else request.example.answer


def test_the_label_experiment_trains_turn_2_alone(tmp_path):
    trainer = scripted_trainer(maporl_label(tmp_path), persuaded)
    found = rows(played(trainer))
    assert {(row.policy, row.utterance.turn) for row in found} == {("team-rest", 1)} and len(found) == 8
    credit = {row.utterance.agent: row.utterance.rewards["credit"] for row in found}
    # 1 for a right answer and alpha1 for being persuaded by the right majority; the answers are shorter than 6 tokens
    assert credit == pytest.approx({"one": 1 - 0.1, "two": 1 + 1 - 0.1})


@pytest.mark.slow
def test_the_first_turns_weights_are_the_same_bit_by_bit_after_an_update(tmp_path):
    trainer = scripted_trainer(maporl_label(tmp_path), persuaded)

    def weights(policy):
        return {name: w.detach().clone() for name, w in trainer.team.policies[policy].model.named_parameters()}

    before = {policy: weights(policy) for policy in ("team-first", "team-rest")}
    trainer.train()
    assert trainer.state.global_step == 1
    moved = {policy: {n for n, w in weights(policy).items() if not w.equal(before[policy][n])} for policy in before}
    assert moved["team-first"] == set() and any("lora_A" in name for name in moved["team-rest"])
    assert any("lora_A" in name for name in before["team-first"])


def test_maporl_trains_the_debate_and_credits_a_turn_with_what_follows(tmp_path):
    """The recipe's file: cy is right in turn 2 alone, ann and bob are always right.

    Turn 2 of ann: (1 + .3 x 2/3) / 1.3, of cy the same; turn 3: their own scores.
    """

    def script(request):
        wrong = request.ask.agent == "cy" and request.turn != 1
        return str(int(request.example.answer) + wrong)

    found = rows(played(scripted_trainer(recipe_values("maporl", tmp_path), script)))
    assert {row.policy for row in found} == {"team-rest"}
    credits = {(row.utterance.agent, row.utterance.turn): row.utterance.rewards["credit"] for row in found}
    expected = {("ann", 2): 1.0, ("bob", 2): 1.0, ("cy", 2): 0.0} | dict.fromkeys(
        [("ann", 1), ("bob", 1), ("cy", 1)], 1.2 / 1.3
    )
    assert credits == pytest.approx(expected)


# -- what maporl check counts ------------------------------------------------------------------------------------------

COUNTED = [
    # (branching, dialogues of a question in a debate of two agents and two turns)
    ({}, 1),
    ({"group": 3}, 3),
    ({"how": "fork_first", "group": 3}, 3),
    ({"how": "fork_random", "group": 3}, 3),
    ({"how": "fork_every", "group": 3}, 9),
    ({"how": "fork_every", "group": 2, "joint": "cross"}, 16),
    ({"how": "tree", "group": 3}, 5),
    ({"how": "best_of", "group": 3, "drafts": 2}, 3),
]


@pytest.mark.parametrize(("branching", "dialogues"), some(COUNTED, 1, 4, 5, 6))
def test_check_counts_the_dialogues_that_an_update_plays(tmp_path, branching, dialogues):
    advantage = {"returns": "utterance", "baseline": "mean", "scale": "none", "key": [], "singleton": "zero"}
    values = recipe_values("grpo", tmp_path) | {"branching": branching, "advantage": advantage}
    config = from_dict(values)
    (line,) = (line for line in check_run(config) if line.startswith("run:"))
    condition = ", if a dialogue takes 2 steps" if branching.get("how") in ("fork_every", "tree") else ""
    told = f", {dialogues} dialogues for each ({4 * dialogues} in an update{condition})"
    assert line == f"run: 3 updates of 4 questions{told if dialogues > 1 else ''} into {tmp_path}"
    batch = scripted_trainer(values, lambda request: "1").collected()
    assert len(batch.dialogues) == 4 * dialogues


def test_the_memory_of_forwards_that_are_kept_depends_on_the_group(tmp_path):
    """All rows of an update fit one forward, which is kept for the step, only without a group."""
    values = recipe_values("grpo", tmp_path) | {"branching": {"group": 2}}
    values["training"]["gradient_checkpointing"] = False
    one, two = (estimate(ResolvedRun(from_dict(values)), 20, dialogues)["activations"] for dialogues in (1, 2))
    assert one == 2 * two, "the forwards of both policies are kept, or those of one at a time"


# -- what recipes pay and compare, by hand -----------------------------------------------------------------------------


def paid(name, folder, script, group):
    """Return {(rollout, agent, turn): (credit, advantage)} of a recipe's own file, on two questions that are alike.

    ``script(rollout, agent, turn)`` says how an agent answers: "right", "wrong", "near" (half as near as can be), or in
    its own words.
    """

    def said(request):
        rollout, right = int(request.label.rsplit(".", 1)[1]), int(request.example.answer)
        answers = {"right": str(right), "wrong": "100", "near": str(right + max(1, right))}
        words = script(rollout, request.ask.agent, request.turn)
        return answers.get(words, words)

    values = recipe_values(name, folder, questions=2)
    branching = values.get("branching", {})
    fans = branching.get("group")
    values["branching"] = branching | {"group": [min(fan, group) for fan in fans] if isinstance(fans, list) else group}
    return {
        (row.dialogue.rollout, row.utterance.agent, row.utterance.turn): (
            row.utterance.rewards["credit"],
            row.advantage,
        )
        for row in rows(played(scripted_trainer(values, said)))
    }


def right_in(*cells):
    """Return a script that is right in these cells (rollout, agent, turn) and wrong elsewhere."""
    return lambda *cell: "right" if cell in cells else "wrong"


def check_and_mend(rollout, agent, turn):
    """Rollout 0 is approved at once, rollout 2 after a correction, and rollout 1 never."""
    done = (rollout, turn) in ((0, 0), (2, 1))
    if agent == "verifier":
        return "<verify>approve</verify>" if done else "<verify>reject</verify>"
    return "right" if done else "wrong"


ONE_OF_THREE = [1.1547, -0.5774, -0.5774]
MARTI = right_in((0, "ann", 0), (0, "ann", 1), (1, "ann", 1), (2, "ann", 0), (2, "bob", 0))
"""Means of the first turn: .5, 0 and 1. ann is right in the first turn of rollouts 0 and 2, and in the second of 0 and
1."""


@pytest.mark.parametrize(
    ("name", "script", "expected"),
    [
        # the mean of a rollout's four answers: 1, 1/2, 0
        ("grpo", lambda r, a, t: ["right", "right" if t else "wrong", "wrong"][r], {(0, "ann", 0): 1.0, (0, "bob", 1): 1.0, (1, "ann", 0): 0.0, (1, "ann", 1): 0.0, (2, "bob", 0): -1.0}),
        # one right of three: 1 - 0, 0 - 1/2
        ("rloo", right_in((0, "ann", 0), (1, "bob", 1)), {(0, "ann", 0): 1.0, (1, "ann", 0): -0.5, (2, "ann", 0): -0.5, (1, "bob", 1): 1.0, (0, "bob", 0): 0.0}),
        # the collaborator earns what the frozen actor's last answer earns
        ("agentpo_hint", right_in((0, "actor", 0)), {(r, "collaborator", 0): ONE_OF_THREE[r] for r in range(3)}),
        ("agentpo_critique", right_in((0, "actor", 1)), {(r, "collaborator", 0): ONE_OF_THREE[r] for r in range(3)}),
        # solver 1 | 0 0 | 1 1, verifier 1 | 0 | 1
        ("dr_mas", check_and_mend, {(0, "solver", 0): 0.7303, (1, "solver", 1): -1.0954, (2, "solver", 0): 0.7303, (2, "solver", 1): 0.7303, (0, "verifier", 0): 0.5774, (1, "verifier", 0): -1.1547, (2, "verifier", 0): 0.5774}),
        # second turn 1 + .5 x .5, 1 + .5 x 1, 0 - .5 x 1
        ("marti_margin", MARTI, {(0, "ann", 0): 0.5774, (1, "ann", 0): -1.1547, (0, "ann", 1): 0.4588, (1, "ann", 1): 0.6882, (2, "ann", 1): -1.1471, (2, "bob", 0): 1.1547}),
        # second turn 1 + .5 x .5, 1 + .5 x 0, 0 - .5 x 0; first turn 1 0 1
        ("marti_quality", MARTI, {(0, "ann", 0): 0.5774, (1, "ann", 0): -1.1547, (2, "ann", 0): 0.5774, (0, "ann", 1): 0.7559, (1, "ann", 1): 0.378, (2, "ann", 1): -1.1339, (2, "bob", 0): 1.1547}),
        # 1 + .5, .5 x 2/4, and nothing for an answer without a number
        ("ssl", lambda r, a, t: ["right", "near", "x"][r], {(0, "ann", 0): 1.1407, (1, "ann", 0): -0.4148, (2, "ann", 0): -0.7259}),
        # 1.1, .1, 1.1, 1.1; the drafts are not trained on
        ("igrpo", right_in(*((r, "refiner", 0) for r in (0, 2, 3))), {(r, "refiner", 0): a for r, a in enumerate([0.5, -1.5, 0.5, 0.5])}),
    ],
)  # fmt: skip
def test_recipes_compare_what_their_cards_say(tmp_path, name, script, expected):
    group = 1 + max(rollout for rollout, _, _ in expected)
    found = {cell: advantage for cell, (_, advantage) in paid(name, tmp_path, script, group).items()}
    assert {cell: found[cell] for cell in expected} == pytest.approx(expected, abs=1e-4)
    assert {agent for _, agent, _ in found} == {agent for _, agent, _ in expected}, "those that learn"


def test_two_debaters_without_labels_are_paid_by_the_majority(tmp_path):
    """Four last answers are wrong and two right, so that the recipe debate_majority pays the wrong one."""
    said = {(0, "ann", 0): "right", (2, "ann", 1): "right", (2, "bob", 1): "right"}
    found = paid("debate_majority", tmp_path, lambda *cell: said.get(cell, "wrong"), 3)
    assert {cell: credit for cell, (credit, _) in found.items()} == {
        (r, agent, t): 0.0 if (r, agent, t) in said else 1.0
        for r in range(3)
        for agent in ("ann", "bob")
        for t in (0, 1)
    }
    ann, bob = {0.0: -1.2910, 1.0: 0.6455}, {0.0: -2.0412, 1.0: 0.4082}  # two of six, and one of six
    for (_, agent, _), (credit, advantage) in found.items():
        assert advantage == pytest.approx({"ann": ann, "bob": bob}[agent][credit], abs=1e-4)


def test_a_team_that_always_agrees_earns_everything_and_is_warned_of(tmp_path):
    """That is what debate_majority can collapse into: nothing moves it away any more."""
    found = paid("debate_majority", tmp_path, lambda *cell: "wrong", 3)
    assert set(found.values()) == {(1.0, 0.0)}
    warned = check_run(from_dict(tiny_version("debate_majority", str(tmp_path / "run"))))
    assert sum("majority pays agreement, right or wrong" in line for line in warned) == 1


@pytest.mark.parametrize(
    ("name", "script", "expected"),
    [
        # a right pioneer and a wrong observer have 1 in all
        ("cory", right_in((0, "pioneer", 0)), {(0, "pioneer", 0): 1.0, (0, "observer", 0): 1.0}),
        # a turn earns the team's mean in it
        ("iac", right_in((0, "ann", 0)), {(0, "ann", 0): 0.5, (0, "bob", 0): 0.5, (0, "ann", 1): 0.0, (0, "bob", 1): 0.0}),
        # efforts .5 1 1, S = 1: -.025 + .6, -.1 + .25 + .6, -.1 + .75 + .6
        ("mac_spgg", lambda r, a, t: "near" if a == "ann" else "right", {(0, "ann", 0): 0.575, (0, "bob", 0): 0.75, (0, "cy", 0): 1.25}),
        # the last answer of the second turn alone
        ("marft_token", right_in((0, "reasoner", 0), (0, "actor", 1)), {**{(0, a, t): 0.0 for a in ("reasoner", "critic", "actor") for t in (0, 1)}, (0, "actor", 1): 1.0}),
    ],
)  # fmt: skip
def test_recipes_with_a_critic_pay_what_their_cards_say(tmp_path, name, script, expected):
    found = paid(name, tmp_path, script, 1)
    assert {cell: credit for cell, (credit, _) in found.items()} == pytest.approx(expected)
