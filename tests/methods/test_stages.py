"""Groups at every step of which chosen outputs go on: MarsRL's stages and SDRL's pairs, through the trainer's own
steps."""

from collections import Counter, defaultdict

import pytest
from scripted_training import played, recipe_values, scripted_trainer

from maporl.config.schema import BranchingSection
from maporl.rollout.branching import BRANCHINGS
from maporl.validation.load import from_dict

RIGHT, FLAGS = [1, 0, 1, 0, 0, 0, 1, 0], [1, 1, 0, 1, 0, 0, 1, 1]


def mars(tmp_path, right, flags, **branching):
    """The next update of mars_rl. The k-th solution is right as ``right[k]``, and each draft gets the verdicts of
    ``flags``."""
    two = {"task": {"largest": 4}, "ppo": {"response_length": 40}, "training": {"per_device_train_batch_size": 2}}
    values = recipe_values("mars_rl", tmp_path, branching={"group": 8, **branching}, **two)
    solved, judged = Counter(), Counter()

    def script(request):
        question, role = request.example.id, request.ask.role
        if role == "solver":
            solved[question] += 1
            number = (solved[question] - 1) % 8
            return request.example.answer if right[number] else f"9{number}"
        if role == "verifier":
            judged[question, request.ask.messages[-1]["content"]] += 1
            flag = flags[(judged[question, request.ask.messages[-1]["content"]] - 1) % 8]
            return "wrong" if flag else "<verify>approve</verify>"
        return "x"

    return played(scripted_trainer(values, script))


def by_role(batch):
    """For each role, its rows by what they follow, as (reward, advantage); those of the second round apart."""
    found = defaultdict(lambda: defaultdict(list))
    for policy, tokens in batch.token_batches.items():
        for i, sample in enumerate(tokens.sample.tolist()):
            own = batch.samples[policy][sample]
            advantage = float(tokens.advantages[i][tokens.sampled_mask[i]][0])
            after = own.columns.earlier[-1][2] if own.columns.earlier else own.columns.values["prompt"]
            again = " again" if own.columns.values["order"] > 2 else ""
            found[own.columns.values["role"] + again][after].append((own.columns.credit, advantage))
    return found


def advantages(group, reward):
    return {round(a, 4) for r, a in group if r == reward}


def test_mars_rl_pays_each_role_for_its_own_work(tmp_path):
    """Three of eight solutions are right; five of eight verdicts find an error in a wrong one: the numbers of the
    paper's GRPO."""
    found = by_role(mars(tmp_path, RIGHT, FLAGS))
    assert found.keys() == {"solver", "verifier", "refiner", "verifier again", "refiner again"}
    for group in found["solver"].values():
        assert len(group) == 8
        assert advantages(group, 1.0) == {1.2076} and advantages(group, 0.0) == {-0.7246}
    first = list(found["verifier"].values())
    assert all(len(group) == 8 for group in first)
    # wrong drafts are chosen, of which a verdict is true if it finds the error
    assert all(advantages(group, 1.0) == {0.7246} and advantages(group, 0.0) == {-1.2076} for group in first)
    assert all(a == 0 for group in found["refiner"].values() for _, a in group), "all corrections are equally wrong"


def test_a_verdict_on_a_right_draft_is_true_if_it_approves(tmp_path):
    found = by_role(mars(tmp_path, [1] * 8, [0, 0, 1, 0, 0, 0, 0, 0], choose="random"))
    verdicts = list(found["verifier"].values())
    assert verdicts and all(sorted(r for r, _ in group) == [0.0] + [1.0] * 7 for group in verdicts)
    assert all(advantages(g, 1.0) == {0.3536} and advantages(g, 0.0) == {-2.4749} for g in verdicts)


def chosen_after(batch, step):
    """By question, what goes on after a step: the credit of the utterance that later ones follow."""
    going = defaultdict(dict)
    for dialogue in batch.dialogues:
        if len(dialogue.utterances) > step + 1:
            u = dialogue.utterances[step]
            going[dialogue.prompt][u.sample or (dialogue.rollout, u.id)] = u
    return {prompt: list(own.values()) for prompt, own in going.items()}


@pytest.mark.parametrize(("choose", "right"), [("adaptive", [0, 0]), ("balanced", [0, 1]), ("random", None)])
def test_mars_rl_gives_wrong_solutions_to_verifiers_and_true_reports_to_correctors(tmp_path, choose, right):
    batch = mars(tmp_path, RIGHT, FLAGS, choose=choose)
    for own in chosen_after(batch, 0).values():
        assert len(own) == 2
        if right is not None:
            assert sorted(int(u.grade.correct) for u in own) == right
    for own in chosen_after(batch, 1).values():
        assert 1 <= len(own) <= 2
        if choose == "adaptive":
            assert {u.rewards["verdict"] for u in own} == {1.0}
    assert all(not u.settles for own in chosen_after(batch, 1).values() for u in own), "what ended does not go on"


