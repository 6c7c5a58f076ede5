"""The filter: which tokens of every row can be sampled, and their weights."""

from gpu.support.record import Support, Walk, check_host_support, check_support
from gpu.support.select import FILTER_ORDERS, select_support

__all__ = ["FILTER_ORDERS", "Support", "Walk", "check_host_support", "check_support", "select_support"]
