"""A client: what it is asked, what it does with its sub-model, what it answers."""

from fedrolex.clients.messages import MODEL, Failure, Job, Network, RoundPlan, Upload
from fedrolex.clients.slot import Slot
from fedrolex.clients.visit import Visit
from fedrolex.clients.work import LocalTraining

__all__ = ["MODEL", "Failure", "Job", "LocalTraining", "Network", "RoundPlan", "Slot", "Upload", "Visit"]