def test_an_output_has_one_reward_in_all_its_copies(tmp_path):
    batch = mars(tmp_path, RIGHT, FLAGS)
    worth = defaultdict(set)
    for dialogue in batch.dialogues:
        for u in dialogue.utterances:
            if u.sample is not None:
                worth[dialogue.prompt, u.sample].add(u.rewards["credit"])
    assert worth and all(len(values) == 1 for values in worth.values())


# -- SDRL -------------------------------------------------------------------------------------------------------------

FIRST = [["12", "12", "12", "7"], ["7", "5", "12", "7"]]


def sdrl(tmp_path, first, second=(True, True, True, False), **branching):
    values = recipe_values("sdrl", tmp_path, 2, task={"largest": 4}, branching={"group": [4, 4], **branching})
    values["ppo"] |= {"response_length": 12}
    said = Counter()

    def script(request):
        agent = request.ask.agent
        number = said[request.example.id, agent, request.turn]
        said[request.example.id, agent, request.turn] += 1
        if request.turn == 0:
            answer = first[["ann", "bob"].index(agent)][number % 4]
            return request.example.answer if answer == "right" else f"Answer: {answer}"
        return request.example.answer if second[number % 4] else "Answer: 99"

    return played(scripted_trainer(values, script))


def test_sdrl_pairs_the_two_commonest_answers(tmp_path):
    """Of 12 12 12 7 7 5 12 7 the pair is 12 and 7."""
    batch = sdrl(tmp_path, FIRST)
    pairs = set()
    for dialogue in (d for d in batch.dialogues if len(d.utterances) == 4):
        pairs.add(tuple(u.grade.answer for u in dialogue.utterances[:2]))
        ann = dialogue.utterances[2].messages[-1]["content"]
        assert dialogue.utterances[1].text in ann, "ann reads bob's answer"
    assert pairs and pairs <= {("12", "7"), ("7", "12")}
    assert sum(len(d.utterances) == 4 for d in batch.dialogues) == 4 * 2


def test_where_all_answers_are_equal_nobody_debates(tmp_path):
    batch = sdrl(tmp_path, [["7"] * 4, ["7"] * 4])
    assert {len(d.utterances) for d in batch.dialogues} == {2} and len(batch.dialogues) == 2 * 4


def test_sdrl_compares_first_answers_and_answers_to_a_pair_apart(tmp_path):
    """Of eight first answers five are right; of four second answers three are. Together: .677 and -1.354."""
    batch = sdrl(tmp_path, [["right", "right", "8", "right"], ["8", "8", "right", "right"]])
    groups = defaultdict(list)
    for policy, tokens in batch.token_batches.items():
        for i, sample in enumerate(tokens.sample.tolist()):
            own = batch.samples[policy][sample].columns
            advantage = round(float(tokens.advantages[i][tokens.sampled_mask[i]][0]), 4)
            prompt, turn, agent = map(own.values.get, ("prompt", "turn", "agent"))
            groups[prompt, turn, agent if turn else ""].append((own.credit, advantage))
    for (_, turn, _), group in groups.items():
        assert len(group) == (8 if turn == 0 else 4)
        right, wrong = (0.7246, -1.2076) if turn == 0 else (0.5, -1.5)
        assert {a for r, a in group if r == 1.0} == {right} and {a for r, a in group if r == 0.0} == {wrong}


# -- in general -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "steps"), [("mars_rl", [1, 1, 1, 1, 1]), ("sdrl", [2, 2])], ids=["mars_rl", "sdrl"])
def test_the_number_of_dialogues_that_a_check_tells_is_played(tmp_path, recipe, steps):
    batch = mars(tmp_path, [0] * 8, [1] * 8) if recipe == "mars_rl" else sdrl(tmp_path, FIRST)
    section = BranchingSection(how="stages", **({"group": 8} if recipe == "mars_rl" else {"group": (4, 4), "keep": 1}))
    told = BRANCHINGS["stages"].dialogues(section, steps)
    assert set(Counter(d.prompt for d in batch.dialogues).values()) == {told}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reward": {"rules": ["last"]}}, "stages continues one candidate|stages"),
        ({"reward": {"sources": {"label": 1.0}}}, "steps that nothing scores yet"),
        ({"branching": {"group": 1}}, "stages needs at least 2 dialogues"),
        ({"branching": {"keep": 0}}, "branching.keep: expected at least 1"),
        ({"branching": {"choose": "best"}}, "branching.choose"),
    ],
)
def test_stages_that_cannot_be_played_are_refused(tmp_path, changes, words):
    values = recipe_values("mars_rl", tmp_path)
    for section, own in changes.items():
        values[section] = values[section] | own
    with pytest.raises(ValueError, match=words):
        from_dict(values, "test")


def test_single_outputs_cannot_be_chosen_where_two_agents_speak(tmp_path):
    with pytest.raises(ValueError, match="needs one speaker, and 2 speak"):
        sdrl(tmp_path, FIRST, choose="adaptive")
