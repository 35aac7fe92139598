"""A server of tools for tests, written with either version of the package ``mcp``: ``python mcp_test_server.py
[PORT]``."""

import base64
import os
import sys
import time

try:
    from mcp.server.mcpserver import Image
    from mcp.server.mcpserver import MCPServer as Maker
except ImportError:
    from mcp.server.fastmcp import FastMCP as Maker
    from mcp.server.fastmcp import Image

PORT = next((int(word) for word in sys.argv[1:] if word.isdigit()), None)
server = Maker("shop", **({"port": PORT} if PORT and Maker.__name__ == "FastMCP" else {}))
bought = 0


@server.tool()
def price(fruit: str, count: int = 1) -> str:
    """Say what fruit costs."""
    if fruit == "stone":
        raise ValueError("a stone is not for sale")
    return f"{count} {fruit} cost {3 * count}"


@server.tool()
def buy(count: int) -> str:
    """Buy apples, and say how many were bought since the server began."""
    global bought
    bought += count
    return f"{bought} apples"


@server.tool()
def lines() -> list[str]:
    """Return two texts."""
    return ["one", "two"]


@server.tool()
def empty() -> list[str]:
    """Return nothing."""
    return []


@server.tool()
def picture() -> Image:
    """Return a picture."""
    return Image(data=base64.b64decode("iVBORw0KGgo="), format="png")


@server.tool()
async def slow(seconds: float) -> str:
    """Answer late."""
    import anyio

    await anyio.sleep(seconds)
    return "late"


@server.tool()
async def hang() -> str:
    """Hang, so that nobody else is answered."""
    time.sleep(3600)
    return "never"


@server.tool()
def die() -> str:
    """End the process at once."""
    os._exit(3)


@server.tool()
def variables() -> str:
    """Return the names of the environment variables."""
    return " ".join(sorted(os.environ))


if __name__ == "__main__":
    if "--broken" in sys.argv:
        sys.exit("no database here")
    if "--silent" in sys.argv:
        time.sleep(3600)
    if PORT is None:
        server.run("stdio")
    elif Maker.__name__ == "FastMCP":
        server.run("streamable-http")
    else:
        server.run("streamable-http", port=PORT)
