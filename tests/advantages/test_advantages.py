"""Advantages against the published methods' worked numbers. Each says which standard deviation it takes (ddof)."""

import pytest
import torch

from maporl.advantages import BASELINES, SCALES, AdvantageConfig, Baseline, TurnBatch, estimate
from maporl.advantages.baselines import BaselineState
from maporl.advantages.estimator import estimate_all
from maporl.errors import ConfigError


def config(returns="utterance", baseline="mean", scale="std", key=("prompt",), **options):
    return AdvantageConfig(returns=returns, baseline=baseline, scale=scale, key=key, **options)


def close(got, expected, tolerance=1e-3):
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32), atol=tolerance, rtol=0)


def one_prompt(reward, **columns):
    return TurnBatch(reward=reward, prompt=["q"] * len(reward), **columns)


@pytest.mark.parametrize(
    ("options", "right", "wrong"),
    [({"ddof": 0}, 1.7320, -0.5773), ({"ddof": 1}, 1.6202, -0.5401), ({"scale": "none"}, 0.75, -0.25)],
)
def test_agentpo_eight_hints_of_which_two_help_the_actor(options, right, wrong):
    got = estimate(one_prompt([1, 0, 0, 1, 0, 0, 0, 0]), config(**options))
    close(got, [right, wrong, wrong, right, wrong, wrong, wrong, wrong])


def test_the_four_modes_of_magrpo_and_grpo():
    batch = one_prompt([1, 0.5, 0, 0.5])
    close(estimate(batch, config(scale="none")), [0.5, 0, -0.5, 0])
    close(estimate(batch, config(baseline="loo", scale="none")), [0.6667, 0, -0.6667, 0])
    close(estimate(batch, config(baseline="max", scale="none")), [0, -0.5, -1, -0.5])
    close(estimate(batch, config(baseline="none", scale="none")), [1, 0.5, 0, 0.5])
    close(estimate(batch, config()), [1.2247, 0, -1.2247, 0])


@pytest.mark.parametrize(("reward", "expected"), [
    ([1.2, 0.1, 1.5, 0.0], [0.6565, -0.7878, 1.0505, -0.9191]),
    ([0.9, 0.1, 1.2, 0.0], [0.5916, -0.7606, 1.0987, -0.9297]),
], ids=["alpha 1", "alpha 0.7"])  # fmt: skip
def test_at_grpo_compares_candidates_of_one_agent_at_one_turn(reward, expected):
    """K = 4 candidates, team [1,0,1,0], local [.2,.1,.5,0]; ddof 1."""
    batch = one_prompt(reward, agent=["a"] * 4, turn=[0] * 4)
    close(estimate(batch, config(key=("prompt", "agent", "turn"))), expected)


@pytest.mark.parametrize(("returns", "expected"), [("reward_to_go", [4.5, 3, 1, 2]), ("trajectory", [5, 4, 5, 4])])
def test_a_return_over_an_agents_turns_leaves_out_what_others_earned(returns, expected):
    batch = one_prompt([4, 2, 1, 2], agent=["a", "b", "a", "b"], rollout=[0] * 4, turn=[0, 0, 1, 1], order=[0, 0, 1, 1])
    close(estimate(batch, config(returns, baseline="none", scale="none", gamma=0.5)), expected)


def test_a_turn_with_calls_counts_once():
    """Two rollouts: in the first the agent calls twice and then answers rightly, in the second it answers wrongly.

    With one row for each completion, as TRL has them, the advantages are those of [1, 0].
    """
    batch = one_prompt([1, 1, 1, 0], rollout=[0, 0, 0, 1], agent=["a"] * 4, turn=[0] * 4)
    close(estimate(batch, config(unit="row")), [0.5, 0.5, 0.5, -1.5])
    close(estimate(batch, config(unit="turn")), [0.7071, 0.7071, 0.7071, -0.7071])
    batch = one_prompt([1, 1, 0, 0], rollout=[0, 0, 0, 1], agent=["a"] * 4, turn=[0, 0, 1, 0])
    close(estimate(batch, config(unit="turn")), [1.1547, 1.1547, -0.5774, -0.5774])


