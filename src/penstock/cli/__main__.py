"""`python -m penstock.cli` is `penstock`."""

import sys

from penstock.cli.main import main

sys.exit(main())
