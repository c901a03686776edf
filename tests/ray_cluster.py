"""A Ray cluster of two nodes on this machine's loopback, one for all tests of a process."""

from __future__ import annotations

import atexit
import logging
import os
from functools import cache
from typing import Any

import pytest

NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 * 2**20}


@cache
def two_nodes() -> Any:
    """The cluster, to which this process is connected; skips the test where Ray is not installed."""
    pytest.importorskip("ray", reason="needs fedrolex[ray]")
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    os.environ.setdefault("FEDROLEX_WORKERS", "2")
    import ray
    from ray.cluster_utils import Cluster

    head = {**NODE, "node_ip_address": "127.0.0.2", "include_dashboard": False}  # 127.0.0.1 would not be kept
    cluster = Cluster(initialize_head=True, head_node_args=head)
    atexit.register(cluster.shutdown)
    cluster.add_node(node_ip_address="127.0.0.3", **NODE)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    atexit.register(ray.shutdown)
    return cluster