DR_MAS = one_prompt(
    [1, 1, 1, 0, -0.1, 1, 1, 0, 0, 0],
    rollout=[0, 0, 0, 1, 1, 2, 2, 3, 3, 3],
    agent=["S", "V", "S", "S", "V", "S", "V", "S", "V", "S"],
)  # fmt: skip


def test_dr_mas_and_the_baselines_it_is_compared_with():
    """Four rollouts, the second's verifier answers in an invalid form (-0.1); ddof 1."""
    trajectory = [0.8655, -0.9077, 0.8655, -0.8233]
    close(estimate(DR_MAS, config(unit="rollout")), [trajectory[r] for r in DR_MAS.rollout])
    right, verifier = 0.9129, [0.8641, -0.9464, 0.8641, -0.7818]
    expected = [right, verifier[0], right, -right, verifier[1], right, verifier[2], -right, verifier[3], -right]
    close(estimate(DR_MAS, config(key=("prompt", "agent"))), expected)
    v = [0.7, -0.7667, 0.7, -0.6333]
    loo = [0.6, v[0], 0.6, -0.6, v[1], 0.6, v[2], -0.6, v[3], -0.6]
    close(estimate(DR_MAS, config(baseline="loo", scale="none", key=("prompt", "agent"))), loo)


def test_marti_groups_by_agent_and_turn_not_by_order_of_rows():
    """Two rollouts of two agents and two turns, listed trajectory first; ddof 1."""
    batch = one_prompt(
        [1, 0, 0, 1, 0, 0, 1, 1], rollout=[0] * 4 + [1] * 4, agent=list("aabbaabb"), turn=[0, 1] * 4
    )  # fmt: skip
    got = estimate(batch, config(key=("prompt", "agent", "turn")))
    close(got, [0.7071, 0, -0.7071, 0, -0.7071, 0, 0.7071, 0])
    tree = one_prompt([0.3, 0.7, 1.375, -0.025])
    close(estimate(tree, config()), [-0.4768, 0.1866, 1.3061, -1.0158])


MARFT = TurnBatch(
    reward=[0, 0, 0, 0, 0, 1], value=[0.3, 0.4, 0.5, 0.2, 0.3, 0.6], rollout=[0] * 6, agent=["a", "b", "c"] * 2,
    turn=[0, 0, 0, 1, 1, 1], order=[0, 1, 2, 0, 1, 2],
)  # fmt: skip


def test_marft_chains_gae_through_agents_and_turns():
    """gamma .99, lambda .95; normalised with ddof 0."""
    raw = AdvantageConfig(returns="chain_gae", baseline="critic", scale="none", key=(), gamma=0.99, lam=0.95)
    close(estimate(MARFT, raw), [0.5233, 0.4543, 0.3820, 0.7273, 0.6702, 0.4000])
    targets = estimate_all(MARFT, raw).targets
    torch.testing.assert_close(targets, estimate(MARFT, raw).double() + torch.tensor(MARFT.value, dtype=torch.float64), atol=1e-6, rtol=0)  # fmt: skip
    pooled = AdvantageConfig(returns="chain_gae", scale="batch_std", key=(), gamma=0.99, lam=0.95, ddof=0)
    close(estimate(MARFT, pooled), [-0.02, -0.55, -1.10, 1.53, 1.10, -0.96], 1e-2)
    for scale, key in (("agent_std", ()), ("std", ("agent",))):
        own = AdvantageConfig(returns="chain_gae", scale=scale, key=key, gamma=0.99, lam=0.95, ddof=0)
        close(estimate(MARFT, own), [-1, -1, -1, 1, 1, 1])


