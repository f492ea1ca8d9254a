"""Tokens: who may join, for which round, until when."""

from __future__ import annotations

import base64
import binascii
import json
import time

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC

from flower_geo.errors import ConfigError, TokenRefused

__all__ = ["MAX_TOKEN", "check_token", "issue_token"]

#: Letters of a token.
MAX_TOKEN = 128
#: Bytes of the shared secret, at least.
MIN_SECRET = 16


def issue_token(secret: bytes, run: str, site: str, round: int, seconds: float) -> str:
    """A token with which ``site`` may join ``round`` of ``run`` for so many seconds.

    It is the expiry (whole seconds since 1970, as the issuer's clock has it) and an
    HMAC-SHA256 over run, site, round and expiry.
    """
    expiry = int(time.time() + seconds)
    mac = base64.urlsafe_b64encode(_signed(secret, run, site, round, expiry).finalize())
    return f"{expiry}.{mac.decode().rstrip('=')}"


def check_token(
    secret: bytes, token: str, run: str, site: str, round: int, *, expired: bool = False
) -> None:
    """Check a token in constant time.

    One that is too old is taken when ``expired`` is allowed: for a session already open.

    Raises:
        TokenRefused: it is wrong, of another run, site or round, or too old.
    """
    head, _, tail = token[:MAX_TOKEN].partition(".")
    try:
        expiry = int(head) if head.isascii() and head.isdigit() and len(head) <= 16 else -1
        mac = base64.urlsafe_b64decode(tail + "=" * (-len(tail) % 4))
        _signed(secret, run, site, round, expiry).verify(mac)
    except (InvalidSignature, binascii.Error, ValueError):
        raise TokenRefused(
            f"the token of site {site[:64]!r} is not one for this run and round {round}"
        ) from None
    if expiry < time.time() and not expired:
        raise TokenRefused(
            f"the token of site {site[:64]!r} is too old; have the coordinator issue a new one"
        )


def _signed(secret: bytes, run: str, site: str, round: int, expiry: int) -> HMAC:
    if len(secret) < MIN_SECRET:
        raise ConfigError(f"the secret for tokens has {len(secret)} bytes; give {MIN_SECRET}")
    mac = HMAC(secret, SHA256())
    mac.update(json.dumps(["flower-geo split", run, site, round, expiry]).encode())
    return mac
