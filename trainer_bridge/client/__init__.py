"""Clients of a worker; they need zmq, msgpack and numpy only."""

from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.blocking import RolloutClient

__all__ = ["AsyncRolloutClient", "RolloutClient"]
