"""What must not change a credit or an advantage, for every recipe, on random games and dialogues.

Equal moves in equal states earn equal advantages. The order of dialogues, of agents and of rollouts decides nothing. A
batch may be cut over processes. One agent has the advantages of the single-agent method. While nothing is learned, the
probability ratio is 1, and the KL to a reference that is the policy is 0. Recipes that differ are named with a reason.
"""

import copy
import random
from collections import defaultdict

import pytest
from invariant_runs import (
    alike_words,
    by_words,
    guess,
    one_update,
    place_of,
    random_words,
    renumbered,
    shuffled,
    telling,
    update_of,
    values_of,
)
from scripted_training import recipe_values, sampled, scripted_trainer

from maporl.config.parse import read_yaml
from maporl.config.recipes import recipe_file, recipe_files
from maporl.loops.plan import stages_of
from maporl.loops.section import PolicyStage
from maporl.rewards.rules import RULES, build_rules
from maporl.rollout.branching import BRANCHINGS
from maporl.storage.run_folder import RunFolder
from maporl.training.samples import names_of
from maporl.types import Dialogue, Example, Grade, Utterance
from maporl.validation.load import from_dict

LOOPS = [name for name in recipe_files() if "loop" in read_yaml(recipe_file(name))]
TRAINED = [name for name in recipe_files() if name not in LOOPS]
QUICK = ("marti_margin", "gigpo", "malt")
"""A debate with a rule between turns, a game with groups of states, and a loop."""


def each(names):
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


def close(one, other):
    return one == pytest.approx(other, abs=3e-5)


def trained_alike(one, other):
    """Whether both are trained on with the same advantages and returns and the same weight, or neither is."""
    if one is None or other is None:
        return one is other
    return one[0] == other[0] and all(close(mine, its) for mine, its in zip(one[1:], other[1:], strict=True))


def must_be_the_same(one, other):
    """Check that two updates credit the same words with the same rewards, and train on them with the same numbers."""
    assert one.said == other.said
    changed = [place for place in one.said if not close(one.rewards[place], other.rewards[place])]
    assert not changed, [(place, one.rewards[place], other.rewards[place]) for place in changed[:3]]
    changed = [place for place in one.said if not trained_alike(one.rows[place], other.rows[place])]
    assert not changed, [(place, one.rows[place], other.rows[place]) for place in changed[:3]]
    assert one.teaches()


# -- equal moves in equal states --------------------------------------------------------------------------------------

UNEQUAL = {
    "arenarl": "ranks of a tournament are strict, so equal answers do not earn the same",
    "spiral": "read before it is updated",
    "spiral_textarena": "read before it is updated",
}
"""Recipes in which equal moves in equal states earn different advantages, and why."""


def words_of(utterances):
    return tuple((u.agent, u.turn, u.part, tuple(u.prompt_ids), u.text) for u in utterances)


def equals(found, final, apart):
    """Yield the places of utterances that say the same after the same words and before the same words.

    What follows an utterance is what follows it in all dialogues that share it, and in their ablations. With ``final``
    nothing that follows can change what it earned. With ``apart`` each utterance that was sampled is a state of its
    own.
    """
    follows = defaultdict(list)
    for dialogue in found.dialogues:
        ablated = sorted(words_of(ablation.utterances) for ablation in dialogue.ablations)
        for u in dialogue.utterances:
            follows[names_of(dialogue)[u.id]].append((words_of(dialogue.utterances), ablated))
    groups = defaultdict(dict)
    for dialogue in found.dialogues:
        for u in dialogue.utterances:
            name, before = names_of(dialogue)[u.id], [v for v in dialogue.utterances if v.order < u.order]
            step = [v for v in dialogue.utterances if v.order == u.order]
            state = (dialogue.prompt, u.agent, u.turn, u.part, words_of([*before, *step]))
            after = () if final else tuple(map(repr, sorted(follows[name])))
            sampled_before = tuple(names_of(dialogue)[v.id] for v in before) if apart else ()
            groups[state, after, sampled_before][name] = place_of(dialogue, u)
    for places in groups.values():
        first, *others = places.values()
        for place in others:
            yield first, place


