"""`python -m a2c` runs the console script `a2c`."""

from a2c.cli.commands import main

raise SystemExit(main())
