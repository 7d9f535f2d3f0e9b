"""Makes `import a2c.unpack_batch` give the function: it takes the place of this module in `sys.modules`."""

import sys

from a2c.transitions import unpack_batch

# The import system takes what stands here afterwards, and sets it as the package's attribute.
sys.modules[__name__] = unpack_batch  # type: ignore[assignment]
