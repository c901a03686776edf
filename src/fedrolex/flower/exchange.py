"""Messages to nodes, and what they say to them, with a limit of time."""

import time
from collections.abc import Callable, Mapping

import httpx
from flwr.app import Error, Message
from flwr.serverapp import Grid

from fedrolex.slicing import one_line

POLL = 0.5  # seconds between looks for replies; Flower's own loop takes 3
UNREADABLE = 0  # Flower's code of an unknown error

Stray = Callable[[Message], None]


def exchanged(
    grid: Grid,
    messages: Mapping[int, Message],
    timeout: float,
    *,
    grace: float | None = None,
    enough: int | None = None,
    stray: Stray = lambda _: None,
) -> dict[int, Message]:
    """Send every node its message; the first reply of each that came in time, by node.

    Replies are fetched one by one, so that what one node sends cannot spoil another's. A reply counts only where it
    comes from the node that was asked, and to the message it was asked with; ``stray`` is told of others. A node whose
    reply cannot be read, or is to something else, has replied with an error.

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
    nodes, replies = list(messages), dict[int, Message]()
    ids = list(grid.push_messages([messages[node] for node in nodes]))
    waiting = {node: sent for sent, node in zip(ids, nodes, strict=False) if sent}
    ends = time.monotonic() + timeout
    while waiting and time.monotonic() < ends:
        for node, sent in list(waiting.items()):
            found = _arrived(grid, sent, messages[node], stray)
            if found is not None:
                replies[node] = found
                del waiting[node]
        if grace is not None and enough is not None and len(replies) >= enough:
            ends, grace = min(ends, time.monotonic() + grace), None
        if waiting:
            time.sleep(POLL)
    return replies


def answers(reply: Message, sent: str, node: int) -> bool:
    """Whether a reply is to a message, by the node that got it; or Flower itself says that there will be none."""
    lost = reply.has_error() and reply.metadata.src_node_id != node
    return reply.metadata.reply_to_message_id == sent and (lost or reply.metadata.src_node_id == node)


def _arrived(grid: Grid, sent: str, message: Message, stray: Stray) -> Message | None:
    """What came for one message; None as long as nothing did."""
    node = message.metadata.dst_node_id
    try:
        came = list(grid.pull_messages([sent]))
        fitting = [place for place, reply in enumerate(came) if answers(reply, sent, node)][:1]
        for place, reply in enumerate(came):
            if place not in fitting:
                stray(reply)
    except (OSError, httpx.HTTPError):  # the way to the SuperLink, not what a node sent
        raise
    except Exception as error:  # whatever a node sends, the run goes on
        return Message(Error(UNREADABLE, f"sent what cannot be read: {one_line(error)}"), reply_to=message)
    if came and not fitting:
        return Message(Error(UNREADABLE, "sent a reply to something else"), reply_to=message)
    return came[fitting[0]] if fitting else None