@pytest.mark.parametrize("name", each(TRAINED))
def test_equal_moves_in_equal_states_earn_equal_advantages(name, tmp_path):
    values = values_of(name, tmp_path)
    section = values.setdefault("branching", {})
    if section.get("group", 1) == 1:
        section["group"] = 3
    final = BRANCHINGS[section.get("how", "independent")].final
    apart = "parent" in values.get("advantage", {}).get("key", ())
    pairs, unequal = 0, []
    for seed in range(2):
        for turn in range(2):
            found = one_update(values, alike_words(seed, turn, 3 if "ablate" in section else 99), key=by_words)
            for one, other in equals(found, final, apart):
                pairs += 1
                paid = close(found.rewards[one], found.rewards[other])
                if not paid or not trained_alike(found.rows[one], found.rows[other]):
                    unequal.append([(p, found.rewards[p], found.rows[p]) for p in (one, other)])
    assert pairs > 0
    assert bool(unequal) == (name in UNEQUAL), unequal[:1]


# -- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", each(TRAINED))
def test_the_order_of_dialogues_decides_nothing(name, tmp_path):
    values = values_of(name, tmp_path)
    script, plain = telling(values, 3)
    must_be_the_same(plain, one_update(values, script, shuffled(1)))


NUMBERED = {
    "arenarl": "The first answer meets all others",
    "spiral": "read before it is updated",
    "spiral_textarena": "read before it is updated",
}
"""Recipes in which the numbers of rollouts matter, and why."""


@pytest.mark.parametrize("name", each(TRAINED))
def test_the_numbers_of_rollouts_decide_nothing(name, tmp_path):
    values = values_of(name, tmp_path)
    if name in NUMBERED:
        values.setdefault("branching", {}).setdefault("group", 3)
    differ = []
    for seed in range(3 if name in NUMBERED else 1):
        script, plain = telling(values, 8 * seed)
        try:
            must_be_the_same(plain, one_update(values, script, renumbered(seed)))
        except AssertionError as error:
            differ.append(error)
    assert bool(differ) == (name in NUMBERED), differ[:1]


@pytest.mark.parametrize("name", each(TRAINED))
def test_the_order_in_which_agents_are_declared_decides_nothing(name, tmp_path):
    """Who speaks when is said by the protocol."""
    values = values_of(name, tmp_path)
    script, plain = telling(values, 4)
    values["protocol"].setdefault("agents", list(values["agents"]))
    values["agents"] = dict(reversed(values["agents"].items()))
    must_be_the_same(plain, one_update(values, script))


@pytest.mark.parametrize("name", each(TRAINED))
def test_of_agents_that_speak_at_once_nobody_is_first(name, tmp_path):
    values = values_of(name, tmp_path)
    order = values["protocol"].get("agents", list(values["agents"]))
    if values["protocol"]["name"] != "debate" or len(order) < 2:
        pytest.skip("no agents that speak at once")
    script, plain = telling(values, 5)
    values["protocol"]["agents"] = order[::-1]
    must_be_the_same(plain, one_update(values, script))


IN_TURN = {
    "public_goods": "who speaks later earns more",
    "tree_margin": "what an utterance followed is one utterance",
    "tournament": "matches are between the last answers of one agent",
    "consistency": "a question teaches by its last judged utterance",
}
"""Rules for agents that speak one after the other, and why."""
NEEDED = {
    "complement": {"roles": ["thinker"]}, "gate": {"order": ["format", "label"]}, "mix": {"weights": {"label": 0.5}},
    "potential": {"of": "label"}, "redistribute": {"by": "label"}, "tier": {"proximity": "label"},
}  # fmt: skip
"""Options that rules do not have by default."""


