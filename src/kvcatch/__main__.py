"""``python -m kvcatch``."""

import sys

from kvcatch.cli.main import main

sys.exit(main())
