"""Model stores, and the cache of fetched models."""

from serving.store.cache import Cache, Fetched
from serving.store.catalog import Store, StoredModel, public_url
from serving.store.locate import locate, open_store
from serving.store.lookups import Lookups
from serving.store.root_files import RootFiles
from serving.store.settings import StoreSettings
from serving.store.stopping import Stop

__all__ = [
    "Cache",
    "Fetched",
    "Lookups",
    "RootFiles",
    "Stop",
    "Store",
    "StoreSettings",
    "StoredModel",
    "locate",
    "open_store",
    "public_url",
]
