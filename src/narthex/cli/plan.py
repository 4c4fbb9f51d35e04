"""`narthex plan`: the plan as a table."""

from __future__ import annotations

from typing import Any

import click

from narthex.cli.inputs import inputs_of, options, source_options
from narthex.cli.options import output_option
from narthex.cli.output import print_document, working
from narthex.proxy.plan.document import PlanDocument, plan_record
from narthex.proxy.plan.show import table


@click.command()
@source_options
@options
@click.option("--all-endpoints", is_flag=True, help="Do not shorten lists of endpoints.")
@output_option
def command(all_endpoints: bool, output: str, **given: Any) -> None:
    """Show the decision for every packet to a Service on one node, as one table per IP family.

    An asterisk marks an endpoint on this node.
    """
    inputs = inputs_of(given)
    with working("planning"):
        plans = [inputs.plan(family) for family in inputs.families]
    document = PlanDocument(
        node=inputs.config.node_name, mode=inputs.mode, plans=tuple(plan_record(plan) for plan in plans)
    )
    print_document(document, output, lambda: "\n".join(table(plan, all_endpoints) for plan in plans))
