"""Makes this Python one that was built against old headers."""

import os

for name in (
    "close_range",
    "eventfd",
    "eventfd_read",
    "eventfd_write",
    "memfd_create",
    "pidfd_open",
    "preadv",
    "unshare",
):
    if hasattr(os, name):
        delattr(os, name)
