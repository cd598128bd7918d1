"""Get data sets ready for graphattn: fetch, check and convert them to NAME.npz.

python datasets/prepare.py --list
python datasets/prepare.py ogbn-arxiv cora
"""

import argparse
import sys
from pathlib import Path

from graphattn.data import load
from graphattn.data.ogb import CHECKSUMS, MAG, OGB, find_raw, stale_cache
from graphattn.data.sources import SOURCES, prepare

HERE = Path(__file__).resolve().parent
NAMES = sorted({*OGB, MAG, *SOURCES})
LARGE = {MAG, "ogbn-products", "ogbn-proteins"}  # gigabytes on disk and in memory: by name only


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows the program's name; default that of the process.

    Returns:
        0 if every set is ready, 1 if one is not. Wrong usage exits with 2.
    """
    parser = argparse.ArgumentParser(
        prog="prepare.py",
        description="Fetch, check and convert data sets to NAME.npz. Nothing is asked; sets that "
        "are there are "
        "only checked; a broken download is resumed.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a set to get ready; see --list")
    parser.add_argument(
        "--root", type=Path, default=HERE, help="where the sets are kept (default: this folder)"
    )
    parser.add_argument("--list", action="store_true", help="list the sets and what is there")
    parser.add_argument(
        "--all",
        action="store_true",
        help=f"every set but the largest ({', '.join(sorted(LARGE))}: give their names)",
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"unknown data set {', '.join(unknown)}. Known: {', '.join(NAMES)}")
    if options.list:
        for name in NAMES:
            print(f"{name:20} {_state(name, options.root)}")
        return 0
    names = [name for name in NAMES if name not in LARGE] if options.all else []
    names += [name for name in options.names if name not in names]
    if not names:
        parser.error("name a data set, or use --all or --list")
    failed = [name for name in names if not _prepare(name, options.root)]
    if failed:
        print(f"Not ready: {', '.join(failed)}.", file=sys.stderr)
    return 1 if failed else 0


def _state(name: str, root: Path) -> str:
    """Say in a few words what is there of a set."""
    archive = root / f"{name}.npz"
    if archive.is_file():
        return f"ready ({archive.stat().st_size / 1e6:.1f} MB)"
    if name == MAG and find_raw(name, root) is not None:
        return "ready, in OGB's files"
    if name in OGB and find_raw(name, root) is not None:
        return "OGB's files are here, not converted yet"
    return "absent"


def _prepare(name: str, root: Path) -> bool:
    """Get one set ready and say what it is; False if that fails, with the reason on stderr."""
    print(f"{name}: {_state(name, root)} in {root}", flush=True)
    try:
        path = prepare(name, root)
        data = load(name, root=root)
    except (OSError, ValueError, TypeError, ImportError) as error:
        print(f"{name}: {error}{stale_cache(name, root)}", file=sys.stderr)
        return False
    x = data["paper"].x if name == MAG else data.x
    features = f"{x.size(1)} features" if x is not None else "no node features"
    checked = " (official checksums)" if name in CHECKSUMS and find_raw(name, root) else ""
    print(
        f"{name}: ready{checked}: {path}: {data.num_nodes:,} nodes, {data.num_edges:,} stored "
        f"edges, {features}, "
        f"{data.num_classes} classes, metric {data.metric}"
    )
    return True


if __name__ == "__main__":
    sys.exit(main())
