"""SAO and VAPO through the trainer's own steps: GAE that skips what others say, and the lambdas of both methods."""

import pytest
import torch
from scripted_dialogues import assigned
from scripted_training import played, recipe_values, scripted_trainer

from maporl.errors import ConfigError, refuse
from maporl.run import ResolvedRun
from maporl.training.check import unread
from maporl.validation.load import from_dict, load
from trl_ext.ppo.advantages import token_rewards


def answering(request):
    """Of two dialogues, one ends with right answers. Answers differ in length."""
    number = request.rng_key[2]
    right = request.turn and number % 2
    return f"{'so ' * (number % 3)}{request.example.answer if right else 'no'}"


def by_definition(rewards, values, lam):
    """Advantages of one chain of tokens, as sums of the temporal differences."""
    deltas = [r + v - u for r, u, v in zip(rewards, values, [*values[1:], 0.0], strict=True)]
    return [sum(lam ** (j - i) * deltas[j] for j in range(i, len(deltas))) for i in range(len(deltas))]


def chains_of(batch, policy):
    """The sampled tokens of each trajectory of a policy in order: places in its token batch."""
    rows = batch.token_batches[policy]
    chains = {}
    for i, sample in enumerate(rows.sample.tolist()):
        columns = batch.samples[policy][sample].columns
        places = [(i, column) for column in rows.sampled_mask[i].nonzero().flatten().tolist()]
        chains.setdefault((columns.values["prompt"], columns.values["rollout"]), []).append(
            (columns.values["order"], places)
        )
    return [[place for _, places in sorted(turns) for place in places] for turns in chains.values()]


