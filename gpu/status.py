"""Row and request statuses (uint8). A status is a result: kernels never raise, the host does."""

OK = 0
OVERFLOW = 1  # the true support is larger than the cap; nothing was truncated
INVALID = 2  # NaN, +inf or no finite logit, or a drafted token that can't have been proposed; beats OVERFLOW