def debates(seed, agents):
    """Random debates on one question, and the score of each answer. They depend on ``seed`` and not on the order of
    ``agents``, some of whom say nothing at times, or nothing that can be scored."""
    found, credits = [], []
    for rollout in range(3):
        said, credit = [], {}
        for turn in range(2):
            shown = tuple(u.id for u in said)
            for agent in agents:
                own = random.Random(f"{seed} {rollout} {turn} {agent}")
                score, scored, speaks = own.choice([0.0, 0.25, 0.5, 1.0]), own.random() < 0.85, own.random() < 0.85
                if speaks:
                    u = Utterance(
                        len(said),
                        agent,
                        agent,
                        turn,
                        turn,
                        [],
                        "x",
                        parents=shown,
                        response_ids=[1] * own.randint(1, 5),
                    )
                    u.rewards, u.grade = {"label": score, "format": 1.0, "score": score}, Grade("x", score > 0.4, "")
                    said.append(u)
                    credit |= {u.id: score} if scored else {}
        found.append(Dialogue(Example("e", "q", "a"), said, rollout=rollout))
        credits.append(credit)
    return found, credits


@pytest.mark.parametrize("name", RULES)
def test_a_rule_pays_agents_that_speak_at_once_whatever_their_order(name):
    (rule,) = build_rules([{name: NEEDED[name]} if name in NEEDED else name])
    changed = 0
    for seed in range(40):
        paid = []
        for agents in (("ann", "bob", "cy"), ("cy", "bob", "ann")):
            dialogues, credits = debates(seed, agents)
            credits = rule(dialogues, credits)
            places = [(n, d.utterances[i], pay) for n, d in enumerate(dialogues) for i, pay in credits[n].items()]
            paid.append({(n, u.agent, u.turn): pay for n, u, pay in places})
        changed += not close(*paid)
    assert bool(changed) == (name in IN_TURN)


# -- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", each(TRAINED))
def test_a_batch_may_be_cut_over_two_or_four_processes(name, tmp_path):
    values = values_of(name, tmp_path)
    script, whole = telling(values, 6)
    for count in (2, 4):
        must_be_the_same(whole, update_of(count, values, script))


# -- one agent --------------------------------------------------------------------------------------------------------

TWO_AGENTS = {
    "advantage_alignment": "times the other agent's advantage",
    "salt": "equal moves in equal states get the mean",
}
"""Recipes whose advantages need more than one agent that speaks once, and why."""


def spread(values, weights, ddof):
    """The weighted standard deviation of ``values``."""
    mean = sum(w * v for v, w in zip(values, weights, strict=True)) / sum(weights)
    squares = sum(w * (v - mean) ** 2 for v, w in zip(values, weights, strict=True))
    return (squares / (sum(weights) - ddof)) ** 0.5


def centred(values, weights=None, ddof=0, eps=1e-6):
    """``values`` minus their mean, divided by their standard deviation: 0 where all are equal."""
    weights = weights or [1.0] * len(values)
    mean = sum(w * v for v, w in zip(values, weights, strict=True)) / sum(weights)
    if max(values) == min(values):
        return [0.0] * len(values)
    return [(v - mean) / (spread(values, weights, ddof) + eps) for v in values]


def gae(rewards, values, gamma, lam):
    """GAE over the tokens of one answer."""
    advantages, later, value = [], 0.0, 0.0
    for reward, now in zip(reversed(rewards), reversed(values), strict=True):
        later = reward + gamma * value - now + gamma * lam * later
        advantages.append(later)
        value = now
    return advantages[::-1]