@pytest.mark.parametrize("name", ["sao", "sao_team"])
def test_sao_skips_what_others_say_and_adapts_lambda(name, tmp_path):
    """The last token of an answer is followed by the first of the agent's next one, whatever stands between them."""
    trainer = scripted_trainer(recipe_values(name, tmp_path, ppo={"lam_alpha": 1.5}), answering)
    assert trainer.args.lam_critic == 1.0 and trainer.args.critic_updates == 2
    for number, learner in enumerate(trainer.learners.values()):
        torch.nn.init.normal_(learner.value_head.linear.weight, generator=torch.Generator().manual_seed(number))
    batch = played(trainer)
    assert len(batch.token_batches) == (2 if name == "sao_team" else 1)
    for policy, rows in batch.token_batches.items():
        rewards, expected, outcomes = token_rewards(rows, trainer.args), [], []
        for chain in chains_of(batch, policy):
            earned, values = ([float(column[place]) for place in chain] for column in (rewards, rows.values))
            assert len({i for i, _ in chain}) == 2 and not any(earned[:-1]), "the outcome is at the last sampled token"
            lam = max(0.0, 1 - 1 / (trainer.args.lam_alpha * len(chain)))
            assert 0.5 < lam < 0.99
            expected += zip(chain, by_definition(earned, values, lam), strict=True)
            outcomes += [(place, earned[-1]) for place in chain]
        assert {outcome for _, outcome in outcomes} >= {0.0, 1.0}
        for place, outcome in outcomes:
            assert float(rows.returns[place]) == pytest.approx(outcome, abs=1e-5), "the critic's lambda is 1"
        raw = torch.tensor([advantage for _, advantage in expected])
        found = torch.stack([rows.advantages[place] for place, _ in expected])
        torch.testing.assert_close(found, (raw - raw.mean()) / raw.std(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["sao", "sao_team"])
def test_sao_has_the_numbers_of_section_4(name):
    """Those on mathematics; VAPO keeps its own alpha and rates."""
    config, vapo = load(name), load("vapo")
    assert (config.ppo.lam_alpha, config.ppo.lam_critic, config.ppo.critic_updates) == (1.5, 1.0, 2)
    assert (1 - config.ppo.cliprange, 1 + config.ppo.cliprange_high) == (0.7, 6.0)
    assert (config.training.learning_rate, config.training.value_learning_rate) == (1e-6, 5e-6)
    assert config.training.per_device_train_batch_size * config.training.gradient_accumulation_steps == 128
    assert config.schedule.critic_warmup == 10
    assert (vapo.ppo.lam_alpha, vapo.training.value_learning_rate) == (0.05, 2e-6)


def test_tools_are_skipped_as_others_are(tmp_path):
    """An answer with a call, its result and the answer after it are one chain: 0.5, 0.5 | 0.5 with lambda 0.5."""
    values = recipe_values("sao", tmp_path)
    values |= {
        "tools": {"calculator": {"use": "calculator"}},
        "protocol": {"name": "debate", "turns": 1},
        "agents": {"ann": {"tools": ["calculator"], "call_format": "tags", "call_texts": {"intro": "", "line": "", "tags": "", "returned": "={text}"}}},
    }  # fmt: skip
    values["ppo"] |= {"lam_alpha": None, "lam": 0.5}
    values["reward"]["sources"] = {"label": 1.0}

    def script(request):
        if request.ask.continues is None:
            return f"<calculator>{request.example.question.strip(' =')}</calculator>"
        return str(request.example.answer)

    trainer = scripted_trainer(values, script)
    (learner,) = trainer.learners.values()
    torch.nn.init.constant_(learner.value_head.linear.bias, 0.5)
    batch = played(trainer)
    ((policy, rows),) = batch.token_batches.items()
    chains = chains_of(batch, policy)
    assert all(len({i for i, _ in chain}) == 2 for chain in chains)
    for chain in chains:
        lengths = [sum(1 for i, _ in chain if i == row) for row in dict.fromkeys(i for i, _ in chain)]
        text = rows.input_ids[chain[-1][0]]
        assert len(text.nonzero()) > sum(lengths) + 2, "the tool's result stands between the two answers"
        assert [float(rows.returns[place]) for place in chain] == pytest.approx([1.0] * len(chain), abs=1e-5)
    # V is 0.5 throughout and the outcome is 1: the advantage at the last token is 0.5, and half of it at each earlier one
    chain = chains[0]
    raw = [0.5 * 0.5 ** (len(chain) - 1 - n) for n in range(len(chain))]
    found = torch.stack([rows.advantages[place] for place in chain])
    slope = (found[-1] - found[0]) / (raw[-1] - raw[0])
    torch.testing.assert_close(found, slope * (torch.tensor(raw) - raw[0]) + found[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("returns", "expected"),
    [("token_agent_gae", [[0.125, 0.05], [0.5, 0.2]]), ("token_gae", [[-0.2, -0.6], [0.5, 0.2]])],
)
def test_two_answers_of_an_agent_by_hand(returns, expected):
    """With an answer of a partner between the two."""
    ann, bob = [("ann", [0.5, 0.6], 0.0), ("ann", [0.4, 0.8], 1.0)], ("bob", [9.0, 9.0, 9.0], 5.0)
    advantages, _ = assigned([[ann[0], bob, ann[1]]], 1.0, 1.0, 1.0, 0.5, returns)
    assert [advantages[0], advantages[2]] == [pytest.approx(own, abs=1e-6) for own in expected]


def test_vapo_teaches_the_critic_first_and_adapts_lambda(tmp_path):
    trainer = scripted_trainer(recipe_values("vapo", tmp_path), answering)
    (learner,) = trainer.learners.values()
    start = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    torch.nn.init.normal_(learner.value_head.linear.weight, generator=torch.Generator().manual_seed(0))
    batch = played(trainer)
    (rows,) = batch.token_batches.values()
    assert rows.critic_only
    rewards, expected = token_rewards(rows, trainer.args), []
    for i, mask in enumerate(rows.sampled_mask):
        lam = max(0.0, 1 - 1 / (trainer.args.lam_alpha * int(mask.sum())))
        expected += by_definition(rewards[i][mask].tolist(), rows.values[i][mask].tolist(), lam)
    raw = torch.tensor(expected)
    torch.testing.assert_close(rows.advantages[rows.sampled_mask], (raw - raw.mean()) / raw.std(), atol=1e-4, rtol=1e-4)
    before = learner.value_head.linear.weight.detach().clone()
    trainer.learning.update(batch.token_batches, 0)
    assert all(torch.equal(start[name], p) for name, p in learner.model.named_parameters())
    assert not torch.equal(before, learner.value_head.linear.weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"critic": "head"}}, "training.critic_freeze: attention is for critics with a trunk of their own"),
        ({"ppo": {"engine_tis_cap": 2.0}}, "ratio_to: sampler and engine_tis_cap both weigh"),
    ],
)  # fmt: skip
def test_options_that_exclude_each_other_are_refused(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        from_dict(recipe_values("sao", tmp_path, **changes), "test")


def test_options_of_critics_that_nothing_reads_are_named(tmp_path):
    values = recipe_values("sao", tmp_path, advantage={"returns": "turn_gae"})
    told, why = refuse(unread(ResolvedRun(from_dict(values, "test")))), "advantage.returns has one number for each"
    assert any(f"warning: ppo.lam_alpha: it is set, and nothing reads it: {why}" in line for line in told)
