"""Exceptions: those that a user can meet carry an exit status, and the others are known by name."""

import ast
import importlib

from folders import ROOT

from trl_ext.errors import UserError

INTERNAL = {
    "maporl.environments.base.EnvironmentLost": "its dialogue is left out of the update, and counted",
    "maporl.environments.base.CallRefused": "an agent's fault: it is told the message as the call's result",
    "maporl.environments.schemas.TooMuch": "an argument is refused: the agent is told that it takes too long to be checked",
    "trl_ext.chat.written_calls._Unclear": "a call is not read: the agent is told why",
    "trl_ext.chat.written_calls._NoForm": "words name a mark, or a call is not read: the agent is told why",
    "trl_ext.chat.written_calls.Described": "the same",
    "trl_ext.chat.written_values.Unreadable": "the same",
    "maporl.engines.human.SeatLeft": "the person leaves the game: `maporl play` ends it in good order",
    "maporl.environments.games.base.IllegalMove": "an agent's move: the protocol turns it into a penalty or a retry",
    "maporl.guard.requests.ClientGone": "nobody is there to be answered",
    "maporl.guard.requests.Denied": "becomes an answer with a status of HTTP",
    "maporl.serving.wire.Refused": "becomes an answer with a status of HTTP, and stands in the dialogue's outcome",
    "maporl.protocols.base.Dropped": "ends its dialogue, on which nobody is trained",
    "maporl.sandbox.sandboxed.snippet.Unusable": "a snippet's fault: its outcome is `syntax`",
    "maporl.sandbox.sandboxed.values.NotPlain": "a snippet's fault: its outcome is `no_value`",
    "maporl.grading.expressions.NotMathematics": "the text is not read as mathematics, but compared as it is written",
    "maporl.grading.values.NotComputed": "the value is not computed, so the answer differs from the label",
    "reward_server.app.Refusal": "becomes an answer with a status of HTTP",
    "reward_server.batching.QueueFull": "becomes an answer with status 429",
    "trl_ext.process.servant.Lost": "the process died: its owner starts another one, and runs the request again or says what was lost",
    "trl_ext.process.waits.Discarded": "a signal drops the update in progress: the loop saves and ends; and so end threads that work for nobody",
    "trl_ext.process.interruptions.Interrupted": "Ctrl-C, after the run was saved: the command ends with status 130",
    "trl_ext.process.interruptions.Terminated": "SIGTERM, after the run was saved: the command ends with status 143",
}
"""Exceptions that never reach a user as an error, and where they end."""


def declared() -> dict[str, type[BaseException]]:
    """Every exception class of the three packages, by module and name."""
    found = {}
    for package in ("maporl", "reward_server", "trl_ext"):
        for path in sorted((ROOT / package).rglob("*.py")):
            classes = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.ClassDef)]
            if path.stem == "__main__" or not classes:
                continue
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            module = importlib.import_module(name)
            for node in classes:
                kind = vars(module).get(node.name)
                if isinstance(kind, type) and issubclass(kind, BaseException):
                    found[f"{name}.{node.name}"] = kind
    return found


def test_every_exception_that_a_user_can_meet_has_an_exit_status():
    found = declared()
    assert len(found) > 20
    assert found.keys() >= INTERNAL.keys(), "an exception that is gone leaves the table"
    for name, kind in found.items():
        assert issubclass(kind, UserError) != (name in INTERNAL), name
        assert name in INTERNAL or kind.exit_status in (1, 2), name