def test_turn_gae_bootstraps_over_the_agents_own_turns():
    """a at turns 0 and 1 (V .3, .2, reward 1 at the end): delta_1 = .8, A_0 = (.99*.2 - .3) + .99*.95*.8 = .6504."""
    gae = AdvantageConfig(returns="turn_gae", scale="none", key=(), gamma=0.99, lam=0.95)
    batch = TurnBatch(
        reward=[0, 5, 1], value=[0.3, 9, 0.2], rollout=[0, 0, 0], agent=["a", "b", "a"], turn=[0, 0, 1], order=[0, 1, 2]
    )
    close(estimate(batch, gae), [0.6504, -4.0, 0.8])


def test_marshal_cumulates_first_and_centres_after():
    """Player 0 in three games; no standard deviation."""
    batch = TurnBatch(
        reward=[0, 0, 1, 0, 0.2, -1, 0, 0, 0.1], rollout=[0] * 3 + [1] * 3 + [2] * 3, agent=["p0"] * 9,
        turn=[0, 1, 2] * 3, game=["ttt"] * 9,
    )  # fmt: skip
    got = estimate(batch, config("reward_to_go", scale="none", key=("game", "agent")))
    close(got, [0.922] * 3 + [-0.878, -0.878, -1.078] + [0.022] * 3)


def test_spiral_reads_the_running_mean_before_it_moves():
    """alpha .95; p0 wins, wins, loses, draws."""
    state = BaselineState()
    batch = TurnBatch(
        reward=[1, -1, 1, -1, -1, 1, 0, 0], rollout=[0, 0, 1, 1, 2, 2, 3, 3], game=["kuhn"] * 8, agent=["p0", "p1"] * 4
    )
    got = estimate(batch, config(baseline="ema", scale="none", key=("game", "agent"), ema=0.95), state)
    close(got, [1, -1, 0.95, -0.95, -1.0975, 1.0975, -0.0426, 0.0426])
    assert state.means["kuhn/p0"] == pytest.approx(0.0405, abs=1e-4)
    again = estimate(batch, config(baseline="ema", scale="none", key=("game", "agent")), state)
    assert float(again[0]) == pytest.approx(1 - 0.0405, abs=1e-4)


def test_a_running_mean_moves_in_the_order_of_the_dialogues_and_not_of_the_rows():
    """Dialogues 2, 0 and 1 earn -1, 1 and 1: the means before them are .0975, 0 and .05."""
    got = estimate(
        TurnBatch(reward=[-1, 1, 1], prompt=[1, 0, 0], rollout=[0, 0, 1], agent=["p0"] * 3),
        config(baseline="ema", scale="none", key=("agent",), ema=0.95),
    )
    close(got, [-1.0975, 1, 0.95])


def test_spiral_moves_the_mean_once_per_game_however_many_turns_it_had():
    batch = TurnBatch(reward=[1, 1, 1, -1], rollout=[0, 0, 1, 1], agent=["p0"] * 4, turn=[0, 1, 0, 1])
    got = estimate(batch, config("utterance", "ema", "none", ("agent",), ema=0.5))
    close(got, [1, 1, 0.5, -1.5])


