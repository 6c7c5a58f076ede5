"""A key-value cache whose rows have lengths of their own.

A row lives in a slot. The cache index of an entry IS its token's absolute position: new keys and
values are scattered to [slot, head, position], and an entry beyond a row's own query positions is
hidden by the attention mask, so rejected drafts are simply overwritten later. There is no padding
on the left and no crop.

row_cache.py: the cache. step.py: where a forward's entries go. storage.py: the memory, and how it grows. layer.py: one
layer, as transformers sees it. snapshot.py: a row copied out.
"""

from model_loaders.kv_cache.row_cache import RowCache
from model_loaders.kv_cache.snapshot import RowSnapshot
from model_loaders.kv_cache.step import DeviceSlots, Slots

__all__ = ["DeviceSlots", "RowCache", "RowSnapshot", "Slots"]
