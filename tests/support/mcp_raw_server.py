"""A server of tools that speaks the protocol MCP line by line, without the package: what servers in the wild list and
answer.

``python mcp_raw_server.py [MODE]``: ``bad`` lists a bad schema, ``endless`` a list without end, ``circle`` the same
page again.
"""

import json
import sys

MODE = sys.argv[1] if len(sys.argv) > 1 else ""
NOTHING = {"type": "object", "properties": {}}
TOOLS = [
    {"name": "files.count", "description": "Count\u202e files.\u009b", "inputSchema": NOTHING},
    {"name": "files_count", "inputSchema": NOTHING},
    {"name": "files/count", "inputSchema": NOTHING},
    {"name": "2nd look", "inputSchema": {"type": "object", "properties": {"place": {"$ref": "#/$defs/P"}}, "$defs": {
        "P": {"type": "object", "properties": {"row": {"type": "integer"}, "depth": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}}}},
    {"name": "x" * 100, "inputSchema": NOTHING},
    {"name": "x" * 99, "inputSchema": NOTHING},
    *[{"name": f"tool{number}", "description": "One of many.", "inputSchema": NOTHING} for number in range(1200)],
]  # fmt: skip
if MODE == "bad":
    TOOLS.append({"name": "broken", "inputSchema": {"type": "object", "properties": {"a": {"pattern": "("}}}})
for tool in TOOLS[14:17]:
    tool["outputSchema"] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PAGE = 100
TEXT = {"type": "text", "text": "downloaded"}
FILE = {"type": "resource", "resource": {"uri": "repo://a/b.md", "mimeType": "text/markdown", "text": "# Title"}}
BLOB = {"type": "resource", "resource": {"uri": "repo://a/b.png", "mimeType": "image/png", "blob": "aGk="}}
LINK = {"type": "resource_link", "uri": "repo://a/c.md", "name": "c.md", "description": "The third."}
IMAGE = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
DEEP: dict = {"x": None}
for _ in range(150):
    DEEP = {"x": DEEP}
ANSWERS = {
    "files.count": {"content": [{"type": "text", "text": "3"}]},
    "files/count": {"content": [{"type": "text", "text": "by another name"}]},
    "tool0": {"content": [TEXT, FILE]},
    "tool1": {"content": [LINK, IMAGE]},
    "tool2": {"content": [BLOB]},
    "tool3": {"content": [IMAGE, IMAGE]},
    "tool4": {"content": [{"type": "text", "text": "a" * 3_000_000}], "structuredContent": {"all": "a" * 3_000_000}},
    "tool5": {"content": [{"type": "text", "text": "x\u202ey\u009bz\u2066"}]},
    "tool6": {"content": [TEXT], "structuredContent": DEEP},
    "tool7": {"content": []},
    "tool8": {"content": [TEXT]},
    "tool9": {"content": [TEXT], "structuredContent": {"b": 1}},
    "tool10": {"content": [TEXT], "structuredContent": {"error": 1}, "isError": True},
    "tool11": {"structuredContent": {"a": 1}},
    "tool12": {"content": [{"type": "hologram", "data": "x"}]},
    "tool13": {"content": "downloaded"},
}
ERRORS = {"tool14": -32000, "tool15": -32600, "tool16": -32602, "tool17": -32001}
NOISE = """listening
{"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progress": "half"}}
{"jsonrpc": "2.0", "id": 12345, "result": {}}
{"jsonrpc": "2.0", "id": "a", "method": "sampling/createMessage", "params": {"messages": 1}}"""
"""What ``tool18`` writes before its answer: no JSON, a notification and a request that are not valid, and an answer to
nothing."""


def listed(cursor):
    if MODE == "endless":
        return {"tools": [], "nextCursor": str(int(cursor or 0) + 1)}
    if MODE == "circle":
        return {"tools": TOOLS[:3], "nextCursor": "again"}
    start = int(cursor or 0)
    more = {"nextCursor": str(start + PAGE)} if start + PAGE < len(TOOLS) else {}
    return {"tools": TOOLS[start : start + PAGE], **more}


def answered(method, given):
    if method == "initialize":
        here = {"capabilities": {"tools": {}}, "serverInfo": {"name": "wild", "version": "1"}}
        return {"protocolVersion": given["protocolVersion"], **here}
    if method == "tools/list":
        return listed((given or {}).get("cursor"))
    if method == "tools/call":
        said = {"content": [{"type": "text", "text": json.dumps(given.get("arguments"))}]}
        return ANSWERS.get(given["name"], said)
    return {}


if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked and "method" in asked:
            name = (asked.get("params") or {}).get("name")
            if name == "tool18":
                print(NOISE)
            result = (
                {"error": {"code": ERRORS[name], "message": "the database is locked"}}
                if name in ERRORS
                else {"result": answered(asked["method"], asked.get("params"))}
            )
            print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **result}), flush=True)
