"""Who may send requests to the server: names in Host, origins of web pages, and a key.

Browsers ask before a page of another origin sends JSON (CORS), and other bodies are refused.
"""

import ipaddress
import re
import secrets
from dataclasses import dataclass
from typing import Annotated, Sequence

from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from posenc_export.serve.requests import refused
from posenc_export.shared.refusal import refusal

LOCAL = ("localhost", "127.0.0.1", "[::1]")
ANY = "*"
BEARER = HTTPBearer(auto_error=False, description="The key of the server, if it has one.")


@dataclass(frozen=True)
class Access:
    """Rules for requests."""

    hosts: tuple[str, ...] = (ANY,)  # accepted names in the header Host, without port; "*" for all
    origins: tuple[str, ...] = ()  # other origins whose pages may send requests; "*" for all
    # Requests of /v1 and /metrics need it as `Authorization: Bearer KEY`; empty for none
    key: str = ""

    def check_key(
        self, authorization: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]
    ) -> None:
        """Refuse requests without the key with status 401, in the same time for every wrong key."""
        key = authorization.credentials if authorization else ""
        if self.key and not secrets.compare_digest(key.encode(), self.key.encode()):
            got = "another key" if authorization else "no key"
            rule = "Authorization: Bearer with the key of this server"
            raise refused("key", rule, got, "send its key", 401)

    def protect(self, app: FastAPI) -> None:
        """Add the checks of Host and of requests that browsers send ahead (CORS)."""
        if self.origins:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=self.origins,
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type"],
            )
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=self.hosts, www_redirect=False)


def access(host: str, address: str, origins: Sequence[str] = (), key: str | None = None) -> Access:
    """Return the rules of a server: any Host if it listens on all addresses, otherwise `host` and
    the local names; pages of `origins`. Raise ValueError for an origin that is none, and a key that
    is empty or that a header cannot carry.
    """
    for origin in origins:
        if origin != ANY and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
            rule = "an origin as scheme://host or scheme://host:port"
            raise refusal("serve", rule, origin, "change --allow-origin")
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        rule = "a key of printable ASCII characters without spaces"
        raise refusal("serve", rule, "an empty one or other characters", "change --api-key")
    hosts = tuple(dict.fromkeys((f"[{host}]" if ":" in host else host, *LOCAL)))
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        hosts = (ANY,)
    return Access(hosts, tuple(origins), key or "")
