"""MCP server of tests: `python -m tests.support.mcp_server [port]`; without a port over standard input and output."""

from __future__ import annotations

import base64
import sys

from mcp.server import MCPServer
from mcp.types import ImageContent

server = MCPServer("shop")


@server.tool()
def price(article: str, count: int = 1) -> str:
    """Price of an article."""
    if article != "bolt":
        raise ValueError(f"no article {article}")
    return str(3 * count)


@server.tool()
def photo() -> ImageContent:
    """Photo of the shop."""
    return ImageContent(type="image", data=base64.b64encode(b"pixels").decode(), mime_type="image/png")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    else:
        server.run(transport="stdio")
