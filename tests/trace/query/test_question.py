"""The grammar of questions."""

import pytest

from narthex.model import InputError, Protocol
from narthex.trace.query.question import (
    FATES,
    FORMS,
    Question,
    QuestionKind,
    QuestionSender,
    QuestionTarget,
    read_question,
)

ENDPOINT = QuestionTarget(address="10.244.2.7", port=8080)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.example)
def test_the_example_of_each_form_is_understood(form):
    assert read_question(form.example).kind is form.kind


@pytest.mark.parametrize(
    "text, target",
    [
        ("10.244.2.7:8080", ENDPOINT),
        ("10.244.2.7", QuestionTarget(address="10.244.2.7")),
        ("10.96.0.10:53/udp", QuestionTarget(address="10.96.0.10", port=53, protocol=Protocol.UDP)),
        ("10.96.0.10/TCP", QuestionTarget(address="10.96.0.10", protocol=Protocol.TCP)),
        ("[fd00::a]:53/udp", QuestionTarget(address="fd00::a", port=53, protocol=Protocol.UDP)),
        ("fd00:0::a", QuestionTarget(address="fd00::a")),
        ("shop/web", QuestionTarget(service="shop/web")),
        ("shop/web:http", QuestionTarget(service="shop/web:http")),
        ("shop/web:80", QuestionTarget(service="shop/web", port=80)),
        ("pod shop/web-1", QuestionTarget(pod="shop/web-1")),
        ("pod shop/web-1:8080", QuestionTarget(pod="shop/web-1", port=8080)),
    ],
)
def test_targets(text, target):
    assert read_question(f"who reaches {text}?").target == target
    assert read_question(f"Where does  {text} from pods go").target == target


@pytest.mark.parametrize(
    "text, sender",
    [
        ("anyone", QuestionSender()),
        ("outside", QuestionSender(group="outside")),
        ("Pods", QuestionSender(group="pods")),
        ("pods on node-2", QuestionSender(group="pods", node="node-2")),
        ("other nodes", QuestionSender(group="nodes")),
        ("this node", QuestionSender(group="this node")),
        ("10.244.2.7", QuestionSender(network="10.244.2.7")),
        ("10.244.2.7/16", QuestionSender(network="10.244.0.0/16")),
        ("pod shop/web-1", QuestionSender(pod="shop/web-1")),
    ],
)
def test_senders(text, sender):
    assert read_question(f"what can {text} reach?").sender == sender
    assert read_question(f"what reaches shop/web from {text}?").sender == sender


@pytest.mark.parametrize("fate", FATES)
def test_fates(fate):
    asked = read_question(f"what is {fate.upper()} from outside to shop/web?")
    assert asked == Question(
        text=f"what is {fate.upper()} from outside to shop/web?",
        kind=QuestionKind.FATE,
        target=QuestionTarget(service="shop/web"),
        sender=QuestionSender(group="outside"),
        fate=fate,
    )
    assert read_question(f"what is {fate}").target is None


@pytest.mark.parametrize(
    "text, message",
    [
        ("who talks to shop/web?", "The nearest form: who reaches TARGET"),
        ("what may outside reach?", "The nearest form: what can SENDER reach"),
        ("which Services leave without masquerade?", "The nearest form: which Services can leave"),
        ("", "Forms of questions"),
        ("who reaches web?", "'web' is no target"),
        ("who reaches 10.0.0.1:99999?", "outside 1-65535"),
        ("who reaches 10.0.0.1/quic?", "quic is no protocol"),
        ("who reaches pod shop/web:http?", "the port of a pod is a number"),
        ("who reaches pod web?", "expected NAMESPACE/NAME"),
        ("what can martians reach?", "'martians' is no sender"),
        ("what is lost?", "FATE: refused, dropped"),
    ],
)
def test_other_questions_are_refused_with_what_is_possible(text, message):
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        read_question(text)