def test_m_grpo_aligns_ragged_groups():
    """Sub-agents called 1, 3, 2 and 2 times, d = 2 with one dropped and one repeated by hand; ddof 0."""
    repeated = one_prompt([0.8, 0.8, 0.3, 0.3, 0.2, 0.2, 0.9, 0.7])
    close(estimate(repeated, config(ddof=0)), [0.976, 0.976, -0.799, -0.799, -1.154, -1.154, 1.331, 0.621])
    main = estimate(one_prompt([1, 0.1, 0.1, 1]), config(ddof=0))
    close(main, [1, -1, -1, 1])
    ragged = one_prompt(
        [0.8, 0.3, 0.5, 0.3, 0.2, 0.2, 0.9, 0.7], rollout=[0, 1, 1, 1, 2, 2, 3, 3], agent=["sub"] * 8
    )  # fmt: skip
    weighed = estimate_all(ragged, config(ddof=0, post=({"align": {"to": 2}},)))
    torch.testing.assert_close(weighed.weights, torch.tensor([2, 2 / 3, 2 / 3, 2 / 3, 1, 1, 1, 1], dtype=torch.float64))
    mean = (0.8 * 2 + (0.3 + 0.5 + 0.3) * 2 / 3 + 0.4 + 1.6) / 8
    assert float(weighed.advantages[0]) > 0 and mean == pytest.approx(0.5417, abs=1e-4)
    centred = estimate(ragged, config(scale="none", post=({"align": {"to": 2}},)))
    close(centred[:1], [0.8 - mean])
    dropped = estimate_all(ragged, config(ddof=0, post=({"align": {"to": 2, "how": "drop"}},)))
    assert sorted(dropped.weights.tolist()) == [0, 1, 1, 1, 1, 1, 1, 2]
    assert float(dropped.advantages[dropped.weights == 0]) == 0.0


def test_matpo_compares_planners_and_hands_their_advantage_to_the_workers():
    """Four rollouts with one worker each (its own reward does not matter); ddof 1."""
    batch = one_prompt(
        [1, 9, 0.075, 9, 0.95, 9, 0.05, 9],
        rollout=[0, 0, 1, 1, 2, 2, 3, 3],
        caller=[None, 0, None, 2, None, 4, None, 6],
    )
    got = estimate_all(batch, config(post=("broadcast_to_callees",)))
    planner = [0.913, -0.842, 0.818, -0.889]
    close(got.advantages.float(), [a for a in planner for _ in range(2)])
    assert got.weights.tolist() == [1.0] * 8


def test_a_tree_of_joint_actions_as_in_magrpo():
    """G = 2, T = 2, gamma .9: R = (.85, .56), A = +-.145, then +-.5 and +-.2."""
    batch = TurnBatch(reward=[0.4, 0.2, 1, 0, 0.6, 0.2], parent=[None, None, 0, 0, 1, 1])
    got = estimate(batch, config("tree", scale="none", key=("parent",), gamma=0.9))
    close(got, [0.145, -0.145, 0.5, -0.5, 0.2, -0.2])


IPD = TurnBatch(  # rollout 0 = (C,D,C,D) against (C,D,D,D), rollout 1 all C; payoffs / 5
    reward=[0.6, 0.2, 0, 0.2, 0.6, 0.2, 1, 0.2, *[0.6] * 8],
    rollout=[0] * 8 + [1] * 8, agent=(["p0"] * 4 + ["p1"] * 4) * 2, turn=[0, 1, 2, 3] * 4, seed=[7] * 16,
)  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "last"),
    [(False, [1.1376, 1.6367, 0.8776, 1.4869]), (True, [1.1376, 1.5994, 0.8859, 1.3782])],
    ids=["paper", "code"],
)
def test_advantage_alignment_shapes_the_opponent(extra, last):
    options = {
        "returns": "reward_to_go",
        "baseline": "loo",
        "scale": "none",
        "key": ("seed", "agent", "turn"),
        "gamma": 0.9,
    }
    plain = estimate(IPD, AdvantageConfig(**options))
    close(plain[:8], [-1.1376, -1.2640, -0.9600, -0.4000, -0.3276, -0.3640, 0.0400, -0.4000])
    shaped = estimate(IPD, AdvantageConfig(**options, post=({"opponent_shaping": {"extra_gamma": extra}},)))
    close(shaped[8:12], last)
    if not extra:
        close(shaped[:4], [-1.1376, -0.8913, -1.0424, 0.6869])


