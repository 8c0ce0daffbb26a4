"""python -m taugate host status|plan|restore"""

import sys

from taugate.host.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
