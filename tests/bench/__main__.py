"""`python -m tests.bench`, which `make bench` runs; the ranks import this file and must find it light."""

import sys

if __name__ == "__main__":
    from . import main

    sys.exit(main())
