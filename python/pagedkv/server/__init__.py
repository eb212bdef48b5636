"""The OpenAI-compatible server. Needs the extra `serve` (FastAPI, uvicorn, prometheus-client)."""

from pagedkv.server.app import create_app
from pagedkv.server.guards import Access
from pagedkv.server.limits import Limits
from pagedkv.server.running import Server, hosts_of, listen

__all__ = ["Access", "Limits", "Server", "create_app", "hosts_of", "listen"]
