"""Comparison of the kernel's own trace of a packet with the predicted path.

It compares what moves a packet: jumps, verdicts, and policies that drop, chain by chain. Side effects (marks, counters, sets) and
accepting policies are shown but not compared, and neither is the text of rules, which the kernel's tools print in several forms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

from narthex.model import visible
from narthex.netfilter.dump.kernel_trace import KernelStep, KernelTrace, TraceEvent
from narthex.trace.follow.steps import fails, final_ends
from narthex.trace.model import Fate, PacketPath, PathLeaf, PathStep, Stage

_AFTER_REWRITING = ("dnat", "snat", "masquerade", "redirect")
_AT_THE_END = re.compile(r": ((?:goto|jump) \S+|return|accept|drop)(?: \})?$")


_OTHER_ORDER = "the kernel runs the tables of a hook in another order than predicted, to the same end"


class AlignedPair(msgspec.Struct, frozen=True, kw_only=True):
    """A step of the kernel and the predicted step, one of which may be missing."""

    kernel: str = ""
    predicted: str = ""
    same: bool = True


class Alignment(msgspec.Struct, frozen=True, kw_only=True):
    """How far kernel and prediction agree."""

    agrees: bool
    pairs: tuple[AlignedPair, ...]
    """For the predicted alternative that agrees longest."""
    parting: str = ""
    """Where they differ; empty if they agree."""
    notes: tuple[str, ...] = ()


class _Move(msgspec.Struct, frozen=True):
    """How a step moves the packet between chains."""

    table: str
    chain: str
    what: str
    text: str
    hook: str = ""
    """The hook of a predicted step."""
    rewrites: bool = False
    """The rule of a predicted step rewrites the packet, which ends the nat chains of a hook."""

    @property
    def key(self) -> tuple[str, str, str]:
        """The fields that have to agree."""
        return self.table, self.chain, self.what


def align(path: PacketPath, trace: KernelTrace | None, node: str = "") -> Alignment:
    """Compare one node's part of a path with its kernel's trace; an empty `node` stands for the whole path.

    Rules of iptables-legacy are left out, because nft's tracing doesn't report them.
    """
    leaves = path.leaves()
    legacy = any(_is_legacy(step) for leaf in leaves for step in leaf.steps)
    notes: tuple[str, ...] = (
        ("the kernel's tracing does not tell of iptables-legacy: those rules are left out",) if legacy else ()
    )
    if trace is None:
        # One way past the node's rules is enough: a fault may lose the packet before them.
        expected = all(any(True for _ in _predicted(leaf, node)) for leaf in leaves)
        parting = "the kernel's hooks never saw the packet, though the prediction has it there" if expected else ""
        return Alignment(agrees=not expected, pairs=(), parting=parting, notes=notes)
    kernel = list(_kernel_moves(trace))
    best: tuple[bool, int, list[_Move]] = (False, -1, [])
    reordered = False
    for leaf in leaves:
        as_listed = list(_predicted(leaf, node))
        predicted = _in_kernel_order(kernel, as_listed)
        shared = _shared(kernel, predicted)
        whole = shared == len(predicted) and (shared == len(kernel) or (shared > 0 and _comes_back(leaf, node)))
        shared = len(kernel) if whole else shared
        if (whole, shared) > best[:2]:
            best, reordered = (whole, shared, predicted), predicted != as_listed
    agrees, shared, predicted = best
    if reordered:
        notes += (_OTHER_ORDER,)
    parting = "" if agrees else _parting(kernel, predicted, shared)
    return Alignment(agrees=agrees, pairs=tuple(_pairs(trace, predicted, shared)), parting=parting, notes=notes)


def with_answer(alignment: Alignment, path: PacketPath, answer: str) -> Alignment:
    """Return the comparison with the answer that the sender received taken into account, as `ProbeOutcome.answer` has it."""
    if not alignment.agrees:
        return alignment
    # A relay accepts each connection of TCP, whatever becomes of its own.
    accepted = [leaf for leaf in path.leaves() if path.packet.protocol == "tcp" and is_relayed(leaf)]
    others = [leaf for leaf in path.leaves() if leaf not in accepted]
    ends = [end for leaf in others for end in final_ends([(leaf.probability, leaf.steps, leaf.end)])]
    parting = ""
    if answer in ("connected", "answered") and not accepted and fails(ends):
        parting = "the sender was answered, though no packet, or no reply, should arrive"
    elif answer == "nothing" and path.packet.protocol == "tcp" and all(end.fate is Fate.DELIVERED for end in ends):
        parting = "nothing came back, though each packet and each reply should arrive"
    return msgspec.structs.replace(alignment, agrees=not parting, parting=parting)


def is_relayed(leaf: PathLeaf) -> bool:
    """Return True if a userspace relay takes the packet and opens a connection of its own."""
    return any(step.stage is Stage.RELAY for step in leaf.steps)


def _is_legacy(step: PathStep) -> bool:
    return "iptables-legacy" in step.place or "ip6tables-legacy" in step.place


def _kernel_moves(trace: KernelTrace) -> Iterator[_Move]:
    for step in trace.steps:
        what = _kernel_move(step)
        if what:
            yield _Move(step.table, step.chain, what, _kernel_text(step))


def _kernel_move(step: KernelStep) -> str:
    if step.verdict == "continue" or (step.event is not TraceEvent.RULE and step.verdict != "drop"):
        return ""
    return step.verdict


def _kernel_text(step: KernelStep) -> str:
    what = step.verdict or step.event.value
    said = f"policy {what}" if step.event is TraceEvent.POLICY else what
    return f"{step.family} {step.table} {step.chain}: {step.rule + ': ' if step.rule else ''}{said}"


def _predicted(leaf: PathLeaf, node: str) -> Iterator[_Move]:
    sent = passed = False
    for step in leaf.steps:
        if step.stage is Stage.RELAY:
            # What the relay sends is another packet.
            return
        if not step.chain or step.namespace or (node and step.node != node) or _is_legacy(step):
            continue
        if step.stage in (Stage.OUTPUT, Stage.POSTROUTING):
            sent = True
        elif sent or (step.stage is Stage.PREROUTING and passed):
            # The packet comes in once more, over loopback or in a loop of routes; the kernel traces that as another packet.
            return
        passed = passed or step.stage is not Stage.PREROUTING
        what = _predicted_move(step.verdict)
        if what:
            rewrites = step.verdict.startswith(_AFTER_REWRITING)
            yield _Move(step.table, step.chain, what, _predicted_text(step), step.stage.value, rewrites)


def _comes_back(leaf: PathLeaf, node: str) -> bool:
    """Return True if a loop of routes forwards the packet through the node again.

    The kernel may give the number of the first pass to the later ones too, so that they follow it in its trace.
    """
    stages = [step.stage for step in leaf.steps if step.chain and not step.namespace and node in ("", step.node)]
    left = stages.index(Stage.POSTROUTING) if Stage.POSTROUTING in stages else len(stages)
    return Stage.FORWARD in stages[left:]


def _predicted_move(verdict: str) -> str:
    """Return a verdict in the kernel's terms. Map elements and random draws have theirs at the end."""
    inside = _AT_THE_END.search(verdict)
    if inside is not None:
        return inside[1]
    word = verdict.removeprefix("policy ").partition(" ")[0]
    if word in _AFTER_REWRITING:
        return "accept"
    if word == "reject":
        return "drop"
    if verdict == "policy accept":
        return ""
    return verdict.removeprefix("policy ") if word in ("accept", "drop", "jump", "goto", "return") else ""


