"""A Ray cluster of two nodes on this machine's loopback, one for all tests that need it.

They run first (conftest.py), so in one process, and the cluster ends with the last of them: its threads would be in the
way of tests that fork.
"""

from __future__ import annotations

import atexit
import logging
import os
from functools import cache
from typing import Any

import pytest

from fedrolex.engines.ray.cluster import own_signals

NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 * 2**20}


@cache
def two_nodes() -> Any:
    """The cluster, to which this process is connected; skips the test where Ray is not installed."""
    pytest.importorskip("ray", reason="needs fedrolex[ray]")
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    os.environ.setdefault("FEDROLEX_WORKERS", "2")
    import ray
    from ray.cluster_utils import Cluster

    with own_signals():
        head = {**NODE, "node_ip_address": "127.0.0.2", "include_dashboard": False}  # 127.0.0.1 would not be kept
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(node_ip_address="127.0.0.3", **NODE)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    atexit.register(stop)
    return cluster


def added_node(cluster: Any, address: str) -> Any:
    """One node more; Ray takes SIGTERM over with every node that it starts."""
    with own_signals():
        return cluster.add_node(node_ip_address=address, **NODE)


def stop() -> None:
    """End the cluster, if there is one."""
    if two_nodes.cache_info().currsize == 0:
        return
    import ray

    cluster = two_nodes()
    atexit.unregister(stop)
    two_nodes.cache_clear()
    ray.shutdown()
    cluster.shutdown()


def needed_by(item: pytest.Item) -> bool:
    """Whether a test needs the cluster: it asks for it, or for the engine."""
    asked = getattr(item, "callspec", None)
    engine = None if asked is None else asked.params.get("engine")
    return engine == "ray" or "cluster" in getattr(item, "fixturenames", ())
