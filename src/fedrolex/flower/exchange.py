"""Messages to nodes, and what they say to them, with a limit of time."""

import time
from collections.abc import Callable, Mapping

from flwr.app import Message
from flwr.serverapp import Grid

POLL = 0.2  # seconds between looks for replies; Flower's own loop takes 3

Stray = Callable[[Message], None]


def exchanged(
    grid: Grid,
    messages: Mapping[int, Message],
    timeout: float,
    *,
    grace: float | None = None,
    enough: int | None = None,
    stray: Stray | None = None,
) -> dict[int, Message]:
    """Send every node its message; the first reply of each that came in time, by node.

    A reply counts only where it comes from the node that was asked, and to the message it was asked with; ``stray`` is
    told of others.

    Args:
        grid: Flower's way to the nodes.
        messages: one for each node.
        timeout: seconds to wait for replies.
        grace: seconds that the others are given once ``enough`` have replied; None waits until ``timeout``.
        enough: replies that make it worth to go on.
        stray: told of a reply to something else, of another node, or for the second time.
    """
    if not messages:
        return {}
    nodes = list(messages)
    ids = list(grid.push_messages([messages[node] for node in nodes]))
    waiting = {sent: node for sent, node in zip(ids, nodes, strict=False) if sent}
    asked, replies = dict(waiting), dict[int, Message]()
    ends = time.monotonic() + timeout
    while waiting and time.monotonic() < ends:
        for reply in grid.pull_messages(list(waiting)):
            node = asked.get(reply.metadata.reply_to_message_id)
            lost = reply.has_error() and reply.metadata.src_node_id not in nodes  # Flower itself says so
            if node is None or node in replies or not (lost or reply.metadata.src_node_id == node):
                if stray is not None:
                    stray(reply)
                continue
            replies[node] = reply
            del waiting[reply.metadata.reply_to_message_id]
        if grace is not None and enough is not None and len(replies) >= enough:
            ends, grace = min(ends, time.monotonic() + grace), None
        if waiting:
            time.sleep(POLL)
    return replies