def _predicted_text(step: PathStep) -> str:
    return f"{step.table} {step.chain}: {step.rule or step.what}"


def _in_kernel_order(kernel: Sequence[_Move], predicted: Sequence[_Move]) -> list[_Move]:
    """Return predicted moves with the tables of each hook in the kernel's order, in which what it did not reach is left out.

    At one priority the order is that of registration, which dumps do not always show.
    """
    ordered: list[_Move] = []
    for _, of_hook in groupby(predicted, key=lambda move: move.hook):
        blocks = [list(block) for _, block in groupby(of_hook, key=lambda move: move.table)]
        ended = False
        while blocks:
            at = len(ordered)
            fitting = next((block for block in blocks if _shared(kernel[at:], block) == len(block)), None)
            if fitting is None and ended:
                break
            block = fitting or blocks[0]
            blocks.remove(block)
            ordered += block
            ended = fitting is not None and (block[-1].what == "drop" or block[-1].rewrites)
    return ordered


def _shared(kernel: Sequence[_Move], predicted: Sequence[_Move]) -> int:
    count = 0
    for one, other in zip(kernel, predicted, strict=False):
        if one.key != other.key:
            break
        count += 1
    return count


def _parting(kernel: Sequence[_Move], predicted: Sequence[_Move], shared: int) -> str:
    said = f"the kernel: {kernel[shared].text}" if shared < len(kernel) else "the kernel reports nothing more"
    meant = f"predicted: {predicted[shared].text}" if shared < len(predicted) else "nothing more was predicted"
    after = f"after {kernel[shared - 1].text}: " if shared else "at once: "
    return f"{after}{said}; {meant}"


def _pairs(trace: KernelTrace, predicted: Sequence[_Move], shared: int) -> Iterator[AlignedPair]:
    moves = 0
    for step in trace.steps:
        if not _kernel_move(step):
            yield AlignedPair(kernel=_kernel_text(step))
            continue
        meant = predicted[moves].text if moves < len(predicted) else ""
        yield AlignedPair(kernel=_kernel_text(step), predicted=meant, same=moves < shared)
        moves += 1
    yield from (AlignedPair(predicted=each.text, same=False) for each in predicted[moves:])


def text(alignment: Alignment) -> str:
    """Return the comparison as text that ends with a newline."""
    lines = [
        f"   {'' if pair.same else '! '}{pair.kernel or f'predicted: {pair.predicted}'}" for pair in alignment.pairs
    ]
    lines += [f"   note: {note}" for note in alignment.notes]
    lines.append(
        "prediction and kernel agree" if alignment.agrees else f"prediction and kernel PART {alignment.parting}"
    )
    return "".join(f"{visible(line)}\n" for line in lines)
