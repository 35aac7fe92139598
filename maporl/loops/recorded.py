"""Recorded dialogues as the first round of a loop: others have said them, and the team is trained on them. No torch.

The record of a team behind an API has texts and no tokens, and that of another model has tokens of another tokenizer.
So the texts are encoded as those of the policies that speak for the same agents now.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from maporl.engines.transcript import written_transcripts
from maporl.loops.sft import recorded_dialogues, spoken_by_team
from maporl.rollout.episode import SpeakerSpec
from maporl.team.team import Team
from maporl.types import Dialogue


def round_of_record(file: Path, team: Team, specs: Mapping[str, SpeakerSpec]) -> list[Dialogue]:
    """Return the dialogues of a record as ``team`` would have said them, without scores and credits.

    Dialogues that were played together on a question have one number. ``specs`` are the speakers of the team, whose
    call formats say how calls are written.

    Raises:
        ConfigError: the file is missing or empty, or a line of it is not a dialogue.
        ChatError: a chat template cannot render what an agent was shown.
    """
    numbers: dict[tuple[int, int, int], int] = {}
    seen = Counter[tuple[int, int, int]]()
    dialogues = []
    for step, dialogue in recorded_dialogues(file):
        place = (step, dialogue.prompt, dialogue.rollout)
        # a record may have been put behind another, whose numbers it has too
        number = numbers.setdefault((seen[place], step, dialogue.prompt), len(numbers))
        seen[place] += 1
        dialogues.append(_encoded(replace(dialogue, prompt=number), team, specs))
    return dialogues


def _encoded(dialogue: Dialogue, team: Team, specs: Mapping[str, SpeakerSpec]) -> Dialogue:
    """Return ``dialogue`` with the token ids of the policies that learn from it."""
    spoken = spoken_by_team(dialogue, team)
    ids: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
    for policy in (p for p in team.policies.values() if p.trainable):
        for spec, agent in ((specs[agent], agent) for agent in policy.agents if agent in specs):
            form = None if spec.tools is None else spec.tools.format
            voice = policy.tokenizer, policy.stop_ids
            for one in written_transcripts(
                spoken, agent, policy.name, *voice, form, apart=lambda u: True, brought=spec.formats
            ):
                for utterance, (start, end) in one.spans.items():
                    ids[policy.name, utterance] = one.ids[:start], one.ids[start:end]
    said = []
    for u in spoken.utterances:
        prompt, response = ids.get((u.policy, u.id), ([], []))
        if not u.stop.whole:  # what was cut off has no end
            response = response[:-1]
        rewards = {name: value for name, value in u.rewards.items() if name not in ("score", "credit")}
        said.append(
            replace(
                u,
                prompt_ids=prompt,
                response_ids=response,
                logprobs=None,
                trainable=bool(response) and "no_text" not in u.tags,
                rewards=rewards,
                trace=None,
            )
        )
    return replace(spoken, utterances=said)
