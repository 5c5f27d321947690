"""Model stores, and the cache of fetched models."""

from serving.store.cache import Cache, Fetched
from serving.store.catalog import Store, StoredModel, public_url
from serving.store.lookups import Lookups
from serving.store.root_files import RootFiles
from serving.store.sources import Sources, open_store
from serving.store.stopping import Stop

__all__ = [
    "Cache",
    "Fetched",
    "Lookups",
    "RootFiles",
    "Sources",
    "Stop",
    "Store",
    "StoredModel",
    "open_store",
    "public_url",
]
