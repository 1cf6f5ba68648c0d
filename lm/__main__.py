import sys

from lm.cli.main import main

sys.exit(main())
