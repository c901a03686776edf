"""Real devices: the same methods, tasks and recipes on a fleet of Flower nodes.

Needs the extra ``fedrolex[flower]``.
"""

from fedrolex.core import FedrolexError

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise FedrolexError("fedrolex.flower needs Flower: pip install 'fedrolex[flower]'") from error

from fedrolex.flower.client_app import client_app
from fedrolex.flower.own_data import own_data
from fedrolex.flower.server_app import server_app, train_on
from fedrolex.flower.settings import Settings
from fedrolex.flower.strategy import SubModelStrategy

__all__ = ["Settings", "SubModelStrategy", "client_app", "own_data", "server_app", "train_on"]
