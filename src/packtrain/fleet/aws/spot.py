"""Preemption notices of EC2, from the metadata service of the machine that a node runs on."""

from __future__ import annotations

import calendar
import json
import time

from packtrain.fleet.aws.instance import metadata
from packtrain.node.preemption import PreemptionNotice

NOTICE_SECONDS = 120.0
"""The time between EC2's notice and the end of a spot machine."""


def spot_notice() -> PreemptionNotice | None:
    """Return the notice that EC2 is about to take this machine away, or the advice that it may do so soon.

    The advice may come long before the notice, or together with it, or without one: the group then starts another
    machine first.
    """
    if (found := metadata("spot/instance-action")) is not None:
        action = json.loads(found)
        return PreemptionNotice(f"preemption notice: EC2 will {action['action']} this machine", _left(action["time"]))
    if metadata("events/recommendations/rebalance") is not None:
        return PreemptionNotice("EC2 recommends rebalancing: it may take this machine away soon", certain=False)
    return None


def _left(end: str) -> float:
    try:
        left = calendar.timegm(time.strptime(end, "%Y-%m-%dT%H:%M:%SZ")) - time.time()
    except ValueError:
        return NOTICE_SECONDS
    return min(max(left, 1.0), NOTICE_SECONDS)  # whatever this machine's clock says
