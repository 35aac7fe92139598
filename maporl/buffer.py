"""From dialogues to what learners are trained on."""

from maporl.rewards.sources import where
from maporl.types import Dialogue, Stop
from trl_ext.rows import Answer


def answers_by_policy(
    dialogues: list[Dialogue], policies: set[str], critic_per_turn: bool, update: int
) -> dict[str, list[Answer]]:
    """The trainable utterances of each policy, in order of dialogue and turn; policies that said nothing are absent.

    Advantages are whitened per (agent, turn). ``label`` names update, agent, turn and dialogue in errors.
    """
    answers: dict[str, list[Answer]] = {}
    for dialogue in dialogues:
        for utterance in dialogue.utterances:
            if not utterance.trainable or utterance.policy not in policies:
                continue
            answers.setdefault(utterance.policy, []).append(
                Answer(
                    prompt_ids=utterance.prompt_ids,
                    response_ids=utterance.response_ids,
                    ended=utterance.stop is Stop.EOS,
                    label=f"update {update}, {where(dialogue, utterance)}",
                    text=utterance.text,
                    group=(utterance.agent, utterance.turn),
                    head=utterance.turn if critic_per_turn else 0,
                    score=utterance.rewards["credit"],
                )
            )
    return answers
