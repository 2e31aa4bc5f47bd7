"""What a rewrite may assume of a graph, and must leave as it found it.

Each of these was once broken by a rewrite that was right for the case it was written for. They
are stated here once, and a :class:`~legality.checker.Checker` holds every graph against them after
each rewrite (``torch_scan_hop.legality``), so that what breaks one is named by the rewrite that did:

``structure``  a graph of ATen operators, with the inputs and outputs that its signature says
``writes``     nothing is written in place: what a step makes may be made once, for all steps
``values``     what is recorded of each value is what running its operator gives
``moves``      what leaves the loop gives the same there: no carry, no random draw, no effect, and
               only operators whose batching is known to be right
"""

from __future__ import annotations


class IllegalRewrite(AssertionError):
    """A rewrite gave what no rewrite may give."""
