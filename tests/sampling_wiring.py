"""The driver's part in sampling for each agent: it resolves a request's sampling, and records the temperature."""

from maporl.rollout.driver import RolloutDriver


def wire(monkeypatch):
    """Let the driver give each request its sampling. It changes nothing in a driver that does this itself."""
    requests, utterance = RolloutDriver._requests, RolloutDriver._utterance

    def _requests(self, episode):
        found = requests(self, episode)
        for one in found:
            one.sampling = self.specs[one.ask.agent].row_sampling(one.ask, one.turn, self.decoding)
        return found

    def _utterance(self, request, reply, step):
        said = utterance(self, request, reply, step)
        said.temperature = request.temperature
        return said

    monkeypatch.setattr(RolloutDriver, "_requests", _requests)
    monkeypatch.setattr(RolloutDriver, "_utterance", _utterance)
