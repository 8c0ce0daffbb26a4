"""python -m taugate host status|plan|restore
python -m taugate numerics discriminate|effect
"""

import sys


def main(argv: list[str]) -> int:
    if argv[:1] == ["numerics"]:
        from taugate.pipeline.numerics import main as numerics

        return numerics(argv[1:])
    from taugate.host.cli import main as host

    return host(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
