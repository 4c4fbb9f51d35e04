"""Questions about what one may do. Here everybody who has the token may do all."""

from __future__ import annotations

from typing import Any

from narthex.lab.api.bodies import decoded
from narthex.lab.api.discovery import REVIEWS
from narthex.lab.api.requests import Request, Whole, encoded

_PLACES = {f"/apis/authorization.k8s.io/v1/{kind.lower()}s": kind for kind in REVIEWS}
_ALL = ["*"]
_RULES = {
    "resourceRules": [{"verbs": _ALL, "apiGroups": _ALL, "resources": _ALL}],
    "nonResourceRules": [{"verbs": _ALL, "nonResourceURLs": _ALL}],
    "incomplete": False,
}


def review(request: Request) -> Whole | None:
    """The answer to a question, None when the request is none. Raises ApiFault."""
    kind = _PLACES.get(request.path)
    if kind is None or request.method != "POST":
        return None
    # Newer clients ask in protocol buffers, and understand JSON. The question does not matter to the answer.
    given: dict[str, Any] = {} if request.body.startswith(b"k8s\0") else decoded(request)
    status = (
        _RULES if kind == "SelfSubjectRulesReview" else {"allowed": True, "reason": "the lab's token may do everything"}
    )
    return encoded(201, {**given, "kind": kind, "apiVersion": "authorization.k8s.io/v1", "status": status})
