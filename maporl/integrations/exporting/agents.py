"""Gives each model of a vLLM server the system prompt and the sampling of its agent, which is beside this file in
agents.json. vllm serve loads it by --middleware agents.Agents. It needs nothing but Python."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize")
"""Where a chat template is rendered."""
SAMPLED = ("/v1/chat/completions", "/v1/completions")
"""Where a request may have all fields of vLLM's sampling."""
LENGTHS = {"max_tokens", "max_completion_tokens"}


class Agents:
    """Fills in what a request leaves out, by the name of its model."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self.app = app
        self.fields = json.loads(Path(__file__).with_name("agents.json").read_text(encoding="utf-8"))

    async def __call__(
        self, scope: dict[str, Any], receive: Callable[[], Awaitable[dict[str, Any]]], send: Callable[..., Any]
    ) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in {*PATHS, *SAMPLED}:
            await self.app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client has left
            body, more = body + message.get("body", b""), message.get("more_body", False)
        body = self.filled(scope["path"], body)
        headers = [pair for pair in scope["headers"] if pair[0].lower() != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        whole = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> dict[str, Any]:
            return whole.pop() if whole else await receive()

        await self.app(scope, again, send)

    def filled(self, path: str, body: bytes) -> bytes:
        """Return the body of a request with what it leaves out. vLLM refuses what it cannot read."""
        try:
            request = json.loads(body)
            known = self.fields[request["model"]]
        except (ValueError, KeyError, TypeError):
            return body
        request = {name: value for name, value in request.items() if value is not None}
        if path in SAMPLED:
            left_out = LENGTHS if LENGTHS & request.keys() else set()
            request = {name: value for name, value in known.items() if name not in left_out} | request
        if path in PATHS:
            kwargs = request.get("chat_template_kwargs") or {}
            if isinstance(kwargs, dict):
                request["chat_template_kwargs"] = {**kwargs, "agent": request["model"]}
        return json.dumps(request).encode()
