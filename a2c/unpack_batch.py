"""`import a2c.unpack_batch`, as a statement: the function stands where Python would put a module."""

import sys

from a2c.transitions import unpack_batch

# The import system takes what stands here afterwards, and sets it as the package's attribute.
sys.modules[__name__] = unpack_batch  # type: ignore[assignment]
