"""The README of a pushed team, its card on the hub: how it was trained, how good it is, and how to use it."""

import re

from maporl.report.failures import failures
from maporl.report.page import results
from maporl.report.read import Run
from maporl.report.story import story
from maporl.storage.run_folder import TAGS
from maporl.text import markdown_table, visible
from trl_ext.trainer.model_card import card_text

_CARD = """
# {name}

A team of language models that talk to each other, {made} with `maporl`.

{story}

{failures}

{results}

## Use

```python
from maporl import Team

team = Team.from_pretrained("{name}")  # to evaluate, play with, or train further
```

```bash
maporl play {name}    # play in place of one of the agents
maporl eval {name}    # held-out accuracy per turn
```

Each policy has a folder with a model or an adapter: {policies}. The folder `critic` in it is for further training
only. `config.yaml` is what is recorded of the run, and `report.html` is its report.

{learned}

## Citation

MAPoRL: Park et al., *MAPoRL: Multi-Agent Post-Co-Training for Collaborative Large Language Models with Reinforcement Learning*, ACL
2025, arXiv:2502.18439.
"""  # noqa: E501


def card(run: Run, name: str, policies: list[str]) -> str:
    """Return the README of a pushed team."""
    bases = sorted({a["model"] for a in run.agents().values() if is_hub_name(a.get("model") or "")})
    summary = "\n\n".join(f"**{part['title']}** {part['text']}" for part in story(run))
    learned = "\n".join(f"- {visible(line)}" for line in run.learns_from)
    failed = failures(run)
    lines = "\n".join(f"- {line['text']}" for line in failed["lines"])
    body = _CARD.format(
        name=name,
        story=summary,
        failures=f"**Where it still fails** (counted over {failed['scope']}):\n\n{lines}" if lines else "",
        results=_results(run),
        policies=", ".join(f"`{policy}`" for policy in policies),
        made="trained together" if run.updates() else "saved",
        learned=f"## What it learned from\n\n{learned}" if learned else "",
    )
    return card_text(body, library_name="maporl", base_model=bases or None, tags=TAGS)


def _results(run: Run) -> str:
    """Return the report's table of results as Markdown."""
    shown = [(row, row["after"]) for row in results(run) if row["after"] and row["after"]["value"] is not None]
    if not shown:
        return ""
    rows = [(r["turn"], r["who"], f"{s['value']:.1%}", f"{s['low']:.1%} to {s['high']:.1%}") for r, s in shown]
    return "\n".join(markdown_table(("turn", "who", "right, held out", "95% interval"), rows))


def is_hub_name(name: str) -> bool:
    """Return whether ``name`` has the form ORG/NAME."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None
