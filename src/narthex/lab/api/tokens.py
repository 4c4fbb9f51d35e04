"""Tokens of service accounts: JSON Web Tokens that the API server issues (TokenRequest) and accepts until they expire.

They have the claims of Kubernetes' own tokens (pkg/serviceaccount/claims.go). The signature is an HMAC (HS256), since only the
issuer verifies it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from narthex.lab.api import errors
from narthex.lab.api.errors import FieldError
from narthex.lab.api.registry import Registry, stamp
from narthex.lab.api.requests import ApiPath
from narthex.lab.api.store import Raw

ISSUER = "https://kubernetes.default.svc.cluster.local"
_HEADER = {"alg": "HS256", "typ": "JWT"}
_DEFAULT_SECONDS, _LEAST_SECONDS, _MOST_SECONDS = 3600, 600, 1 << 32


class _Claims(msgspec.Struct):
    exp: int


_CLAIMS = msgspec.json.Decoder(_Claims)


def request_token(registry: Registry, where: ApiPath, given: Mapping[str, Any]) -> Raw:
    """Issue the token that a TokenRequest asks for. Raises StatusError."""
    if registry.get("ServiceAccount", where.namespace, where.name) is None:
        raise where.not_found()
    spec = given.get("spec") or {}
    seconds = spec.get("expirationSeconds")
    seconds = _DEFAULT_SECONDS if seconds is None else seconds
    if not isinstance(seconds, int) or not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
        text = (
            f"Invalid value: {seconds!r}: may not specify a duration less than 10 minutes or larger than 2^32 seconds"
        )
        faults = [FieldError("spec.expirationSeconds", "FieldValueInvalid", text)]
        raise errors.invalid("TokenRequest", "authentication.k8s.io", where.name, faults)
    bound = spec.get("boundObjectRef") or {}
    pod = registry.get("Pod", where.namespace, str(bound.get("name"))) if bound.get("kind") == "Pod" else None
    if bound and (pod is None or bound.get("uid") not in (None, "", pod["metadata"]["uid"])):
        raise errors.not_found("pods", "", str(bound.get("name")))
    audiences = spec.get("audiences") or [ISSUER]
    token, expires = issue_token(registry, where.namespace, where.name, audiences, seconds, pod)
    return {
        "kind": "TokenRequest",
        "apiVersion": "authentication.k8s.io/v1",
        "metadata": {"name": where.name, "namespace": where.namespace, "creationTimestamp": registry.stamp()},
        "spec": {**spec, "audiences": list(audiences), "expirationSeconds": seconds},
        "status": {"token": token, "expirationTimestamp": expires},
    }


def issue_token(
    registry: Registry,
    namespace: str,
    account: str,
    audiences: Sequence[str],
    seconds: int,
    pod: Mapping[str, Any] | None = None,
) -> tuple[str, str]:
    """Return a token of a service account and the time at which it expires, as `metav1.Time`."""
    now = registry.now()
    end, began = now + timedelta(seconds=seconds), int(now.timestamp())
    holder = registry.get("ServiceAccount", namespace, account) or {"metadata": {}}
    bound: Raw = {"namespace": namespace, "serviceaccount": {"name": account, "uid": holder["metadata"].get("uid", "")}}
    if pod is not None:
        bound["pod"] = {"name": pod["metadata"]["name"], "uid": pod["metadata"].get("uid", "")}
    claims = {
        "aud": list(audiences),
        "exp": int(end.timestamp()),
        "iat": began,
        "iss": ISSUER,
        "kubernetes.io": bound,
        "nbf": began,
        "sub": f"system:serviceaccount:{namespace}:{account}",
    }
    signed = f"{_encoded(msgspec.json.encode(_HEADER))}.{_encoded(msgspec.json.encode(claims))}"
    return f"{signed}.{_signature(registry, signed)}", stamp(end)


def is_valid_token(registry: Registry, token: str) -> bool:
    """Return True if the registry's key signed a token that has not expired."""
    signed, _, signature = token.rpartition(".")
    if not hmac.compare_digest(signature.encode(), _signature(registry, signed).encode()):
        return False
    claims = signed.partition(".")[2]
    end = _CLAIMS.decode(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4))).exp
    return registry.now().timestamp() < end


def _signature(registry: Registry, signed: str) -> str:
    return _encoded(hmac.digest(registry.token_key, signed.encode(), hashlib.sha256))


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
