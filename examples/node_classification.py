"""Trains a graph transformer on a graph whose nodes have classes: any set that
``graphattn.data.load`` knows.

    python examples/node_classification.py --dataset cora --download
    python examples/node_classification.py --dataset tolokers --root FOLDER --runs 10

Sets with several official splits use one for each run. The test metric is read at the epoch with
the best validation metric.
"""

from __future__ import annotations

import argparse
from typing import Any

from graphattn import keep_pages
from training import run


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description="Train a graph transformer for node classification, full batch."
    )
    parser.add_argument("--dataset", required=True, help="for instance cora, tolokers, karate")
    return run(parser, argv)


if __name__ == "__main__":
    keep_pages()  # of tensors that are freed: on a CPU, twice as fast
    main()