def single_agent(config, ppo, answers):
    """The advantages of each token by the method for one agent that answers once: GRPO, RLOO, REINFORCE(++), Lite PPO
    or PPO.

    ``answers`` has of each answer its question, its reward, and of each token the critic's value and the KL.
    """
    rewards, ddof, eps = [reward for _, reward, _, _ in answers], config.ddof, config.eps
    lengths = [float(len(values)) for _, _, values, _ in answers]
    everyone = list(range(len(answers)))
    questions = [[i for i in everyone if answers[i][0] == q] for q in dict.fromkeys(a[0] for a in answers)]
    groups = questions if "prompt" in config.key or "seed" in config.key else [everyone]
    if config.returns in ("token_gae", "token_chain_gae", "token_agent_gae", "bi_level_gae"):
        paid = [[0.0] * (len(values) - 1) + [reward] for _, reward, values, _ in answers]
        tokens = [gae(own, a[2], ppo.gamma, ppo.lam) for own, a in zip(paid, answers, strict=True)]
        if config.scale == "none":
            return tokens
        whitened = iter(centred([value for own in tokens for value in own], ddof=1, eps=0))
        return [[next(whitened) for _ in own] for own in tokens]
    found = list(rewards)
    if "cumulative_kl" in str(config.post):
        tokens = [[r - ppo.kl_coef * sum(kl[place:]) for place in range(len(kl))] for _, r, _, kl in answers]
        whitened = iter(centred([value for own in tokens for value in own], ddof=ddof, eps=0))
        return [[next(whitened) for _ in own] for own in tokens]
    if config.baseline == "critic":
        found = [reward - values[0] for _, reward, values, _ in answers]
        groups = [everyone]
    for group in groups:
        own = [rewards[i] for i in group]
        others = [(sum(own) - r) / (len(own) - 1) if len(own) > 1 else 0.0 for r in own]
        for i, r, other in zip(group, own, others, strict=True):
            if config.baseline == "mean":
                found[i] = r - sum(own) / len(own)
            elif config.baseline == "loo":
                found[i] = r - other
            elif config.baseline == "assisted":
                expected = [answers[j][2][-1] for j in group if j != i]
                found[i] = r - (1 - config.alpha) * other - config.alpha * sum(expected) / len(expected)
    if config.baseline == "ema":
        mean = 0.0
        for i in everyone:  # each answer reads the running mean before it moves it
            found[i], mean = rewards[i] - mean, config.ema * mean + (1 - config.ema) * rewards[i]
    for group in groups if config.scale in ("std", "token_std") else []:
        weights = [lengths[i] for i in group] if config.scale == "token_std" else [1.0] * len(group)
        own = [rewards[i] if config.baseline in ("mean", "loo") else found[i] for i in group]
        equal = config.baseline == "assisted" and len({rewards[i] for i in group}) == 1
        for i, value in zip(group, [0.0] * len(group) if equal else centred(own, weights, ddof, eps), strict=True):
            found[i] = value
    if config.scale == "raw_std":
        found = [value / (spread(rewards, [1.0] * len(rewards), ddof) + eps) for value in found]
    if "whiten" in str(config.post):
        weights = lengths if "tokens" in str(config.post) else None
        found = centred(found, weights, ddof, eps)
    return [[value] * int(length) for value, length in zip(found, lengths, strict=True)]


