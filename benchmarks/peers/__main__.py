"""Build or list the peers' environments: `python -m benchmarks.peers build torch`."""

import argparse
from pathlib import Path

from benchmarks.peers.recipes import DEFAULT_PEERS_DIR, ENVIRONMENTS, build


def main() -> None:
    """Parse the command line and do the one thing it asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_PEERS_DIR)
    verbs = parser.add_subparsers(dest="verb", required=True)
    builder = verbs.add_parser("build", help="make environments from package names")
    builder.add_argument("names", nargs="+", choices=sorted(ENVIRONMENTS))
    verbs.add_parser("list", help="show the environments and whether they exist")
    arguments = parser.parse_args()
    if arguments.verb == "build":
        for name in arguments.names:
            print(build(name, arguments.peers_dir))
        return
    for name, recipe in ENVIRONMENTS.items():
        there = (arguments.peers_dir / name / "bin" / "python").exists()
        state = "built" if there else "missing"
        print(f"{name:10} python {recipe.python}  {' '.join(recipe.packages)}  {state}")


if __name__ == "__main__":
    main()
