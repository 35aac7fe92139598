"""How the sampling of an answer is resolved: by agent, role, turn and request. No torch is needed."""

import pytest

from maporl.decoding import Sampling, SpeakerSampling, TeamSampling, greedy_learners
from maporl.errors import ConfigError, refuse
from maporl.run import ResolvedRun
from maporl.validation.load import from_dict
from trl_ext.ppo.options import Decoding

RUN = Decoding(1.0, 1.0, 0)


def test_the_nearest_value_wins_and_each_value_by_itself():
    speaker = SpeakerSampling(
        Sampling(temperature=0.9, top_p=0.8, top_k=20, max_tokens=50, stop=["a"]),
        {"solver": Sampling(temperature=0.6, max_tokens=40)},
        training=True,
    )
    assert speaker.at(None, None, 0, RUN) == Sampling(0.9, 0.8, 20, 50, ("a",))
    assert speaker.at(None, "solver", 0, RUN) == Sampling(0.6, 0.8, 20, 40, ("a",))
    asked = Sampling(temperature=0.5, stop=[])
    assert speaker.at(asked, "solver", 0, RUN) == Sampling(0.5, 0.8, 20, 40, ())
    assert SpeakerSampling(training=True).at(None, "solver", 0, RUN) is None
    assert SpeakerSampling(Sampling(), training=True).at(None, None, 0, RUN) is None


def test_lists_are_by_turn_and_the_last_value_is_for_all_later_turns():
    own = Sampling(temperature=[0.3, 0.7], max_tokens=[512, 128], top_k=5, stop=[["a"], []])
    assert own.at(0) == {"temperature": 0.3, "top_k": 5, "max_tokens": 512, "stop": ("a",)}
    assert own.at(1) == own.at(9) == {"temperature": 0.7, "top_k": 5, "max_tokens": 128, "stop": ()}
    assert Sampling(stop=["a", "b"]).at(3) == {"stop": ("a", "b")}


def test_evaluations_draw_tokens_their_own_way_and_keep_lengths_and_stop_strings():
    team = TeamSampling(
        {"ann": Sampling(temperature=0.9, top_k=3, max_tokens=7, stop=["a"])},
        {"solver": Sampling(temperature=0.2, max_tokens=5)},
        {"ann": Sampling(temperature=0.4)},
    )
    greedy = Decoding(0.0)
    assert team.of("ann", False).at(None, "solver", 0, greedy) == Sampling(0.4, max_tokens=5, stop=("a",))
    assert team.of("bob", False).at(None, "solver", 0, greedy) == Sampling(0.0, max_tokens=5)
    assert team.of("bob", False).at(None, None, 0, greedy) is None
    assert team.of("ann", True).at(None, "solver", 0, RUN) == Sampling(0.2, None, 3, 5, ("a",))


def test_the_longest_answer_of_an_agent():
    team = TeamSampling({"ann": Sampling(max_tokens=[3, 9])}, {"solver": Sampling(max_tokens=20)})
    assert team.longest("ann", 50) == 20 and team.longest("bob", 50) == 50
    assert TeamSampling({"ann": Sampling(max_tokens=[3, 9])}).longest("ann", 50) == 9


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -0.1}, "temperature: expected a number of at least 0, or a list of them, got -0.1"),
        ({"temperature": True}, "temperature: expected"),
        ({"top_p": 0}, "top_p: expected a number above 0 and at most 1"),
        ({"top_k": -1}, "top_k: expected a whole number of at least 0"),
        ({"max_tokens": 0}, "max_tokens: expected a whole number of at least 1"),
        ({"stop": [""]}, "stop: expected a list of texts that are not empty"),
        ({"stop": [["a"], "b"]}, "stop: expected"),
    ],
)
def test_values_out_of_their_range_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**given)


def config(**sections):
    return from_dict(
        {
            "output_dir": "out",
            "task": {"name": "toy_sum", "largest": 9},
            "agents": agents(),
            "protocol": {"name": "debate", "turns": 2, "later": "{others};{question}", "quote": "{text}"},
            "updates": 2,
            "training": {"use_cpu": True, "per_device_train_batch_size": 4},
        }
        | sections
    )


def agents(**more):
    tiny = {"tiny": {"alphabet": "0123456789+=;", "hidden_size": 32, "layers": 1}}
    return {"ann": tiny | more, "bob": tiny}


def test_a_configuration_says_it_for_agents_roles_and_evaluations():
    found = ResolvedRun(
        config(
            agents=agents(role="solver", sampling={"temperature": [0.5, 0.7], "stop": ["="]}),
            protocol={"name": "debate", "turns": 2, "sampling": {"solver": {"top_k": 20}}},
            evaluation={"questions": 2, "sampling": {"bob": {"temperature": 0.3}}},
        )
    ).sampling
    assert found.agents == {"ann": Sampling(temperature=[0.5, 0.7], stop=["="])}
    assert found.roles == {"solver": Sampling(top_k=20)} and found.held_out == {"bob": Sampling(temperature=0.3)}


API = {"engine": "openai", "api": {"model": "m", "base_url": "http://127.0.0.1:9"}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"agents": agents(sampling={"temperature": 0})}, r"agents\.ann\.sampling\.temperature: it is 0, and agent 'ann' is"),
        ({"agents": agents(sampling={"temperature": [1, 0]})}, "PPO needs the probability of each answer"),
        ({"agents": agents(sampling={"temprature": 1})}, "temperature"),
        ({"agents": agents(sampling={"top_p": 2})}, "top_p: expected at most 1, got 2"),
        (
            {"agents": agents(role="solver"), "protocol": {"name": "debate", "sampling": {"solver": {"temperature": 0}}}},
            r"protocol\.sampling\.solver\.temperature: it is 0, and agent 'ann'",
        ),
        ({"protocol": {"name": "debate", "sampling": {"solvr": {"top_k": 1}}}}, "nobody speaks in this role"),
        ({"protocol": {"name": "debate", "sampling": 3}}, "expected roles with their values"),
        ({"protocol": {"name": "debate", "sampling": {"a": {"top": 1}}}}, r"protocol\.sampling\.a"),
        ({"evaluation": {"sampling": {"an": {"top_k": 1}}}}, r"evaluation\.sampling: .*'an'"),
        ({"agents": {**agents(), "cy": {"engine": "human", "sampling": {"top_k": 1}}}}, "'human' samples nothing"),
        ({"agents": {**agents(), "cy": API | {"sampling": {"top_k": 4}}}}, r"agents\.cy\.sampling\.top_k: .* has no top_k"),
        (
            {"agents": {**agents(), "cy": API | {"api": API["api"] | {"temperature": 1}, "sampling": {"temperature": 1}}}},
            r"agents\.cy\.api\.temperature is set too",
        ),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_be_sampled_is_refused_before_models_load(sections, message):
    with pytest.raises(ConfigError, match=message):
        config(**sections)


def test_greedy_answers_are_allowed_to_agents_that_are_not_trained():
    config(agents=agents(trainable=False, sampling={"temperature": 0}))
    config(evaluation={"sampling": {"ann": {"temperature": 0}}})


def test_a_protocol_that_gives_roles_may_give_any_of_them_to_a_learner():
    greedy = TeamSampling(roles={"worker": Sampling(temperature=0)})
    refuse(greedy_learners(greedy, {"ann": None}, False))
    with pytest.raises(ConfigError, match=r"^here: protocol\.sampling\.worker\.temperature"):
        refuse(greedy_learners(greedy, {"ann": None}, True), "here")
