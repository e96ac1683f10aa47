"""The engine's edge: the only folder of the library that imports vllm and torch."""

from ucmcache.connector.connector import UcmCacheConnector

__all__ = ["UcmCacheConnector"]