@pytest.mark.parametrize("name", each([name for name in TRAINED if name not in TWO_AGENTS]))
def test_one_agent_that_answers_once_has_the_advantages_of_the_single_agent_method(name, tmp_path):
    own = values_of(name, tmp_path)
    section = copy.deepcopy(own.get("advantage", {}))
    as_question = {"seed": "prompt", "state": "prompt", "parent": "prompt", "caller": "prompt", "role": "agent"}
    for part in (section, *section.get("plus", ())):
        if "key" in part:
            kept = [as_question.get(old, old) for old in part["key"] if old not in ("game", "task", "order")]
            part["key"] = list(dict.fromkeys(kept))
    # nobody is called, and what is left out has no advantages to compare
    unlike = ("broadcast_to_callees", "drop_groups")
    section["post"] = [entry for entry in section.get("post", ()) if not any(word in str(entry) for word in unlike)]
    for number, entry in enumerate(section["post"]):
        if isinstance(entry, dict) and "whiten" in entry:
            section["post"][number] = {"whiten": entry["whiten"] | {"key": []}}
    section.pop("multi_objective_aggregation", None)  # there is one reward
    kl_coef = 0.05 if "cumulative_kl" in str(section.get("post")) else 0.0
    parts = {"training": {"save_steps": 0}, "evaluation": {"questions": 0}, "ppo": {"kl_coef": kl_coef}}
    values = recipe_values("grpo_single", tmp_path / "single", **parts) | {"advantage": section}
    values["ppo"] |= {k: v for k, v in own["ppo"].items() if k in ("gamma", "lam", "aggregation")}
    values["training"] |= {k: v for k, v in own["training"].items() if k == "critic"}
    trainer = scripted_trainer(values, random_words(7))
    guess(trainer, by_words)
    config = trainer.parts.advantage
    batch = trainer.advantage(trainer.score(trainer.collected()))
    tokens = batch.token_batches["solo"]
    answers, found = [], []
    for i, index in enumerate(tokens.sample.tolist()):
        mask, u = tokens.sampled_mask[i], batch.samples["solo"][index].utterance
        kl = (tokens.old_logprobs - tokens.ref_logprobs)[i][mask].tolist()
        prompt = batch.samples["solo"][index].columns.values["prompt"]
        answers.append((prompt, u.rewards["credit"], tokens.values[i][mask].tolist(), kl))
        found.append(tokens.advantages[i][mask].tolist())
    expected = single_agent(config, trainer.args, answers)
    plus = [single_agent(term.within(config), trainer.args, answers) for term in config.plus]
    for i, its in enumerate(expected):
        total = [sum(parts) for parts in zip(its, *(own[i] for own in plus), strict=True)]
        assert found[i] == pytest.approx(total, abs=2e-4), (i, answers[i][:2])
    assert len({round(value, 4) for own in found for value in own}) >= 2


# -- nothing learned --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", each(TRAINED))
def test_while_nothing_is_learned_the_ratio_is_1_and_the_kl_is_0(name, tmp_path):
    values = values_of(name, tmp_path) | {"updates": 2}
    values["training"] |= {"learning_rate": 0.0}
    values["ppo"] |= {"num_ppo_epochs": 2}
    if "cumulative_kl" not in str(values.get("advantage")):
        values["ppo"] |= {"kl_in": "loss", "kl_estimator": "k3", "kl_coef": 0.01}
    trainer = scripted_trainer(values, random_words(8))
    trainer.train()
    records = RunFolder(tmp_path / "run").read_metrics()
    found = defaultdict(list)
    for record in records:
        for key, value in record.items():
            found[key.partition("/")[2]].append(value)
    assert found["val/ratio"] and found["objective/kl_k3"]
    assert found["val/ratio"] == pytest.approx([1.0] * len(found["val/ratio"]), abs=1e-5)
    for key in ("objective/kl_k1", "objective/kl_k3", "policy/clipfrac_avg", "policy/approxkl_avg"):
        assert found[key] == pytest.approx([0.0] * len(found[key]), abs=1e-5), key


# -- loops ------------------------------------------------------------------------------------------------------------


def drawn_from(name, folder):
    """The builders of a loop's stages with their roles, and random dialogues with credits."""
    values = recipe_values(name, folder / "run") | {"evaluation": {"questions": 0}}
    config = from_dict(values, name)
    stages = [
        (section.roles if isinstance(section, PolicyStage) else (), builder)
        for section, builder in stages_of(config)
        if builder is not None
    ]
    return stages, sampled(values, folder, random_words(9))


@pytest.mark.parametrize("name", each(LOOPS))
def test_the_rows_of_a_loop_do_not_depend_on_the_order_of_dialogues(name, tmp_path):
    stages, dialogues = drawn_from(name, tmp_path)
    made = 0
    for roles, builder in stages:
        rows_made = builder(dialogues, roles)
        for seed in range(3):
            mixed = random.Random(seed).sample(dialogues, len(dialogues))
            assert list(builder(mixed, roles)) == list(rows_made)
        made += len(rows_made)
    assert made > 0
