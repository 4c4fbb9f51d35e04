"""Tokens of service accounts: issued on request, bound to an account and a pod, accepted until they expire."""

import base64
import json

import pytest
from tests.lab.api.registries import World, registry, thing

from narthex.lab.api.api import ApiHandler
from narthex.lab.api.requests import ApiRequest
from narthex.lab.api.tokens import ISSUER, is_valid_token

PATH = "/api/v1/namespaces/shop/serviceaccounts/web/token"


@pytest.fixture
def world():
    return World()


@pytest.fixture
def api(world):
    made = registry(world)
    made.create("ServiceAccount", thing("web"))
    made.create("Pod", thing("web-0", spec={"containers": [{"name": "c"}]}))
    return ApiHandler(made)


def ask(api, path=PATH, **spec):
    body = json.dumps({"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": spec}).encode()
    answer = api.answer(ApiRequest("POST", path, {}, {"content-type": "application/json"}, body, target=path))
    return answer.status, json.loads(answer.body)


def claims(token):
    part = token.split(".")[1]
    return json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))


def test_a_token_names_its_account_and_pod_and_expires(api, world):
    code, found = ask(api, audiences=["vault"], expirationSeconds=600, boundObjectRef={"kind": "Pod", "name": "web-0"})
    token = found["status"]["token"]
    assert code == 201 and found["status"]["expirationTimestamp"] == "2026-05-05T10:10:00Z"
    made = claims(token)
    assert (made["sub"], made["aud"], made["exp"] - made["iat"]) == ("system:serviceaccount:shop:web", ["vault"], 600)
    assert made["kubernetes.io"]["pod"]["name"] == "web-0"
    assert is_valid_token(api.registry, token)
    world.later(601)
    assert not is_valid_token(api.registry, token)


def test_without_wishes_the_audience_is_the_api_for_an_hour(api):
    made = claims(ask(api)[1]["status"]["token"])
    assert (made["aud"], made["exp"] - made["iat"]) == ([ISSUER], 3600)


@pytest.mark.parametrize(
    ("path", "spec", "code"),
    [
        (PATH, {"expirationSeconds": 599}, 422),
        (PATH, {"boundObjectRef": {"kind": "Pod", "name": "none"}}, 404),
        (PATH, {"boundObjectRef": {"kind": "Pod", "name": "web-0", "uid": "another"}}, 404),
        (PATH.replace("web", "none"), {}, 404),
    ],
)
def test_no_token_for_what_does_not_exist(api, path, spec, code):
    assert ask(api, path, **spec)[0] == code


def test_other_tokens_are_not_accepted(api):
    token = ask(api)[1]["status"]["token"]
    head, body, signature = token.split(".")
    other = registry(World())
    other.token_key = b"another"
    for wrong in ("", "a", "a.b", "a.b.c", f"{head}.{body}", f"{head}.{body}x.{signature}", "é.é.é"):
        assert not is_valid_token(api.registry, wrong)
    assert not is_valid_token(other, token)