def test_salt_neutralises_steps_that_successes_and_failures_share():
    """Outcomes (1,1,0,0), A = +-1 (ddof 0): a first step shared by 0 and 2 gets 0; by 0, 1 and 2, +.333."""
    reward, prompt = [1, 1, 0, 0] * 2, ["q"] * 8
    turn = [0] * 4 + [1] * 4
    for state, first in ((["s", "x", "s", "y"], [0, 1, 0, -1]), (["s", "s", "s", "y"], [1 / 3, 1 / 3, 1 / 3, -1])):
        batch = TurnBatch(reward=reward, prompt=prompt, rollout=[0, 1, 2, 3] * 2, turn=turn, state=[*state, *"abcd"])
        got = estimate(batch, config(key=("prompt",), ddof=0, post=("step_merge",)))
        close(got, [*first, 1, 1, -1, -1])


def test_igrpo_arena_and_cooper_are_plain_groups():
    """iGRPO (ddof 0), ArenaRL and Cooper (ddof 1)."""
    close(estimate(one_prompt([1.1, 0.1, 1.1, 1.1]), config(ddof=0)), [0.577, -1.732, 0.577, 0.577])
    close(estimate(one_prompt([1 / 3, 1, 2 / 3, 0]), config()), [-0.387, 1.162, 0.387, -1.162])
    served = torch.sigmoid(torch.tensor([2.0, -0.5, 0.3, -3.0])).tolist()
    close(estimate(one_prompt(served), config()), [1.175, -0.265, 0.299, -1.209], 2e-3)


def test_rounding_is_told_by_the_size_of_what_is_compared():
    """A hundred-millionth in its own group is a difference, and among all rows it is rounding beside a million."""
    batch = TurnBatch(reward=[3e6, 1e6, 2e-8, 0.0], prompt=[0, 0, 1, 1])
    got = estimate_all(batch, config(scale="none")).advantages
    assert got.tolist() == [1e6, -1e6, 1e-8, -1e-8]
    batch = TurnBatch(reward=[3.0, -3.0, 2e-13, -2e-13], prompt=[0, 0, 1, 1])
    got = estimate_all(batch, config(baseline="batch_mean", scale="none")).advantages
    assert got.tolist() == [3.0, -3.0, 0.0, 0.0]


def test_padding_enters_no_statistic():
    plain = estimate(one_prompt([1, 0, 0]), config())
    padded = TurnBatch(reward=[1, 99, 0, 0, float("nan")], prompt=["q"] * 5, mask=[True, False, True, True, False])
    assert padded.tensor(padded.reward).tolist() == [1, 0, 0, 0, 0]
    got = estimate(padded, config())
    torch.testing.assert_close(got[[0, 2, 3]], plain)
    assert got[[1, 4]].tolist() == [0, 0]


REFUSED = {
    "a group of one": (one_prompt([1, 0], agent=["a", "b"]), config(key=("prompt", "agent")), r"\{'prompt': 'q', 'agent': 'a'\} has a single member.*singleton: zero"),
    "a batch of one": (TurnBatch(reward=[1]), config(baseline="none", scale="batch_std", key=()), "single member"),
    "a column that is not there": (one_prompt([1, 0]), config(key=("game",)), r"key needs the column 'game'.*\['prompt'\]"),
    "an unknown column": (one_prompt([1, 0]), config(key=("gane",)), "unknown column 'gane'"),
    "gae without values": (one_prompt([1, 0]), config("turn_gae", "critic"), "turn_gae needs the column 'value'"),
    "a tree without parents": (one_prompt([1, 0]), config("tree"), "returns: tree needs the column 'parent'"),
    "a running mean without an order": (TurnBatch(reward=[1, 0], agent=["a", "a"]), config(baseline="ema", scale="none", key=("agent",)), "ema needs the column 'rollout'"),
    "tokens": (one_prompt([1, 0]), config("token_gae"), "token_gae runs over tokens"),
    "three players": (TurnBatch(reward=[1, 0, 2], rollout=[0] * 3, agent=list("abc"), turn=[0] * 3), config(baseline="none", scale="none", key=(), post=("opponent_shaping",)), "exactly two agents"),
    "an unknown slot": (one_prompt([1, 0]), config(baseline="mena"), "baseline: unknown 'mena'; did you mean 'mean'"),
    "its own ancestor": (one_prompt([1, 0], parent=[1, 0]), config("tree"), "its own ancestor"),
}  # fmt: skip


@pytest.mark.parametrize(("batch", "options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_estimated_is_refused(batch, options, message):
    with pytest.raises(ValueError, match=message):
        estimate(batch, options)


def test_agents_with_their_own_critics_take_one_step_differences():
    """IAC: A = r - V, the critic's target is r."""
    got = estimate_all(TurnBatch(reward=[1, 0], value=[0.25, 0.5]), config(baseline="critic", scale="none", key=()))
    assert got.advantages.tolist() == [0.75, -0.5] and got.targets.tolist() == [1, 0]


def test_a_group_of_one_may_be_declared_to_be_nothing():
    batch = one_prompt([1, 0, 5], agent=["a", "a", "b"])
    close(estimate(batch, config(key=("prompt", "agent"), singleton="zero")), [0.7071, -0.7071, 0])


def test_a_missing_reward_is_no_number():
    with pytest.raises(ValueError, match=r"TurnBatch\.reward: row 1 is nan"):
        one_prompt([1, float("nan")])
    with pytest.raises(ValueError, match=r"TurnBatch\.agent: expected 2 entries"):
        one_prompt([1, 0], agent=["a"])


@pytest.mark.parametrize("made, message", [
    (lambda r: r[:2], "advantage.baseline: own returned a tensor [2]; expected a tensor [4] of finite numbers, one for each row"),
    (lambda r: r.mean(), "advantage.baseline: own returned a tensor []; expected a tensor [4]"),
    (lambda r: r.tolist(), "advantage.baseline: own returned [0.0, 1.0, 1.0, 1.0]; expected a tensor [4]"),
    (lambda r: r.to(torch.complex64), "advantage.baseline: own returned a tensor [4]; expected a tensor [4] of finite numbers"),
    (lambda r: r / 0, "advantage.baseline: own returned NaN or infinite numbers"),
    (lambda r: r[7], "advantage.baseline: own failed: "),
])  # fmt: skip
def test_a_baseline_that_gives_no_number_for_each_row_is_named(monkeypatch, made, message):
    monkeypatch.setitem(BASELINES, "own", Baseline(lambda returns, *others: made(returns), over="group"))
    with pytest.raises(ConfigError) as caught:
        estimate(one_prompt([0.0, 1.0, 1.0, 1.0]), config(baseline="own", scale="none"))
    assert message in str(caught.value)


def test_the_function_that_made_a_nan_is_named_and_equal_groups_may_divide_by_0(monkeypatch):
    monkeypatch.setitem(SCALES, "own", lambda advantages, returns, *others: advantages / returns.std())
    equal, batch = one_prompt([1.0, 1.0]), one_prompt([0.0, 1.0])
    assert estimate(equal, config(baseline="mean", scale="own")).tolist() == [0.0, 0.0], "0/0 of an equal group is 0"
    assert estimate(batch, config(baseline="mean", scale="own")).tolist() == pytest.approx([-0.7071, 0.7071], abs=1e-4)
    with pytest.raises(ConfigError, match=r"^advantage\.scale: own returned NaN or infinite numbers"):
        estimate(equal, config(baseline="none", scale="own"))


def test_a_baseline_may_write_into_what_it_is_given_and_return_whole_numbers(monkeypatch):
    def least(returns, groups, *others):
        returns[:] = returns.min()
        return returns.long()

    monkeypatch.setitem(BASELINES, "least", Baseline(least, over="group"))
    assert estimate(one_prompt([0.0, 1.0]), config(baseline="least", scale="none")).tolist() == [0.0, 1.0]
